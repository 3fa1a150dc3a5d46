// log.stats in whole runs: gates.csv, k_stats.csv, heartbeats and TensorBoard; the same bits with and without
// statistics; several ranks. Gates that collapse or die are reported, and stop the run if the config says so.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <set>
#include <sstream>

#include "io/data/loader.h"
#include "io/json_config.h"
#include "io/safetensors.h"
#include "tests/support/heartbeats.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/inference.h"
#include "train/monitor/selection_sample.h"
#include "train/run/data_source.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

std::string stats_args(const std::string& out, const std::string& more) {
  return "train " + kTiny + " --set runtime.device=cpu --set log.out_dir=" + out + " " + more;
}
Outcome run(const std::string& out, const std::string& more = "", const std::string& environment = "") {
  const Outcome outcome = run_program(stats_args(out, more), environment);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return outcome;
}

struct Table {
  std::string header;
  std::vector<std::vector<double>> rows;
};
Table stats_table(const std::string& path) {
  Table out;
  std::istringstream in(read_text(path));
  std::getline(in, out.header);
  for (std::string line; std::getline(in, line);) {
    std::istringstream cells(line);
    out.rows.emplace_back();
    for (std::string cell; std::getline(cells, cell, ',');) out.rows.back().push_back(std::stod(cell));
  }
  return out;
}

// Sets one layer's gate bias in a checkpoint's weights, and removes the checksums.
void set_gate_bias(const std::string& path, int layer, const std::vector<float>& bias) {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<TensorSpec> specs;
  {
    const SafetensorsFile file(path);
    for (const TensorEntry& entry : file.entries()) {
      bytes.push_back(file.read(entry));
      TensorSpec spec{.name = entry.name, .dtype = *entry.engine_dtype(), .shape = {}};
      for (const int64_t size : entry.shape) spec.shape.dim[spec.shape.rank++] = size;
      if (entry.name == "blocks." + std::to_string(layer) + ".attn.gate.fc2.bias") {
        REQUIRE(bytes.back().size() == bias.size() * sizeof(float));
        std::memcpy(bytes.back().data(), bias.data(), bytes.back().size());
      }
      specs.push_back(std::move(spec));
    }
  }
  std::vector<HostTensor> tensors;
  for (size_t i = 0; i < specs.size(); ++i) tensors.push_back({specs[i], bytes[i].data()});
  write_safetensors(path, tensors);
}

}  // namespace

