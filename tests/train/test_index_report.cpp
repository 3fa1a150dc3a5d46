// What a run with a taught index records of it (log.stats): index.csv, index_recall.csv, heartbeats and TensorBoard;
// the same bits with and without; resumes, dense stages, several ranks. Whole runs.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "io/data/loader.h"
#include "model/index_sample.h"
#include "tests/support/dist_run.h"
#include "tests/support/heartbeats.h"
#include "tests/support/test.h"
#include "train/inference.h"
#include "train/monitor/selection_sample.h"
#include "train/run/data_source.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

const std::string kIndex =
                      "--set nsa.selector=index --set nsa.d_index=4 --set train.lr=0.02 --set train.warmup_steps=0 ",
                  kOneSoftmax = kIndex + "--set nsa.branches=sel --set nsa.init_blocks=0 --set nsa.local_blocks=1 ";

std::string train_index(const std::string& out, const std::string& keys, int ranks = 1) {
  const std::string args = train_args(out, keys);
  const Outcome outcome = ranks == 1 ? run_program(args) : run_ranks(ranks, args);
  INFO("triad " << args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return out;
}

// A table's rows after its header, each as its fields.
std::vector<std::vector<std::string>> table(const std::string& path, const std::string& header) {
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> all = lines(path);
  INFO(path);
  REQUIRE_FALSE(all.empty());
  CHECK(all.front() == header);
  for (size_t i = 1; i < all.size(); ++i) {
    std::istringstream in(all[i] + ",");
    rows.emplace_back();
    for (std::string field; std::getline(in, field, ',');) rows.back().push_back(field);
  }
  return rows;
}
std::vector<std::vector<std::string>> by_layer(const std::string& out) {
  return table(out + "/index.csv", "step,layer,index_loss,recall,max_logit");
}
std::vector<std::vector<std::string>> by_distance(const std::string& out) {
  return table(out + "/index_recall.csv", "step,layer,distance,mass,recall");
}

// The sample that the run's last evaluation should have made, with its final weights.
std::vector<IndexRecall> last_sample(const std::string& out, bool dense = false) {
  LoadedModel loaded({.checkpoint = out, .device = Device::cpu(), .batch = 2, .training = true});
  const Batch batch = validation_batch(open_data(loaded.config()).val, 48, 2, 0);
  std::vector<int32_t> rows;  // each position, in the first sequence and the second in turn
  for (int32_t t = 0; t < 48; ++t) rows.push_back(t % 2 * 48 + t);
  Runtime memory({.device = Device::cpu(), .arena_bytes = 8 << 20});
  IndexSample sample(memory.arena(), loaded.config().model, DType::f32);
  sample.begin(loaded.ctx(), rows);
  loaded.set_tokens(batch.tokens);
  loaded.model().forward(loaded.ctx(), loaded.activations(), nullptr, nullptr, [&](int64_t layer, LayerActivations&) {
    sample.add(loaded.ctx(), layer, loaded.activations(), dense);
  });
  return sample.read(loaded.ctx());
}

}  // namespace

