// Whole runs with models that mix dense attention and NSA (model.dense_layers), whose layers have other options
// (nsa.layers) or that share keys and values (nsa.shared_kv): tables and samples hold the NSA layers only, resumes and
// ranks give the same weights. Runs in which NSA models begin with dense weights (train.init_from).
#include <fmt/format.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <set>
#include <sstream>

#include "io/json_config.h"
#include "io/safetensors.h"
#include "tests/support/dist_run.h"
#include "tests/support/heartbeats.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

const std::string kMixed = "--set model.n_layers=3 --set model.dense_layers=1:2 ";

// Four layers: NSA, a window alone, other strides, and one softmax over an index's blocks.
const std::string kLayered =
    "--set model.n_layers=4 --set 'nsa.layers=[{\"layers\":\"1:2\",\"branches\":\"win\",\"w\":9},"
    "{\"layers\":\"2:3\",\"l\":4,\"d\":2,\"l_sel\":4,\"n_sel\":7,\"w\":20},"
    "{\"layers\":\"3:4\",\"branches\":\"sel\",\"selector\":\"index\",\"d_index\":6,\"n_sel\":3}]' ";

// Runs the program, requires success and returns what it printed.
std::string succeed(const std::string& args) {
  const Outcome outcome = run_program(args);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return outcome.output;
}

// The values in column `layer` of a run's table.
std::set<std::string> layers_of(const std::string& path) {
  std::set<std::string> layers;
  const std::vector<std::string> all = lines(path);
  for (size_t i = 1; i < all.size(); ++i) {
    const size_t comma = all[i].find(',');
    layers.insert(all[i].substr(comma + 1, all[i].find(',', comma + 1) - comma - 1));
  }
  return layers;
}

double first_loss(const std::string& run) { return column(run + "/training.csv", "loss").at(1); }

}  // namespace

TEST_CASE("mixed layers: tables, samples, reports and gradients hold the NSA layers only", "[train][build]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const std::string log = succeed(train_args(
      out, kMixed + "--set train.steps=4 --set train.eval_every=2 --set train.save_every=4 --set runtime.strict=true "
                    "--set 'log.diagnostics=[\"ledger\"]' --set runtime.asserts=true"));
  CHECK(has(log, "NSA attention, dense in layers 1:2"));
  const std::set<std::string> expected = {"0", "2"};
  CHECK(layers_of(out + "/gates.csv") == expected);
  CHECK(layers_of(out + "/k_stats.csv") == expected);
  CHECK(Json::parse(read_text(out + "/selection_sample.json"))["layers"] == Json::parse("[0,2]"));
  CHECK(Json::parse(read_text(out + "/selection_sample.json"))["lists"].size() == 2);
  int steps = 0;
  for (const std::string& line : lines(out + "/heartbeat_rank0.jsonl")) {
    const Json beat = Json::parse(line);
    CHECK_FALSE(has(beat["msg"].get<std::string>(), "anomaly"));
    if (beat["msg"] != "step_end") continue;
    ++steps;
    CHECK(beat["gate_dead_frac"] == 0);
    CHECK(beat["sel_rows"] == 2 * 2 * 2 * 48);  // layers, groups, sequences, tokens
    CHECK(beat["gate_entropy_mean"].get<double>() > 1);
  }
  CHECK(steps == 4);
  CHECK(has(read_text(out + "/all_missing_params.txt"), "missing=0"));
  succeed("report " + out);
  const std::string page = read_text(out + "/report.html");
  CHECK(has(page, "\"layers\":[0.0,2.0]"));
  CHECK(has(page, "nsa, dense in layers 1:2"));

  std::string text;
  for (int i = 0; i < 100; ++i) text += fmt::format("line {} of a text\n", i);
  write_text(folder.file("text.txt"), text);
  succeed("data --tokenizer byte --input " + folder.file("text.txt") + " --out " + folder.file("data") +
          " --val-fraction 0");
  succeed("grads --device cpu --checkpoint " + out + " --tokens " + folder.file("data/train_000000.bin") +
          " --batch 2 --seq 60 --out " + folder.file("grads"));
  const SafetensorsFile grads(folder.file("grads"));
  std::set<std::string> lists;
  for (const TensorEntry& entry : grads.entries())
    if (entry.name.starts_with("gate/") || entry.name.starts_with("block_index/")) lists.insert(entry.name);
  CHECK(lists == std::set<std::string>{"block_index/0", "block_index/2", "gate/0", "gate/2"});

  const std::string plan = succeed("plan " + kTiny + " " + kMixed);
  CHECK(has(plan, "2 layers with NSA and 1 with dense attention"));
  const std::string fit = succeed("plan " + kTiny + " --fit --memory-gb 0.1 --set runtime.device=cpu " + kMixed);
  CHECK(has(fit, "these settings fit"));
}

