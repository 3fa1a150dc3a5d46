// Runs with train.stages: the rows that the stages read, resumes, dense and alternating stages with each optimizer, on
// one and several ranks, and what the log, the plan and the errors say.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "io/data/loader.h"
#include "io/json_config.h"
#include "io/weight_index.h"
#include "tests/support/dist_run.h"
#include "tests/support/heartbeats.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/config/schedule.h"
#include "train/run/memory_plan.h"

using namespace triad;
using namespace triad::test;

namespace {

std::string stages(const std::string& list) { return "--set 'train.stages=" + list + "' --set train.steps=null "; }

Config config_of(const std::string& list, std::vector<std::string> sets = {}) {
  Json root = read_json_file(kTiny);
  root["train"].erase("steps");
  root["train"]["stages"] = parse_json(list, "stages");
  return load_config(root, "tiny", sets).config;
}
std::string error_of(const std::string& list, std::vector<std::string> sets = {}) {
  try {
    config_of(list, std::move(sets));
  } catch (const UsageError& e) { return e.what(); }
  return "(nothing was thrown)";
}

// Token i has the value i.
class CountingTokens final : public TokenSource {
 public:
  int64_t size() const override { return 12 * 24 + 5; }
  void read(int64_t begin, std::span<int32_t> out) const override {
    std::iota(out.begin(), out.end(), static_cast<int32_t>(begin));
  }
  std::string name() const override { return "counting tokens"; }
};

const std::string kThree = R"([{"steps":3,"seq_len":16,"micro_batch_size":4,"lr_factor":0.5},)"
                           R"({"steps":3,"seq_len":24,"attention":"dense"},{"steps":4,"attention":"alternate"}])";

bool is_unused_by_dense(const std::string& name) {
  for (const char* part : {"attn.k_cmp", "attn.v_cmp", "attn.k_sel", "attn.v_sel", "attn.gate.", "attn.phi_"})
    if (has(name, part)) return true;
  return false;
}

// Whether two checkpoints have the same tensors for the parameters that dense steps do not use, and for the others.
struct Kept {
  bool unused = true, used = true;
};
Kept compare(const std::string& a, const std::string& b, const char* stem) {
  const auto before = tensors(tensors_path(a, stem)), after = tensors(tensors_path(b, stem));
  REQUIRE(before.size() == after.size());
  Kept kept;
  int unused = 0;
  for (const auto& [name, values] : before) {
    unused += is_unused_by_dense(name);
    bool& equal = is_unused_by_dense(name) ? kept.unused : kept.used;
    equal = equal && values == after.at(name);
  }
  REQUIRE(unused > 0);
  return kept;
}

}  // namespace

TEST_CASE("stages: absent keys have the values of train.*, and the config keeps what was written", "[train]") {
  const Config config = config_of(kThree);
  CHECK(config.train.steps == 10);
  CHECK(config.train.longest_seq_len() == 48);
  const std::vector<TrainStage> all = stages_of(config.train);
  REQUIRE(all.size() == 3);
  CHECK(all[0].micro_batch_size == 4);
  CHECK((all[1].begin == 3 && all[1].end == 6 && all[1].seq_len == 24 && all[1].micro_batch_size == 2));
  CHECK((all[2].seq_len == 48 && all[2].lr_factor == 1));
  CHECK(learning_rate(config.train, 2) == 0.5 * scheduled_rate(config.train, 2));
  CHECK(learning_rate(config.train, 3) == scheduled_rate(config.train, 3));
  std::vector<bool> dense;
  for (int64_t step = 0; step < 10; ++step) dense.push_back(stage_at(config.train, step).is_dense(step));
  // Steps 7 to 10 in the log alternate; the odd ones are dense.
  CHECK(dense == std::vector<bool>{false, false, false, true, true, true, true, false, true, false});
  CHECK(config_to_json(config)["train"]["stages"] == Json::parse(kThree));
  CHECK(config_to_json(config_from_json(config_to_json(config))) == config_to_json(config));
  CHECK(config_to_json(load_config(kTiny, {}).config)["train"]["stages"].is_null());
}