TEST_CASE("stats: a run's gates.csv, k_stats.csv and heartbeats", "[stats]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  run(out, "--set log.every=3 --set train.lr=0.05 --set train.accumulate_grad_batches=2");
  const Table gates = stats_table(out + "/gates.csv"), lists = stats_table(out + "/k_stats.csv");
  CHECK(gates.header == "step,layer,entropy_mean,entropy_min,max_mean,max_max,collapse_frac,cmp,sel,win");
  CHECK(lists.header == "step,layer,k_mean,k_max,rows,pct_at_max");
  REQUIRE(gates.rows.size() == 7 * 2);  // rows for steps 3, 6, ..., 18 and the last step, two layers
  REQUIRE(lists.rows.size() == 7 * 2);
  // A row lists up to 4 blocks (8 tokens each), its own included. Up to token 31, token t sees all t + 1 tokens; later
  // ones see 24 tokens and their own block's.
  double k_mean = 0, at_max = 0;
  for (int t = 0; t < 48; ++t) {
    const int k = std::min(t + 1, 24 + t % 8 + 1);
    k_mean += k / 48.0, at_max += (k == 32) / 48.0;
  }
  for (size_t i = 0; i < gates.rows.size(); ++i) {
    const std::vector<double>&g = gates.rows[i], &k = lists.rows[i];
    const double step = i / 2 < 6 ? 3.0 * static_cast<double>(i / 2 + 1) : 20;
    CHECK(g[0] == step);
    CHECK(k[0] == step);
    CHECK(g[1] == i % 2);
    CHECK(k[1] == i % 2);
    CHECK(g[2] <= 1.0986131);
    CHECK(g[3] <= g[2]);
    CHECK(g[4] >= 0.333333);
    CHECK(g[5] >= g[4]);
    CHECK(g[7] + g[8] + g[9] == Approx(1).margin(2e-6));
    CHECK(k[2] == Approx(k_mean).margin(5e-5));
    CHECK(k[3] == 32);
    CHECK(k[4] == 2 * 2 * 48 * 2);
    CHECK(k[5] == Approx(at_max).margin(1e-6));
  }
  CHECK(gates.rows.back()[2] < 1.098);  // below ln 3 = 1.0986: the gates differ from 1/3
  const std::vector<Json> beats = heartbeats(out, 0, "step_end");
  REQUIRE(beats.size() == 20);
  CHECK(beats[0]["gate_entropy_mean"].get<double>() == Approx(std::log(3.0)).epsilon(1e-6));
  CHECK(beats[0]["gate_entropy_min"].get<double>() == Approx(std::log(3.0)).epsilon(1e-6));
  const Json& beat = beats[17];  // step 18's heartbeat has the means over both layers
  const std::vector<double>&a = gates.rows[10], &b = gates.rows[11];
  CHECK(beat["gate_entropy_mean"].get<double>() == Approx((a[2] + b[2]) / 2).margin(1e-6));
  CHECK(beat["gate_entropy_min"].get<double>() == Approx(std::min(a[3], b[3])).margin(1e-6));
  CHECK(beat["gate_max_mean"].get<double>() == Approx((a[4] + b[4]) / 2).margin(1e-6));
  CHECK(beat["gate_max_gate"].get<double>() == Approx(std::max(a[5], b[5])).margin(1e-6));
  CHECK(beat["gate_collapse_frac"].get<double>() == Approx((a[6] + b[6]) / 2).margin(1e-6));
  REQUIRE(beat["gate_branch_shares"].size() == 3);
  for (size_t i = 0; i < 3; ++i)
    CHECK(beat["gate_branch_shares"][i].get<double>() == Approx((a[7 + i] + b[7 + i]) / 2).margin(1e-6));
  CHECK(beat["sel_k_mean"].get<double>() == Approx(k_mean).epsilon(1e-9));
  CHECK(beat["sel_k_max"] == 32);
  CHECK(beat["sel_rows"] == 2 * 2 * 2 * 48 * 2);
  CHECK(beat["sel_pct_at_max"].get<double>() == Approx(at_max).epsilon(1e-9));
  for (const char* share : {"sel_overlap", "sel_forced_frac"}) {
    CHECK(beat[share].get<double>() > 0.3);
    CHECK(beat[share].get<double>() < 1);
  }
  std::string events;
  for (const fs::directory_entry& entry : fs::directory_iterator(out + "/tb")) events += read_text(entry.path());
  for (const char* tag :
       {"watch_gates/layer00/entropy_mean", "watch_gates/layer01/win", "watch_selection/layer01/k_mean",
        "watch_selection/layer00/overlap", "watch_gates/entropy_mean_of_layers"}) {
    INFO(tag);
    CHECK(has(events, tag));
  }
  // The report draws both as heat maps.
  REQUIRE(run_program("report " + out).exit_code == 0);
  const std::string page = read_text(out + "/report.html");
  CHECK(has(page, "\"gates\":{\"entropy_mean\":{\"steps\":[3.0,6.0,"));
  CHECK(has(page, "\"selection\":{\"k_mean\":{\"steps\":[3.0,6.0,"));
}

TEST_CASE("stats: weights have the same bits with and without statistics; NSA_DISABLE_AUX_STATS", "[stats]") {
  const TemporaryFolder folder;
  const std::string few = "--set train.steps=4 --set train.lr=0.05 --set train.eval_every=2";
  run(folder.file("with"), few);
  run(folder.file("without"), few + " --set log.stats=false");
  run(folder.file("variable"), few, "NSA_DISABLE_AUX_STATS=1");
  run(folder.file("kept"), few, "NSA_DISABLE_AUX_STATS=0");
  const std::string weights = read_text(folder.file("with/model.safetensors"));
  for (const char* other : {"without", "variable", "kept"}) {
    INFO(other);
    const bool kept = std::string(other) == "kept";
    const std::string out = folder.file(other);
    CHECK(read_text(out + "/model.safetensors") == weights);
    CHECK(Json::parse(read_text(out + "/config.json"))["log"]["stats"] == kept);
    for (const char* name : {"gates.csv", "k_stats.csv"}) CHECK(fs::exists(out + "/" + name) == kept);
    CHECK(heartbeats(out, 0, "step_end").at(0).contains("gate_entropy_mean") == kept);
    CHECK(heartbeats(out, 0, "step_end").at(0).contains("sel_k_mean") == kept);
  }
  run(folder.file("no_csv"), few + " --set log.csv=false");
  CHECK_FALSE(fs::exists(folder.file("no_csv/gates.csv")));
  CHECK(heartbeats(folder.file("no_csv"), 0, "step_end").at(0).contains("gate_entropy_mean"));
}