TEST_CASE("mixed layers: with nsa.layers tables, samples and reports hold each layer with its own options", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const std::string log = succeed(train_args(
      out, kLayered + "--set train.steps=4 --set train.eval_every=2 --set train.save_every=4 --set runtime.strict=true "
                      "--set 'log.diagnostics=[\"ledger\"]' --set runtime.asserts=true"));
  CHECK(has(log,
            "NSA attention, win in layers 1:2, other options in layers 2:3, sel in layers 3:4, an index of width 6"));
  CHECK(layers_of(out + "/gates.csv") == std::set<std::string>{"0", "2"});
  CHECK(layers_of(out + "/k_stats.csv") == std::set<std::string>{"0", "2", "3"});
  CHECK(layers_of(out + "/index_recall.csv") == std::set<std::string>{"3"});
  // The last query of a sequence ends its block: n_sel blocks of l_sel tokens.
  const std::vector<std::string> rows = lines(out + "/k_stats.csv");
  for (const auto& [row, tokens] : {std::pair<size_t, const char*>{1, "32"}, {2, "28"}, {3, "24"}}) {
    std::istringstream fields(rows.at(row));
    std::string field;  // step, layer, k_mean, k_max
    for (int i = 0; i < 4; ++i) std::getline(fields, field, ',');
    CHECK(field == tokens);
  }
  const Json sample = Json::parse(read_text(out + "/selection_sample.json"));
  CHECK(sample["layers"] == Json::parse("[0,2,3]"));
  CHECK(sample["l_sel"] == Json::parse("[8,4,8]"));
  // The last query, at token 47: as many blocks as the layer lists, up to its own.
  const std::pair<size_t, int> lists[] = {{4, 5}, {7, 11}, {3, 5}};
  for (size_t i = 0; i < 3; ++i) {
    const Json& last = sample["lists"][i][1].back();
    CHECK(last.size() == lists[i].first);
    CHECK(last.back() == lists[i].second);
  }
  int steps = 0;
  for (const std::string& line : lines(out + "/heartbeat_rank0.jsonl")) {
    const Json beat = Json::parse(line);
    if (beat["msg"] != "step_end") continue;
    ++steps;
    CHECK(beat["gate_dead_frac"] == 0);
    CHECK(beat["sel_rows"] == 3 * 2 * 2 * 48);  // layers with lists, groups, sequences, tokens
  }
  CHECK(steps == 4);
  CHECK(has(read_text(out + "/all_missing_params.txt"), "missing=0"));
  succeed("report " + out);
  CHECK(has(read_text(out + "/report.html"), "nsa, win in layers 1:2, other options in layers 2:3, sel in layers 3:4"));
  CHECK(has(succeed("plan " + kTiny + " " + kLayered), "3 layers with NSA and 1 with a sliding window"));
  succeed("bench decode " + kTiny + " " + kLayered + "--set runtime.device=cpu --lengths 60 --runs 1 --csv " +
          folder.file("csv"));
  // A model without any list: no statistics of gates and lists.
  const std::string windows = folder.file("windows");
  succeed(train_args(windows, "--set nsa.branches=win --set nsa.w=9 --set train.steps=2 --set train.eval_every=1"));
  for (const char* name : {"gates.csv", "selection_sample.json"})
    CHECK_FALSE(std::filesystem::exists(windows + "/" + name));
  succeed("report " + windows);
}

