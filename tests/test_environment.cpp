// The variables of SPEC.md section 2 that the tests of their features do not see already: each by what it changes in a
// run. (NSA_FORCE_*, NSA_STOPGRAD_GATES, NSA_STRICT_ASSERTS: test_ablation.cpp; NSA_SDPA_*, NSA_USE_FA2:
// test_routes.cpp; NSA_TRACE_*, NSA_LOG_GRAD_NORM: test_ledger.cpp; NSA_DDP_BUCKET_MB, NSA_PG_TIMEOUT_MIN,
// TORCH_BACKEND: test_dist.cpp.)
#include <filesystem>

#include "io/json_config.h"
#include "tests/program.h"
#include "tests/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

const std::string kTiny = TRIAD_SOURCE_DIR "/configs/tiny.json";

struct Run {
  Outcome outcome;
  Json config;
  std::string folder;
  std::string text(const std::string& name) const { return read_text(folder + "/" + name); }
};
Run train(const TemporaryFolder& folder, const std::string& name, const std::string& environment,
          const std::string& more = "") {
  Run run;
  run.folder = folder.file(name);
  run.outcome = run_program(
      "train " + kTiny + " --set runtime.device=cpu --set train.steps=4 " + more + " --set log.out_dir=" + run.folder,
      environment);
  INFO(environment << "\n" << run.outcome.output);
  REQUIRE(run.outcome.exit_code == 0);
  run.config = Json::parse(run.text("config.json"));
  return run;
}
bool says(const Run& run, const std::string& words) { return run.outcome.output.find(words) != std::string::npos; }

int64_t count(const std::string& text, const std::string& word) {
  int64_t n = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++n;
  return n;
}

}  // namespace

TEST_CASE("environment: sizes and the learning rate", "[environment]") {
  const TemporaryFolder folder;
  const Run usual = train(folder, "usual", "");
  CHECK(says(usual, "96 tokens an optimizer step\n"));
  CHECK(says(train(folder, "T", "NSA_SEQ_LEN=32"), "64 tokens an optimizer step\n"));
  CHECK(says(train(folder, "B", "NSA_BATCH_SIZE=3"), "144 tokens an optimizer step\n"));
  CHECK(says(train(folder, "A", "NSA_ACCUM=2"), "192 tokens an optimizer step\n"));
  const Run rate = train(folder, "lr", "NSA_LR=0.25");
  CHECK(rate.text("training.csv").find(",2.500000e-01,") != std::string::npos);
  CHECK(rate.text("model.safetensors") != usual.text("model.safetensors"));
  // defaults < file < environment < --set
  CHECK(train(folder, "set", "NSA_LR=0.25", "--set train.lr=0.125").config["train"]["lr"] == 0.125);
  CHECK(says(rate, "environment: NSA_LR=0.25 -> train.lr\n"));
}

TEST_CASE("environment: what is written", "[environment]") {
  const TemporaryFolder folder;
  CHECK(count(train(folder, "each", "").text("heartbeat_rank0.jsonl"), "step_end") == 4);
  CHECK(count(train(folder, "second", "NSA_HEARTBEAT_EVERY=2").text("heartbeat_rank0.jsonl"), "step_end") == 2);
  CHECK(!fs::exists(train(folder, "no_csv", "NSA_DISABLE_CSV_LOGS=1").folder + "/training.csv"));
  CHECK(fs::exists(train(folder, "csv", "NSA_DISABLE_CSV_LOGS=0").folder + "/training.csv"));
}

TEST_CASE("environment: how a step is run", "[environment]") {
  const TemporaryFolder folder;
  const Run usual = train(folder, "usual", ""), range = train(folder, "range", "NSA_GC_RANGE=1:2");
  CHECK(range.config["runtime"]["recompute"] == "1:2=block");
  CHECK(range.text("model.safetensors") == usual.text("model.safetensors"));
  const Json few = Json::parse(range.text("metrics.json")), all = Json::parse(usual.text("metrics.json"));
  CHECK(few["peak_mib"].get<double>() <= all["peak_mib"].get<double>());
  CHECK(train(folder, "none", "NSA_NO_GC=1").config["runtime"]["recompute"] == "none");
  CHECK(train(folder, "graph", "NSA_DDP_STATIC_GRAPH=1").config["runtime"]["cuda_graph"] == true);
  CHECK(train(folder, "no_graph", "NSA_DDP_STATIC_GRAPH=0").config["runtime"]["cuda_graph"] == false);
  CHECK(says(train(folder, "as_ever", "NSA_PREFILL_BATCHED=1 NSA_ENV_STATIC=1"),
             "environment: NSA_PREFILL_BATCHED=1: no effect, always so\n"));
  const Outcome both = run_program("train " + kTiny, "NSA_GC_RANGE=1:2 NSA_NO_GC=1");
  CHECK(both.exit_code == 2);
  CHECK(both.output.find("contradict") != std::string::npos);
}

TEST_CASE("environment: CONFIG names the config, and an unknown NSA_ variable is refused", "[environment]") {
  const TemporaryFolder folder;
  const std::string more = " --set runtime.device=cpu --set train.steps=1 --set log.out_dir=" + folder.file("run");
  REQUIRE(run_program("train" + more, "CONFIG=" + kTiny).exit_code == 0);
  CHECK(Json::parse(read_text(folder.file("run/env.json")))["environment"]["CONFIG"] == kTiny);
  CHECK(run_program("train" + more, "CONFIG=").exit_code == 2);
  const Outcome unknown = run_program("train " + kTiny + more, "NSA_SEQLEN=5");
  CHECK(unknown.exit_code == 2);
  CHECK(unknown.output.find("unknown environment variable NSA_SEQLEN (value \"5\")") != std::string::npos);
  for (const char* empty : {"NSA_LR=", "NSA_NO_GC=", "NSA_DISABLE_CSV_LOGS=", "NSA_TRACE_GRADS="}) {
    INFO(empty);
    CHECK(run_program("train " + kTiny + more, empty).exit_code == 2);
  }
}