TEST_CASE("stats: on a resume rows past the checkpoint are cut and written again", "[stats]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), few = "--set train.steps=6 --set train.save_every=2 --set train.lr=0.05";
  run(out, few);
  const std::string gates = read_text(out + "/gates.csv"), lists = read_text(out + "/k_stats.csv");
  run(out, few + " --overwrite --resume " + out + "/checkpoints/step_2");
  CHECK(read_text(out + "/gates.csv") == gates);
  CHECK(read_text(out + "/k_stats.csv") == lists);
}

TEST_CASE("stats: an evaluation writes a sample of its queries' selection lists", "[stats]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), file = out + "/selection_sample.json";
  const std::string few =
      "--set train.lr=0.05 --set train.steps=15 --set train.save_every=10 --set train.eval_every=4 ";
  run(out, few);
  // Compares the sample with the lists that the final weights select for the same sequence.
  LoadedModel loaded({.checkpoint = out, .device = Device::cpu(), .batch = 2, .training = true});
  const Batch batch = validation_batch(open_data(loaded.config()).val, 48, 2, 0);
  loaded.set_tokens(batch.tokens);
  loaded.model().forward(loaded.ctx(), loaded.activations());
  const Json sample = Json::parse(read_text(file));
  CHECK(sample["step"] == 15);
  CHECK(sample["seq_len"] == 48);
  CHECK(sample["l_sel"] == Json::parse("[8,8]"));
  REQUIRE(sample["queries"].size() == 48);
  REQUIRE(sample["lists"].size() == 2);
  bool chooses = false;
  for (int64_t layer = 0; layer < 2; ++layer)
    for (int64_t group = 0; group < 2; ++group)
      for (int64_t t = 0; t < 48; ++t) {
        INFO("layer " << layer << " group " << group << " query " << t);
        CHECK(sample["queries"][static_cast<size_t>(t)] == t);
        const auto list =
            sample["lists"][static_cast<size_t>(layer)][static_cast<size_t>(group)][static_cast<size_t>(t)]
                .get<std::vector<int64_t>>();
        std::vector<int64_t> known;
        const Tensor row = loaded.activations().layer(layer).attention.nsa.block_index[0][t][group];
        for (int64_t i = 0; i < 4 && row.ptr<int32_t>()[i] >= 0; ++i) known.push_back(row.ptr<int32_t>()[i]);
        CHECK(list == known);
        const int64_t cur = t / 8;
        std::set<int64_t> forced = {0, cur, std::max<int64_t>(0, cur - 1)};
        for (const int64_t block : forced) CHECK(std::count(list.begin(), list.end(), block) == 1);
        CHECK(std::adjacent_find(list.begin(), list.end(), std::greater_equal<>()) == list.end());
        chooses = chooses || list.size() > forced.size();
      }
  CHECK(chooses);
  // A resume from an earlier step removes the sample, and so does --overwrite.
  for (const char* end : {"/checkpoints/step_15", "/model.safetensors", "/metrics.json"}) fs::remove_all(out + end);
  run(out, few + "--set train.eval_every=0 --set train.steps=12 --resume " + out);
  CHECK_FALSE(fs::exists(file));
  write_text(file, sample.dump());
  run(out, "--set train.steps=1 --overwrite");
  CHECK_FALSE(fs::exists(file));
  for (const std::string without : {"--set model.attention=dense", "--set log.stats=false"}) {
    run(out, "--overwrite --set train.steps=1 --set train.eval_every=1 " + without);
    CHECK_FALSE(fs::exists(file));
  }
}