TEST_CASE("mixed layers: a resume ends with the same bits, and recomputation gives the same bits", "[train]") {
  const TemporaryFolder folder;
  for (const std::string& more : {kMixed, kMixed + "--set nsa.shared_kv=true --set nsa.phi=mlp ", kLayered}) {
    const std::string steps = more + "--set train.steps=6 --set train.save_every=3 --overwrite ";
    const std::string whole = folder.file("whole"), halves = folder.file("halves"), again = folder.file("again");
    succeed(train_args(whole, steps));
    succeed(train_args(halves, steps));
    succeed(train_args(halves, steps + "--resume " + halves + "/checkpoints/step_3"));
    CHECK(same_file(whole + kWeights, halves + kWeights));
    succeed(train_args(again, steps + "--set runtime.recompute=0:1=block,1:3=attention"));
    CHECK(same_file(whole + kWeights, again + kWeights));
  }
  // A run does not resume with other dense layers, projections or options, because that would be another model.
  succeed(train_args(folder.file("whole"), kMixed + "--set nsa.shared_kv=true --set nsa.phi=mlp --set train.steps=6 "
                                                    "--set train.save_every=6 --overwrite"));
  for (const std::string other : {"--set model.dense_layers=0:1 ", "--set nsa.shared_kv=false ",
                                  "--set 'nsa.layers=[{\"layers\":\"0:1\",\"w\":9}]' "}) {
    const Outcome outcome = run_program(
        train_args(folder.file("whole"), kMixed + "--set nsa.shared_kv=true --set nsa.phi=mlp --set train.steps=8 " +
                                             other + "--resume " + folder.file("whole") + "/checkpoints/step_6"));
    INFO(outcome.output);
    CHECK(outcome.exit_code == 1);
    CHECK((has(outcome.output, "model.dense_layers is") || has(outcome.output, "nsa.shared_kv is") ||
           has(outcome.output, "nsa.layers is")));
  }
}

TEST_CASE("mixed layers: two ranks give the weights of one", "[train][dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  for (const std::string& more : {kMixed, kMixed + "--set nsa.shared_kv=true ", kLayered}) {
    const std::string few = more + "--set train.steps=5 --overwrite ";
    const std::string one = run(folder.file("1"), 1, few), two = run(folder.file("2"), 2, few);
    const Difference d = difference(one + kWeights, two + kWeights);
    CHECK(d.all < 1e-6);
    CHECK(d.worst < 1e-5);
    CHECK(same_file(two + kWeights, run(folder.file("zero"), 2, few + "--set dist.zero=1") + kWeights));
    CHECK(layers_of(two + "/gates.csv") == std::set<std::string>{"0", "2"});
  }
}

TEST_CASE("init_from: layers of three branches begin layers with one softmax", "[train]") {
  const TemporaryFolder folder;
  const std::string three = folder.file("three"), ours = folder.file("ours");
  succeed(train_args(three, "--set model.n_layers=4 --set train.steps=2 --set train.lr=0.02"));
  succeed(train_args(ours, kLayered + "--set train.steps=0 --set train.init_from=" + three));
  const auto before = tensors(three + kWeights), after = tensors(ours + kWeights);
  for (const auto& [name, values] : after) {
    INFO(name);
    if (has(name, "index_"))
      CHECK(has(name, "blocks.3."));
    else
      CHECK(values == before.at(name));
  }
  CHECK(after.contains("blocks.1.attn.k_win_proj.weight"));
  CHECK_FALSE(after.contains("blocks.1.attn.k_sel_proj.weight"));
  // Not the other way round: their compressed branch is missing.
  const Outcome outcome = run_program(train_args(folder.file("back"),
                                                 "--set model.n_layers=4 --set train.steps=0 "
                                                 "--set train.init_from=" +
                                                     ours));
  CHECK(outcome.exit_code == 1);
  CHECK(has(outcome.output, "blocks.1.attn.k_cmp_proj.weight"));
}