TEST_CASE("index report: losses at log steps, recall and largest logits at evaluations", "[stats]") {
  const TemporaryFolder folder;
  for (const auto& [name, keys] :
       {std::pair{"three", kIndex}, {"sel", kOneSoftmax + "--set runtime.recompute=block "}}) {
    INFO(name);
    const std::string out =
        train_index(folder.file(name), keys +
                                           "--set train.steps=10 --set log.every=3 --set "
                                           "train.eval_every=4 --set train.accumulate_grad_batches=2");
    const std::vector<std::vector<std::string>> rows = by_layer(out);
    std::vector<std::pair<int, int>> places;
    std::map<int, double> sums;
    for (const std::vector<std::string>& row : rows) {
      REQUIRE(row.size() == 5);
      const int step = std::stoi(row[0]);
      places.emplace_back(step, std::stoi(row[1]));
      sums[step] += std::stod(row[2]);
      CHECK(std::stod(row[2]) > 0);
      const bool evaluated = step % 4 == 0 || step == 10;
      CHECK(row[3].empty() == !evaluated);
      CHECK(row[4].empty() == !evaluated);
      if (!evaluated) continue;
      CHECK(std::stod(row[3]) > 0.3);
      CHECK(std::stod(row[3]) < 1);
      CHECK(std::stod(row[4]) > 0);
    }
    const std::vector<std::pair<int, int>> expected = {{3, 0}, {3, 1}, {4, 0}, {4, 1}, {6, 0},  {6, 1},
                                                       {8, 0}, {8, 1}, {9, 0}, {9, 1}, {10, 0}, {10, 1}};
    CHECK(places == expected);
    for (const Json& beat : heartbeats(out, 0, "step_end"))
      if (const auto sum = sums.find(beat["step"].get<int>()); sum != sums.end())
        CHECK(sum->second == Approx(beat["index_loss"].get<double>()).margin(2e-6));

    const std::vector<IndexRecall> last = last_sample(out);
    std::vector<std::vector<std::string>> distances = by_distance(out);
    std::set<std::string> steps;
    for (const std::vector<std::string>& row : distances) steps.insert(row[0]);
    CHECK(steps == std::set<std::string>{"10", "4", "8"});
    std::erase_if(distances, [](const auto& row) { return row[0] != "10"; });
    REQUIRE(last.size() == 2);
    REQUIRE(distances.size() == 2 * 7);  // distances 0, 1, 2, 4, 8, 16, 32 in rows of 48 tokens
    for (size_t layer = 0; layer < 2; ++layer) {
      const std::vector<std::string>& row = rows[rows.size() - 2 + layer];
      CHECK(std::stod(row[3]) == Approx(last[layer].recall).margin(2e-6));
      CHECK(std::stod(row[4]) == Approx(last[layer].max_logit).margin(1e-4));
      double mass = 0, held = 0;
      for (size_t i = 0; i < 7; ++i) {
        const std::vector<std::string>& at = distances[layer * 7 + i];
        CHECK(std::stoul(at[1]) == layer);
        CHECK(std::stol(at[2]) == (i == 0 ? 0 : 1 << (i - 1)));
        CHECK(std::stod(at[4]) == Approx(last[layer].distances[i].recall).margin(2e-6));
        mass += std::stod(at[3]), held += std::stod(at[3]) * std::stod(at[4]);
      }
      CHECK(mass == Approx(1).margin(1e-5));
      CHECK(held == Approx(last[layer].recall).margin(1e-5));
    }
    const std::vector<Json> evaluations = heartbeats(out, 0, "evaluation");
    REQUIRE(evaluations.size() == 3);
    const Json& beat = evaluations.back();
    CHECK(beat["step"] == 10);
    CHECK(beat["index_recall_mean"].get<double>() == Approx((last[0].recall + last[1].recall) / 2).margin(1e-6));
    CHECK(beat["index_recall_min"].get<double>() == Approx(std::min(last[0].recall, last[1].recall)).margin(1e-6));
    CHECK(beat["max_logit"].get<double>() == Approx(std::max(last[0].max_logit, last[1].max_logit)).margin(1e-6));
    std::string events;
    for (const fs::directory_entry& entry : fs::directory_iterator(out + "/tb"))
      if (entry.is_regular_file()) events += read_text(entry.path().string());
    for (const char* tag : {"watch_index/layer00/loss", "watch_index/layer01/recall", "watch_index/layer01/max_logit",
                            "watch_index/recall_mean", "train/loss_index"})
      CHECK(has(events, tag));
    // Without gates there are no tables and events of gates.
    CHECK(fs::exists(out + "/gates.csv") == (std::string(name) == "three"));
    CHECK(has(events, "watch_gates/") == (std::string(name) == "three"));
    CHECK(fs::exists(out + "/k_stats.csv"));
  }
  train_index(folder.file("compressed"), "--set train.steps=2 --set train.eval_every=2");
  for (const char* file : {"index.csv", "index_recall.csv"}) CHECK_FALSE(fs::exists(folder.file("compressed/") + file));
  const std::vector<Json> compressed = heartbeats(folder.file("compressed"), 0, "evaluation");
  REQUIRE(compressed.size() == 1);
  CHECK(compressed[0].contains("val_loss"));
  CHECK_FALSE(compressed[0].contains("index_recall_mean"));
}