TEST_CASE("stats: a sample of lists has few queries, at any sequence length", "[stats]") {
  for (const int64_t seq_len : {1, 2, 48, 127, 128, 129, 1000, 2048, 65536, 1 << 24}) {
    INFO(seq_len);
    const std::vector<int64_t> queries = sampled_queries(seq_len, 128);
    CHECK(queries.size() <= 128);
    CHECK(queries.size() > static_cast<size_t>(std::min<int64_t>(seq_len, 128) / 4));
    CHECK(queries.back() == seq_len - 1);
    CHECK(queries.front() >= 0);
    if (queries.size() > 1) CHECK((queries[1] - queries[0]) % 2 == 1);
    for (size_t i = 1; i < queries.size(); ++i) CHECK(queries[i] - queries[i - 1] == queries[1] - queries[0]);
  }
  CHECK(sampled_queries(65536, 1) == std::vector<int64_t>{65535});
}

TEST_CASE("stats: dense attention has no rows", "[stats]") {
  const TemporaryFolder folder;
  run(folder.file("dense"), "--set model.attention=dense --set train.steps=2");
  CHECK(stats_table(folder.file("dense/gates.csv")).rows.empty());
  CHECK(stats_table(folder.file("dense/k_stats.csv")).rows.empty());
  CHECK_FALSE(heartbeats(folder.file("dense"), 0, "step_end").at(0).contains("gate_entropy_mean"));
}

TEST_CASE("stats: forced and uniform gates have the configured values, and are no anomaly", "[stats]") {
  const TemporaryFolder folder;
  const char* const branches[] = {"cmp", "sel", "win"};
  for (size_t i = 0; i < 3; ++i) {
    const Outcome outcome =
        run(folder.file(branches[i]), "--set train.steps=4 --set nsa.force_branch=" + std::string(branches[i]));
    CHECK_FALSE(has(outcome.output, "anomaly gate_collapse"));
    for (const std::vector<double>& g : stats_table(folder.file(branches[i]) + "/gates.csv").rows) {
      for (size_t b = 0; b < 3; ++b) CHECK(g[7 + b] == (b == i));
      CHECK(g[2] == 0);
      CHECK(g[5] == 1);
      CHECK(g[6] == 1);
    }
  }
  run(folder.file("uniform"), "--set train.steps=4 --set nsa.uniform_gate=true --set nsa.gate=sigmoid");
  for (const std::vector<double>& g : stats_table(folder.file("uniform/gates.csv")).rows) {
    CHECK(g[2] == Approx(std::log(3.0)).margin(1e-6));
    CHECK(g[5] == Approx(1.0 / 3).margin(1e-6));
    CHECK(g[6] == 0);
  }
}

// A run that saves at step 2 and is resumed with another gate bias in layer 1.
struct BiasedRun {
  std::string out;
  Outcome outcome;
};
BiasedRun run_with_bias(const std::string& out, const std::vector<float>& bias, const std::string& more) {
  const std::string few = "--set train.lr=1e-5 --set train.save_every=2 " + more + " --set train.steps=";
  run(out, few + "2");
  set_gate_bias(out + "/checkpoints/step_2/model.safetensors", 1, bias);
  Json state = read_json_file(out + "/checkpoints/step_2/state.json");
  state.erase("files");  // checksums of the old weights
  write_text(out + "/checkpoints/step_2/state.json", state.dump());
  return {out, run_program(stats_args(out, few + "12 --resume " + out + "/checkpoints/step_2"))};
}

// The bias opens only one branch in layer 1's gate, for every input.
TEST_CASE("stats: a collapsed gate is reported with its layer, and stops the run if configured", "[stats]") {
  const TemporaryFolder folder;
  for (const bool stop : {false, true}) {
    const auto [out, outcome] =
        run_with_bias(folder.file(stop ? "stop" : "report"), {0, 12, 0}, stop ? "--set log.on_anomaly=stop" : "");
    INFO(outcome.output);
    CHECK(outcome.exit_code == (stop ? 1 : 0));
    const Json anomaly = heartbeats(out, 0, "anomaly").at(0);
    CHECK(anomaly["type"] == "gate_collapse");
    CHECK(anomaly["step"] == 5);  // reported at the third step in a row
    CHECK(has(anomaly["text"].get<std::string>(), "gates have collapsed onto one branch: layer 1 (entropy 0.0"));
    CHECK_FALSE(has(anomaly["text"].get<std::string>(), "layer 0"));
    CHECK(has(outcome.output, "anomaly gate_collapse: step 5: "));
    const Table gates = stats_table(out + "/gates.csv");
    CHECK(gates.rows.at(4)[6] == 0);  // rows at step 3: layer 0, then layer 1
    CHECK(gates.rows.at(5)[6] == 1);
    CHECK(gates.rows.at(5)[8] > 0.99);
    CHECK(fs::exists(out + "/.anomaly_type") == stop);
    if (stop) CHECK(has(read_text(out + "/.anomaly_type"), "gate_collapse\n"));
    CHECK(has(outcome.output, "stopped by an anomaly") == stop);
  }
}