TEST_CASE("stages: --help has the limits of a stage's keys", "[train]") {
  const std::string help = describe_config();
  for (const char* words : {"train.stages[].steps             optimizer steps of the stage; at least 1; required\n",
                            "as train.micro_batch_size, and its default; in [1, 1048576]\n",
                            "as the model is configured; nsa|dense|alternate\n"})
    CHECK(has(help, words));
}

TEST_CASE("stages: bad lists are errors that name key and value", "[train]") {
  struct Case {
    const char* list;
    std::vector<std::string> sets, words;
  };
  const std::vector<Case> cases = {
      {"[]", {}, {"train.stages is []", "at least one"}},
      {"3", {}, {"train.stages is 3", "a list of objects"}},
      {"[3]", {}, {"train.stages[0] is 3", "an object"}},
      {R"([{"seq_len":16}])", {}, {"train.stages[0] is {\"seq_len\":16}", "lacks train.stages[0].steps"}},
      {R"([{"steps":4},{"steps":0}])", {}, {"train.stages[1].steps is 0"}},
      {R"([{"steps":4},{"steps":4.5}])", {}, {"train.stages[1].steps is 4.5", "an integer"}},
      {R"([{"steps":1e300}])", {}, {"train.stages[0].steps is 1e+300", "at most 2^53"}},
      {R"([{"steps":"ten"}])", {"train.steps=null"}, {"train.stages[0].steps is \"ten\""}},
      {R"([{"steps":4,"seq_len":0}])", {}, {"train.stages[0].seq_len is 0"}},
      {R"([{"steps":4,"micro_batch_size":0}])", {}, {"train.stages[0].micro_batch_size is 0"}},
      {R"([{"steps":4,"lr_factor":-1}])", {}, {"train.stages[0].lr_factor is -1"}},
      {R"([{"steps":4,"lr_factor":1e30}])", {"train.lr=1e30"}, {"train.stages[0].lr_factor times train.lr is 1"}},
      {R"([{"steps":4,"atention":"nsa"}])", {}, {"unknown key train.stages[0].atention", "attention"}},
      {R"([{"steps":4,"attention":"sparse"}])", {}, {"train.stages[0].attention is \"sparse\"", "alternate"}},
      {R"([{"steps":4},{"steps":5}])", {"train.steps=10"}, {"train.steps is 10", "are 9 in all"}},
      {R"([{"steps":4,"seq_len":32},{"steps":5}])", {}, {"train.stages[0].seq_len is 32", "does not divide 48"}},
      {R"([{"steps":4,"attention":"nsa"}])",
       {"model.attention=dense"},
       {"train.stages[0].attention is nsa", "that is dense"}},
      {R"([{"steps":4,"seq_len":24}])",
       {"data.kind=needle"},
       {"train.stages[0].seq_len is 24", "needle", "train.seq_len, which is 48"}},
      {R"([{"steps":4,"seq_len":24}])",
       {"data.packing=best_fit"},
       {"train.stages[0].seq_len is 24", "best_fit", "train.seq_len, which is 48"}}};
  for (const Case& c : cases) {
    const std::string message = error_of(c.list, c.sets);
    for (const std::string& word : c.words) {
      INFO(message << " lacks " << word);
      CHECK(has(message, word));
    }
  }
  CHECK(error_of(R"([{"steps":4,"attention":"dense"}])", {"model.attention=dense"}) == "(nothing was thrown)");
  for (const auto& [list, sets, words] : std::vector<Case>{{R"([{"steps":4},{"steps":4,"attention":"dense"}])",
                                                            {"runtime.asserts=true", "runtime.cuda_graph=true"},
                                                            {"runtime.asserts is true", "2 stages"}},
                                                           {R"([{"steps":4},{"steps":4,"seq_len":3}])",
                                                            {"dist.context=4"},
                                                            {"dist.context is 4", "train.stages[1].seq_len is 3"}}})
    try {
      config_of(list, sets).check_run();
      FAIL("nothing was thrown");
    } catch (const UsageError& e) {
      for (const std::string& word : words) CHECK(has(e.what(), word));
    }
}