TEST_CASE("init_from: an NSA model begins with the weights of a dense one", "[train]") {
  const TemporaryFolder folder;
  const std::string dense = folder.file("dense");
  const std::string note = "no effect: model.attention is dense";
  CHECK_FALSE(
      has(succeed(train_args(dense, "--set model.attention=dense --set train.steps=8 --set train.lr=0.02")), note));
  const std::string from = "--set train.init_from=" + dense + " ";
  const std::string same = folder.file("same"), nsa = folder.file("nsa");
  // A dense control run may keep dense_layers from the NSA run's config, which is said to have no effect.
  CHECK(has(
      succeed(train_args(same, from + "--set model.attention=dense --set model.dense_layers=1:2 --set train.steps=1")),
      "model.dense_layers 1:2 has " + note));

  // Whichever branch attends to every token computes the dense model: the window branch with w >= T, the selected
  // branch with n_sel blocks that cover T.
  const double loss = first_loss(same);
  for (const std::string all :
       {"--set nsa.force_branch=win --set nsa.w=48 ", "--set nsa.force_branch=sel --set nsa.n_sel=6 ",
        "--set nsa.force_branch=win --set nsa.w=48 --set nsa.shared_kv=true ",
        "--set nsa.force_branch=win --set nsa.w=48 --set model.dense_layers=1:2 --set nsa.phi=mlp "}) {
    INFO(all);
    succeed(train_args(nsa, from + all + "--set train.steps=1 --overwrite"));
    CHECK(first_loss(nsa) == Approx(loss).epsilon(2e-6));
  }
  // With other weights the loss differs, so the equality above means something.
  succeed(train_args(nsa, "--set nsa.force_branch=win --set nsa.w=48 --set train.steps=1 --overwrite"));
  CHECK(std::abs(first_loss(nsa) - loss) > 1e-3);

  // The weights themselves: copies, fresh phi and fresh gates, or nsa.gate_init's.
  succeed(
      train_args(nsa, from + "--set train.steps=0 --set nsa.phi=conv --set 'nsa.gate_init=[0.1,0.3,0.6]' --overwrite"));
  auto theirs = tensors(dense + kWeights), ours = tensors(nsa + kWeights);
  for (const char* layer : {"blocks.0.attn.", "blocks.1.attn."}) {
    for (const char* letter : {"k", "v"})
      for (const char* branch : {"cmp", "sel", "win"})
        CHECK(ours.at(fmt::format("{}{}_{}_proj.weight", layer, letter, branch)) ==
              theirs.at(fmt::format("{}{}_win_proj.weight", layer, letter)));
    CHECK(ours.at(fmt::format("{}phi_k.weight", layer)) == std::vector<float>(8 * 8, 0.125f));
    const std::vector<float> bias = ours.at(fmt::format("{}gate.fc2.bias", layer));
    for (size_t i = 0; i < 3; ++i) CHECK(bias[i] == Approx(std::log(std::array{0.1, 0.3, 0.6}[i])).epsilon(1e-6));
    for (const float w : ours.at(fmt::format("{}gate.fc2.weight", layer))) CHECK(w == 0);
  }
  for (const auto& [name, values] : theirs) CHECK(ours.at(name) == values);

  const auto refused = [&](const std::string& more, const std::vector<std::string>& words) {
    const Outcome outcome = run_program(train_args(nsa, from + "--overwrite " + more));
    INFO(outcome.output);
    CHECK(outcome.exit_code == 1);
    for (const std::string& word : words) CHECK(has(outcome.output, word));
  };
  refused("--set model.dim=64", {dense + kWeights, "embed.weight is F32[256,32]"});
  refused("--set model.n_kv_groups=4",
          {"tensor blocks.0.attn.k_win_proj.weight is F32[16,32]", "blocks.0.attn.k_cmp_proj.weight is [32,32]"});
  refused("--set model.mlp=swiglu", {dense + kWeights, "mlp.fc1.weight is none of this model's"});
  refused("--set model.n_layers=3", {dense + kWeights, "blocks.2.norm1.weight"});
}

TEST_CASE("mixed layers: bad keys are errors that name key and value", "[train][build]") {
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {"model.dense_layers=1:9", {"model.dense_layers is \"1:9\"", "0:2"}},
      {"model.dense_layers=0:2", {"model.dense_layers is \"0:2\"", "every layer"}},
      {"model.dense_layers=1", {"model.dense_layers is 1", "a string"}},
      {"model.nope_layers=1:9", {"model.nope_layers is \"1:9\"", "0:2"}},
      {"model.nope_layers=0:1=mlp", {"model.nope_layers is \"0:1=mlp\"", "ranges of layers"}},
      {"model.rope_scaling=linear", {"model.rope_scaling is \"linear\"", "none|llama3|yarn"}},
      {"model.rope_factor=0.5", {"model.rope_factor is 0.5", "at least 1"}},
      {"model.rope_original_len=1.5", {"model.rope_original_len is 1.5", "an integer"}},
      {"nsa.gate_init=[0.1,-1,0.2]", {"nsa.gate_init is [0.1,-1,0.2]", "above 0"}},
      {"nsa.gate_init=0.1", {"nsa.gate_init is 0.1", "a list of numbers"}},
      {"nsa.gate_init=[0.1,0.2]", {"nsa.gate_init is [0.1, 0.2]", "three numbers"}},
      {"nsa.shared_kv=1", {"nsa.shared_kv is 1", "true or false"}}};
  for (const auto& [set, words] : cases) {
    const Outcome outcome = run_program("plan " + kTiny + " --set '" + set + "'");
    INFO(outcome.output);
    CHECK(outcome.exit_code == 2);
    for (const std::string& word : words) CHECK(has(outcome.output, word));
  }
}