TEST_CASE("index report: losses and weights have the same bits with and without it", "[stats]") {
  const TemporaryFolder folder;
  for (const std::string& keys : {kOneSoftmax + "--set runtime.recompute=block ", kIndex}) {
    const std::string few = keys + "--set train.steps=6 --set train.eval_every=2 --overwrite ";
    const std::string with = train_index(folder.file("with"), few),
                      without = train_index(folder.file("without"), few + "--set log.stats=false ");
    CHECK(same_file(with + kWeights, without + kWeights));
    CHECK(same_file(with + "/val.csv", without + "/val.csv"));
    for (const char* file : {"/index.csv", "/index_recall.csv"}) {
      CHECK(fs::exists(with + file));
      CHECK_FALSE(fs::exists(without + file));
    }
    CHECK(column(with + "/training.csv", "loss") == column(without + "/training.csv", "loss"));
    CHECK(heartbeats(without, 0, "step_end").back()["index_loss"].get<double>() > 0);
  }
}

TEST_CASE("index report: a resume continues its tables without repeated rows", "[stats]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), few = kOneSoftmax +
                                                    "--set train.steps=7 --set train.eval_every=3 --set log.every=2 "
                                                    "--set train.save_every=3 ";
  train_index(out, few);
  const std::string layers = read_text(out + "/index.csv"), distances = read_text(out + "/index_recall.csv");
  CHECK(std::count(layers.begin(), layers.end(), '\n') == 1 + 2 * 5);  // steps 2, 3, 4, 6, 7
  train_index(out, few + "--overwrite --resume " + out + "/checkpoints/step_3");
  CHECK(read_text(out + "/index.csv") == layers);
  CHECK(read_text(out + "/index_recall.csv") == distances);
  // The last checkpoint is whole and the final weights are missing: the run repeats the last evaluation.
  fs::remove(out + kWeights);
  train_index(out, few + "--resume " + out);
  CHECK(read_text(out + "/index.csv") == layers);
  CHECK(read_text(out + "/index_recall.csv") == distances);
  // Tables that the resumed run does not write are cut, too.
  train_index(out, few + "--set log.stats=false --overwrite --resume " + out + "/checkpoints/step_3");
  for (const std::vector<std::string>& row : by_layer(out)) CHECK(std::stoi(row[0]) <= 3);
  for (const std::vector<std::string>& row : by_distance(out)) CHECK(std::stoi(row[0]) <= 3);
}

TEST_CASE("index report: a dense warm-up shows the index learn before it is used", "[stats]") {
  const TemporaryFolder folder;
  const std::string dense =
      R"(--set 'train.stages=[{"steps": 20, "attention": "dense"}, {"steps": 2}]' --set train.steps=22 )";
  for (const std::string& keys : {kIndex, kOneSoftmax}) {
    const std::string out =
        train_index(folder.file("run"), keys + dense + "--set train.eval_every=10 --set log.every=1 --overwrite");
    const std::vector<std::vector<std::string>> rows = by_layer(out);
    REQUIRE(rows.size() == 2 * 22);
    for (const std::vector<std::string>& row : rows) {
      CHECK(std::stod(row[2]) > 0);
      CHECK(row[3].empty() == (std::stoi(row[0]) % 10 != 0 && std::stoi(row[0]) != 22));
    }
    CHECK(by_distance(out).size() == 2 * 7 * 3);
  }
  // Lists are the index's in a dense stage too; with three branches the keys are those of dense passes.
  const std::string out =
      train_index(folder.file("only"), kIndex + R"(--set 'train.stages=[{"steps": 20, "attention": "dense"}]' )" +
                                           "--set train.eval_every=20");
  const std::vector<IndexRecall> last = last_sample(out, /*dense=*/true), other = last_sample(out);
  for (const std::vector<std::string>& row : by_layer(out)) {
    if (row[0] != "20") continue;
    const auto layer = static_cast<size_t>(std::stoi(row[1]));
    CHECK(std::stod(row[3]) == Approx(last[layer].recall).margin(2e-6));
    CHECK(std::stod(row[4]) == Approx(last[layer].max_logit).margin(1e-4));
    CHECK(std::abs(last[layer].recall - other[layer].recall) > 1e-5);
  }
}