TEST_CASE("stages: rows of several lengths read no token twice in an epoch", "[train]") {
  const auto source = std::make_shared<CountingTokens>();
  constexpr int64_t kBlock = 24;
  int64_t cursor = 0, left_out = 0;
  std::set<int64_t> begins;
  const auto read = [&](int64_t T, int64_t batches) {
    const int64_t first = (cursor + T - 1) / T;
    left_out += first * T - cursor;
    Loader loader(source, {.seq_len = T, .micro_batch = 2, .block = kBlock, .seed = 5, .first_sequence = first});
    for (int64_t i = 0; i < batches; ++i) {
      const Batch batch = loader.next();
      for (int64_t row = 0; row < 2; ++row) {
        const int32_t at = batch.tokens[static_cast<size_t>(row * T)];
        CHECK(at % T == 0);
        CHECK(batch.targets[static_cast<size_t>((row + 1) * T - 1)] == at + T);
        for (int64_t t = at; t < at + T; ++t) CHECK(begins.insert(t).second);
      }
    }
    cursor = loader.cursor() * T;
  };
  read(4, 5);
  read(24, 3);
  read(6, 2);
  read(8, 3);
  CHECK(left_out == (48 - 40) + 0 + 0);
  CHECK(static_cast<int64_t>(begins.size()) == cursor - left_out);
  read(12, (12 * kBlock - cursor) / 24);
  CHECK(cursor == 12 * kBlock);
  CHECK(static_cast<int64_t>(begins.size()) == 12 * kBlock - left_out);
}

TEST_CASE("stages: equal stages are one run, and a resume in the middle of any stage ends with the same bits",
          "[train]") {
  const TemporaryFolder folder;
  const std::string plain = run(folder.file("plain"), 1, "--set train.steps=6 "),
                    equal = run(folder.file("equal"), 1, stages(R"([{"steps":2},{"steps":4,"attention":"nsa"}])"));
  CHECK(same_file(plain + kWeights, equal + kWeights));
  std::string text;
  for (int i = 0; i < 300; ++i) text += fmt::format("line {} of a text\n", i * i);
  for (const char* name : {"a.txt", "b.txt", "c.txt", "d.txt"}) write_text(folder.file(name), text.substr(0, 2500));
  const std::string documents =
      "--set data.kind=text --set data.val_fraction=0.3 --set 'data.paths=[\"" + folder.file("*.txt") + "\"]' ";
  for (const std::string& more : {documents, std::string("--set train.optimizer=muon --set runtime.precision=bf16 ")}) {
    const std::string keys = stages(kThree) + more +
                             "--set train.save_every=1 --set train.keep_last=0 --set train.eval_every=5 "
                             "--set runtime.recompute=0:1=attention,1:2=block --overwrite ";
    const std::string whole = run(folder.file("whole"), 1, keys),
                      moments = "/checkpoints/step_10/optimizer.safetensors";
    for (const int step : {3, 5, 7}) {
      const std::string from = fmt::format("{}/checkpoints/step_{}", whole, step);
      const std::string part = run(folder.file("part"), 1, keys + "--set train.save_every=10 --resume " + from);
      CHECK(same_file(whole + kWeights, part + kWeights));
      CHECK(same_file(whole + moments, part + moments));
    }
  }
  // The row order depends on the longest stage rows.
  const Outcome other = run_program(
      train_args(folder.file("other"), stages(R"([{"steps":12,"seq_len":24}])") +
                                           "--set train.optimizer=muon --set runtime.precision=bf16 --resume " +
                                           folder.file("whole") + "/checkpoints/step_3"));
  INFO(other.output);
  CHECK(other.exit_code == 1);
  CHECK(has(other.output, "train.seq_len (the longest of train.stages) is 48, the config's is 24"));
}