// The bias closes layer 1's three gates. Only sigmoid gates can be closed together.
TEST_CASE("stats: dead gates are an anomaly of their own, and their shares are NaN", "[stats]") {
  const TemporaryFolder folder;
  const auto [out, outcome] = run_with_bias(folder.file("run"), {-200, -200, -200}, "--set nsa.gate=sigmoid");
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
  const std::vector<Json> anomalies = heartbeats(out, 0, "anomaly");
  REQUIRE(anomalies.size() == 2);
  CHECK(anomalies[0]["type"] == "zero_gradients");  // closed gates pass no gradient
  const Json& anomaly = anomalies[1];
  CHECK(anomaly["type"] == "gate_dead");
  CHECK(anomaly["step"] == 5);  // reported at the third step in a row
  CHECK(anomaly["text"] == "step 5: gates are dead, all three branches off: layer 1 (100% of its rows)");
  CHECK(has(outcome.output, "anomaly gate_dead: step 5: "));
  const Table gates = stats_table(out + "/gates.csv");
  for (size_t column = 2; column < 10; ++column) {
    CHECK(std::isfinite(gates.rows.at(4)[column]));  // rows at step 3: layer 0, then layer 1
    CHECK(std::isnan(gates.rows.at(5)[column]));
  }
  const std::string text = read_text(out + "/gates.csv");
  CHECK(has(text, "\n3,1,nan,nan,nan,nan,nan,nan,nan,nan\n"));  // not -nan, which some readers reject
  const Json beat = heartbeats(out, 0, "step_end").at(2);
  CHECK(beat["step"] == 3);
  CHECK(beat["gate_dead_frac"] == 0.5);
  CHECK(beat["gate_collapse_frac"] == 0);
  // All rows in layer 1 are dead, so the mean over both layers is layer 0's.
  CHECK(beat["gate_entropy_mean"].get<double>() == Approx(gates.rows[4][2]).margin(1e-6));
  CHECK(heartbeats(out, 0, "step_end").at(1)["gate_dead_frac"] == 0);
  REQUIRE(run_program("report " + out).exit_code == 0);
  CHECK(has(read_text(out + "/report.html"), "\"gate_dead_frac\":[[1.0,0.0],[2.0,0.0],[3.0,0.5]"));
}

TEST_CASE("stats: two ranks write the rows of one rank that processes all sequences", "[stats][dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string few = "--set train.steps=3 --set train.lr=0.05 --set train.micro_batch_size=";
  run(folder.file("one"), few + "4");
  const Outcome two = run_ranks(2, stats_args(folder.file("two"), few + "2"));
  INFO(two.output);
  REQUIRE(two.exit_code == 0);
  for (const char* name : {"/gates.csv", "/k_stats.csv"}) {
    const Table one = stats_table(folder.file("one") + name), both = stats_table(folder.file("two") + name);
    REQUIRE(one.rows.size() == 6);
    REQUIRE(both.rows.size() == 6);
    for (size_t i = 0; i < 6; ++i)
      for (size_t j = 0; j < one.rows[i].size(); ++j) CHECK(both.rows[i][j] == Approx(one.rows[i][j]).margin(1e-4));
  }
  const auto rank = [&](int r) { return heartbeats(folder.file("two"), r, "step_end").at(2); };
  for (const char* key : {"gate_entropy_mean", "gate_branch_shares", "sel_rows", "sel_overlap"})
    CHECK(rank(0)[key] == rank(1)[key]);
  CHECK(rank(0)["sel_rows"] == 2 * 4 * 48 * 2);
}