TEST_CASE("index report: ranks' losses are summed; shared sequences have no recall", "[stats][dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string few = kOneSoftmax + "--set train.steps=3 --set train.eval_every=2 ";
  const std::string one = train_index(folder.file("one"), few + "--set train.accumulate_grad_batches=2"),
                    two = train_index(folder.file("two"), few + "--set dist.zero=3", 2),
                    context = train_index(folder.file("context"),
                                          few + "--set train.accumulate_grad_batches=2 --set dist.context=2", 2);
  const std::vector<std::vector<std::string>> expected = by_layer(one);
  REQUIRE(expected.size() == 2 * 3);
  for (const std::string& out : {two, context}) {
    INFO(out);
    const std::vector<std::vector<std::string>> rows = by_layer(out);
    REQUIRE(rows.size() == expected.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      CHECK(rows[i][0] == expected[i][0]);
      CHECK(rows[i][1] == expected[i][1]);
      CHECK(std::stod(rows[i][2]) == Approx(std::stod(expected[i][2])).epsilon(1e-4).margin(2e-6));
      const bool sampled = out == two && rows[i][0] != "1";
      CHECK(rows[i][3].empty() == !sampled);
      CHECK(rows[i][4].empty() == !sampled);
      if (sampled) CHECK(std::stod(rows[i][3]) == Approx(std::stod(expected[i][3])).epsilon(1e-3));
    }
  }
  CHECK(by_distance(two).size() == by_distance(one).size());
  CHECK(by_distance(context).empty());
}

TEST_CASE("index report: a run on a GPU has the CPU's values, and the same bits without them", "[stats][gpu]") {
  if (!require_gpu()) return;
  const TemporaryFolder folder;
  const std::string few =
      kOneSoftmax + "--set train.steps=6 --set train.eval_every=2 --set train.accumulate_grad_batches=2 ";
  const auto on_gpu = [&](const std::string& name, const std::string& more) {
    const Outcome outcome =
        run_program(train_on(folder.file(name), "cuda", few + "--set runtime.cuda_graph=true " + more));
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return folder.file(name);
  };
  const std::string cpu = train_index(folder.file("cpu"), few), gpu = on_gpu("gpu", ""),
                    without = on_gpu("without", "--set log.stats=false");
  CHECK(same_file(gpu + kWeights, without + kWeights));
  CHECK(same_file(gpu + "/val.csv", without + "/val.csv"));
  const std::vector<std::vector<std::string>> expected = by_layer(cpu), rows = by_layer(gpu);
  REQUIRE(rows.size() == expected.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    CHECK(std::stod(rows[i][2]) == Approx(std::stod(expected[i][2])).epsilon(0.02).margin(1e-5));
    REQUIRE(rows[i][3].empty() == expected[i][3].empty());
    if (rows[i][3].empty()) continue;
    CHECK(std::stod(rows[i][3]) == Approx(std::stod(expected[i][3])).epsilon(0.02));
    CHECK(std::stod(rows[i][4]) == Approx(std::stod(expected[i][4])).epsilon(0.02).margin(1e-3));
  }
  CHECK(by_distance(gpu).size() == by_distance(cpu).size());
}