TEST_CASE("stages: a checkpoint from before train.stages, which counts sequences, resumes to the same bits",
          "[train]") {
  const TemporaryFolder folder;
  const std::string keys = "--set train.steps=4 --set train.save_every=2 ";
  const std::string a = run(folder.file("a"), 1, keys), from = a + "/checkpoints/step_2";
  Json state = Json::parse(read_text(from + "/state.json"));
  CHECK(state["cursor"] == 2 * 8 * 48);
  state.erase("cursor");
  state["sequences"] = 2 * 8;
  state["config"]["train"].erase("stages");
  write_text(from + "/state.json", state.dump());
  CHECK(same_file(a + kWeights, run(folder.file("b"), 1, keys + "--resume " + from) + kWeights));
}

TEST_CASE("stages: an evaluation in a dense stage has the model's own attention", "[train]") {
  const TemporaryFolder folder;
  const std::string still =
      R"([{"steps":2,"lr_factor":0,"seq_len":24,"attention":"ATTENTION"},{"steps":1,"lr_factor":0}])";
  std::vector<std::map<int, double>> losses, trained;
  for (const std::string attention : {"nsa", "dense"}) {
    std::string list = still;
    list.replace(list.find("ATTENTION"), 9, attention);
    const std::string out =
        run(folder.file(attention), 1, stages(list) + "--set train.eval_every=1 --set model.init_std=0.5");
    losses.push_back(column(out + "/val.csv", "val_loss"));
    trained.push_back(column(out + "/training.csv", "loss"));
  }
  CHECK(losses[0] == losses[1]);
  CHECK(losses[0].size() == 3);
  CHECK(losses[0].at(2) != losses[0].at(3));  // rows differ in length
  CHECK(trained[0].at(1) != trained[1].at(1));
  CHECK(trained[0].at(3) == trained[1].at(3));
}

TEST_CASE("stages: an evaluation's short rows may hold more documents than any long row", "[train][documents]") {
  const TemporaryFolder folder;
  const std::string train = folder.file("train.jsonl"), val = folder.file("val.jsonl");
  const std::string whole = "{\"text\":\"" + std::string(60, 'x') + "\"}\n";
  std::string short_ones;  // what follows the last whole 48-token row
  for (int i = 0; i < 8; ++i) short_ones += "{\"text\":\"a\"}\n";
  write_text(train, whole + whole + whole);
  write_text(val, whole + short_ones);
  const std::string out = run(folder.file("run"), 1,
                              stages(R"([{"steps":1,"seq_len":8},{"steps":1}])") +
                                  "--set data.kind=text --set data.paths=" + train + " --set data.val_paths=" + val +
                                  " --set data.documents=attend_within --set train.eval_every=1 "
                                  "--set train.eval_batches=100 ");
  CHECK(column(out + "/val.csv", "val_loss").size() == 2);
}

TEST_CASE("stages: a dense stage leaves the parameters that it does not use, and their moments, as they are",
          "[train]") {
  const TemporaryFolder folder;
  const std::string list =
      R"([{"steps":2,"seq_len":24},{"steps":2,"attention":"dense"},{"steps":2,"attention":"alternate"}])";
  for (const std::string more : {"--set nsa.phi=mlp --set model.qkv_bias=true --set model.qk_norm=true ",
                                 "--set nsa.shared_kv=true ", "--set train.optimizer=muon ",
                                 "--set runtime.precision=bf16 --set train.master_dtype=none "
                                 "--set train.moments_dtype=bf16 --set train.grads_dtype=bf16 "}) {
    INFO(more);
    const bool bf16 = has(more, "bf16");
    const std::string out = run(folder.file("run"), 1,
                                stages(list) + more +
                                    "--set train.save_every=1 --set train.keep_last=0 --overwrite "
                                    "--set runtime.asserts=true --set 'log.diagnostics=[\"ledger\"]' ");
    CHECK(has(read_text(out + "/all_missing_params.txt"), "missing=0"));
    for (const std::string& line : lines(out + "/heartbeat_rank0.jsonl"))
      CHECK_FALSE(Json::parse(line)["msg"] == "anomaly");
    if (bf16) continue;  // tensors() reads F32
    const auto at = [&](int step) { return fmt::format("{}/checkpoints/step_{}", out, step); };
    for (const char* stem : {kWeightsStem, kMomentsStem}) {
      for (const auto& [from, to] : {std::pair{2, 4}, {4, 5}}) {
        const Kept kept = compare(at(from), at(to), stem);
        CHECK(kept.unused);
        CHECK_FALSE(kept.used);
      }
      CHECK_FALSE(compare(at(1), at(2), stem).unused);
      CHECK_FALSE(compare(at(5), at(6), stem).unused);
    }
  }
}

TEST_CASE("stages: gradients that a stage makes zero are no anomaly", "[train]") {
  const TemporaryFolder folder;
  // The first NSA step is measured, and other steps follow; rows shorter than a compressed block.
  for (const auto& [list, more] : {std::pair{R"([{"steps":5,"attention":"alternate"}])", "--set log.every=2 "},
                                   {R"([{"steps":2},{"steps":2,"seq_len":3}])", "--set log.every=1 "}}) {
    INFO(list);
    const std::string out = run(folder.file("run"), 1, stages(list) + more + "--overwrite ");
    CHECK_FALSE(has(read_text(out + "/heartbeat_rank0.jsonl"), "anomaly"));
  }
}

TEST_CASE("stages: dense and alternating stages on several ranks", "[train][dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string keys =
      stages(R"([{"steps":2,"seq_len":16,"attention":"dense"},{"steps":2,"attention":"alternate"}])") +
      "--set model.mlp_hidden=512 --set dist.bucket_mb=0.02 --set train.eps=1e-4 ";
  const std::string muon = keys + "--set train.optimizer=muon ";
  const std::string one = run(folder.file("one"), 1, keys), one_muon = run(folder.file("one_muon"), 1, muon);
  // The gates begin to learn in the fourth step, in which gate.fc1's gradient is still zero.
  CHECK_FALSE(has(read_text(one + "/heartbeat_rank0.jsonl"), "anomaly"));
  for (const auto& [reference, more] : {std::pair{one_muon, muon + "--set dist.zero=1"},
                                        {one_muon, muon + "--set dist.zero=3"},
                                        {one, keys + "--set dist.zero=2"},
                                        {one, keys + "--set dist.context=2 --set train.accumulate_grad_batches=4"}}) {
    INFO(more);
    const std::string two = run(folder.file("two"), 2, more + " --overwrite");
    CHECK(difference(reference + kWeights, tensors_path(two)).all < 1e-5);
  }
}

TEST_CASE("stages: graphs of each kind of step, and resumes, give the same bits on the GPU", "[train][gpu]") {
  if (!require_gpu()) return;
  const TemporaryFolder folder;
  for (const std::string more : {"--set runtime.precision=bf16 ", "--set train.optimizer=muon "}) {
    const std::string list =
        R"([{"steps":3,"attention":"dense"},{"steps":4,"attention":"alternate"},{"steps":3,"seq_len":24}])";
    const std::string keys = stages(list) + more +
                             "--set runtime.device=cuda --set train.save_every=1 "
                             "--set train.keep_last=0 --set train.eval_every=2 --overwrite ";
    const std::string graph = "--set runtime.cuda_graph=true ", plain = run(folder.file("plain"), 1, keys);
    CHECK(same_file(plain + kWeights, run(folder.file("graph"), 1, keys + graph) + kWeights));
    for (const int step : {2, 5, 8})
      CHECK(same_file(
          plain + kWeights,
          run(folder.file("part"), 1, fmt::format("{}{}--resume {}/checkpoints/step_{}", keys, graph, plain, step)) +
              kWeights));
    for (const char* stem : {kWeightsStem, kMomentsStem})
      CHECK(compare(plain + "/checkpoints/step_0", plain + "/checkpoints/step_3", stem).unused);
  }
}

TEST_CASE("stages: log, tables and plan say which stage a step belongs to", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const Outcome outcome = run_program(train_args(out, stages(kThree) + "--set train.eval_every=10 "));
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  CHECK(has(outcome.output, "10 steps in 3 stages: 720 tokens"));
  const std::string first = "stage 1 of 3: steps 1 to 3 of 4 x 16 tokens, learning rate x 0.5",
                    second = "stage 2 of 3: steps 4 to 6 of 2 x 24 tokens, attention dense",
                    third = "stage 3 of 3: steps 7 to 10 of 2 x 48 tokens, attention alternate";
  std::vector<std::string> beats;
  for (const std::string& line : lines(out + "/heartbeat_rank0.jsonl")) {
    const Json beat = Json::parse(line);
    if (beat["msg"] == "stage")
      beats.push_back(fmt::format("{} {}", beat["step"].get<int>(), beat["text"].get<std::string>()));
  }
  CHECK_FALSE(has(read_text(out + "/heartbeat_rank0.jsonl"), "anomaly"));
  CHECK(beats == std::vector<std::string>{"0 " + first, "3 " + second, "6 " + third});
  // Dense steps have no gates: only even steps in 7 to 10.
  std::set<std::string> with_gates;
  for (const std::string& line : lines(out + "/gates.csv")) with_gates.insert(line.substr(0, line.find(',')));
  CHECK(with_gates == std::set<std::string>{"step", "1", "2", "3", "8", "10"});
  const auto lr = column(out + "/training.csv", "lr");
  CHECK(lr.at(3) == Approx(0.5 * lr.at(4)).epsilon(0.2));
  CHECK(lr.at(3) < 0.6 * lr.at(4));
  const Json metrics = Json::parse(read_text(out + "/metrics.json"));
  CHECK(metrics["tokens"] == 3 * 64 + 3 * 48 + 4 * 96);
  CHECK(run_program("report " + out).exit_code == 0);
  CHECK(
      has(read_text(out + "/report.html"), "3 steps, seq_len 24, attention dense, then 4 steps, attention alternate"));

  const std::string args = "plan " + kTiny + " --set runtime.device=cpu " + stages(kThree);
  const Outcome plan = run_program(args + "--json"), text = run_program(args), fit = run_program(args + "--fit");
  INFO(plan.output << text.output << fit.output);
  const Json json = Json::parse(plan.standard_output);
  REQUIRE(json["stages"].size() == 3);
  CHECK(json["stages"][0]["tokens_per_step"] == 64);
  CHECK(json["stages"][0]["attention"] == "nsa");
  CHECK(json["stages"][1]["attention"] == "dense");
  int64_t largest = 0;
  for (const Json& stage : json["stages"]) largest = std::max(largest, stage["peak_bytes"].get<int64_t>());
  CHECK(json["peak_bytes"].get<int64_t>() >= largest);
  CHECK(json["peak_bytes"].get<int64_t>() < 1.1 * static_cast<double>(largest));
  CHECK(has(text.output, second));
  const std::string nsa = run_program("plan " + kTiny + " --set runtime.device=cpu --json").standard_output;
  CHECK(json["flops_per_token"] != Json::parse(nsa)["flops_per_token"]);  // alternating steps' FLOPs
  CHECK(json["flops_per_token"] == json["stages"][2]["flops_per_token"]);
  CHECK(fit.exit_code == 2);
  CHECK(has(fit.output, "--set train.stages=null --set train.steps=10"));
  // Ranks that share sequences exchange what a step in the last stage needs.
  const auto shared = [&](const std::string& list) {
    return Json::parse(
        run_program("plan " + kTiny + " --set runtime.device=cpu --ranks 2 --json --set dist.context=2 " + stages(list))
            .standard_output)["context"];
  };
  CHECK(shared(R"([{"steps":1,"seq_len":24},{"steps":1}])") == shared(R"([{"steps":1}])"));
  CHECK(shared(R"([{"steps":1},{"steps":1,"attention":"dense"}])")["step_bytes"] <
        shared(R"([{"steps":1}])")["step_bytes"]);
}
