// Environment variables that override config keys (NSA_*, and other launchers'): every variable is recognized, and has
// its effect. Some effects are tested elsewhere: NSA_FORCE_*, NSA_STOPGRAD_GATES and NSA_STRICT_ASSERTS in
// test_ablation.cpp; NSA_SDPA_* and NSA_USE_FA2 in test_routes.cpp; NSA_TRACE_GRADS, NSA_TRACE_MODULE_BWD and
// NSA_LOG_GRAD_NORM in test_ledger.cpp; NSA_TRACE_DDP_BUCKETS in test_bucket_trace.cpp; NSA_MEM_DUMP_EVERY in
// test_memory_snapshots.cpp; NSA_TB_DISABLE in test_tensorboard.cpp; NSA_DISABLE_AUX_STATS in test_stats_run.cpp.
#include <fmt/format.h>

#include <filesystem>
#include <sstream>

#include "io/json_config.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

struct Run {
  Outcome outcome;
  Json config;
  std::string folder;
  std::string text(const std::string& name) const { return read_text(folder + "/" + name); }
};
Run train_with(const TemporaryFolder& folder, const std::string& name, const std::string& environment,
               const std::string& more = "") {
  Run run;
  run.folder = folder.file(name);
  run.outcome = run_program("train " + kTiny + " --verbose --set runtime.device=cpu --set train.steps=4 " + more +
                                " --set log.out_dir=" + run.folder,
                            environment);
  INFO(environment << "\n" << run.outcome.output);
  REQUIRE(run.outcome.exit_code == 0);
  run.config = Json::parse(run.text("config.json"));
  return run;
}
bool prints(const Run& run, const std::string& words) { return run.outcome.output.find(words) != std::string::npos; }

int64_t count(const std::string& text, const std::string& word) {
  int64_t n = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++n;
  return n;
}

}  // namespace

TEST_CASE("environment: sizes and the learning rate", "[environment]") {
  const TemporaryFolder folder;
  const Run usual = train_with(folder, "usual", "");
  CHECK(prints(usual, "4 steps of 96 tokens (2 x 48): 384 tokens, fp32\n"));
  CHECK(prints(train_with(folder, "T", "NSA_SEQ_LEN=32"), "4 steps of 64 tokens"));
  CHECK(prints(train_with(folder, "B", "NSA_BATCH_SIZE=3"), "4 steps of 144 tokens"));
  CHECK(prints(train_with(folder, "A", "NSA_ACCUM=2"), "4 steps of 192 tokens (2 x 48 x 2 micro-steps)"));
  const Run rate = train_with(folder, "lr", "NSA_LR=0.25");
  CHECK(rate.text("training.csv").find(",2.500000e-01,") != std::string::npos);
  CHECK(rate.text("model.safetensors") != usual.text("model.safetensors"));
  // Precedence: defaults < file < environment < --set.
  CHECK(train_with(folder, "set", "NSA_LR=0.25", "--set train.lr=0.125").config["train"]["lr"] == 0.125);
  CHECK(prints(rate, "environment: NSA_LR=0.25 -> train.lr\n"));
}

TEST_CASE("environment: variables that choose which files are written", "[environment]") {
  const TemporaryFolder folder;
  CHECK(count(train_with(folder, "each", "").text("heartbeat_rank0.jsonl"), "step_end") == 4);
  CHECK(count(train_with(folder, "second", "NSA_HEARTBEAT_EVERY=2").text("heartbeat_rank0.jsonl"), "step_end") == 2);
  CHECK(!fs::exists(train_with(folder, "no_csv", "NSA_DISABLE_CSV_LOGS=1").folder + "/training.csv"));
  CHECK(fs::exists(train_with(folder, "csv", "NSA_DISABLE_CSV_LOGS=0").folder + "/training.csv"));
}

TEST_CASE("environment: variables that change how a step runs", "[environment][build]") {
  const TemporaryFolder folder;
  const Run usual = train_with(folder, "usual", ""), range = train_with(folder, "range", "NSA_GC_RANGE=1:2");
  CHECK(range.config["runtime"]["recompute"] == "1:2=block");
  CHECK(range.text("model.safetensors") == usual.text("model.safetensors"));
  const auto peak = [&](const std::string& config, const std::string& environment) {
    const Outcome outcome = run_program("plan " + config + " --json", environment);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return Json::parse(outcome.standard_output)["peak_bytes"].get<int64_t>();
  };
  Json file = Json::parse(read_text(kTiny), nullptr, true, /*ignore_comments=*/true);
  file["runtime"]["recompute"] = "block";
  const std::string recomputes = folder.file("recomputes.json");
  write_text(recomputes, file.dump());
  const int64_t all_kept = peak(kTiny, ""), none_kept = peak(recomputes, "");
  CHECK(none_kept < all_kept);
  CHECK(peak(recomputes, "NSA_NO_GC=1") == all_kept);
  CHECK(peak(recomputes, "NSA_NO_GC=0") == none_kept);
  CHECK(peak(kTiny, "NSA_GC_RANGE=0:2") == none_kept);
  const char* no_graph = "runtime.cuda_graph has no effect on the CPU\n";
  CHECK(prints(train_with(folder, "graph", "NSA_DDP_STATIC_GRAPH=1"), no_graph));
  CHECK_FALSE(prints(train_with(folder, "no_graph", "NSA_DDP_STATIC_GRAPH=0"), no_graph));
  CHECK(prints(train_with(folder, "as_ever", "NSA_PREFILL_BATCHED=1 NSA_ENV_STATIC=1"),
               "environment: NSA_PREFILL_BATCHED=1: no effect, always so\n"));
  const Outcome both = run_program("train " + kTiny, "NSA_GC_RANGE=1:2 NSA_NO_GC=1");
  CHECK(both.exit_code == 2);
  CHECK(both.output.find("contradict") != std::string::npos);
}

TEST_CASE("environment: NSA_DDP_STATIC_GRAPH replays steps, on the GPU", "[environment][gpu]") {
  if (!require_gpu()) return;
  // Fallbacks are counted when the host queues an op, so replayed steps add none.
  const TemporaryFolder folder;
  const auto counted = [&](const std::string& name, const std::string& environment) {
    const std::string out = folder.file(name);
    const Outcome outcome =
        run_program("train " + kTiny + " --set runtime.device=cuda --set train.steps=8 --set log.out_dir=" + out +
                        " --set runtime.kernels=fused",
                    environment);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    std::istringstream beats(read_text(out + "/heartbeat_rank0.jsonl"));
    int64_t total = 0;
    for (std::string line; std::getline(beats, line);)
      if (const Json beat = Json::parse(line); beat["msg"] == "step_end") total = beat["fb_total"];
    return total;
  };
  const int64_t each = counted("plain", "NSA_DDP_STATIC_GRAPH=0"), once = counted("graph", "NSA_DDP_STATIC_GRAPH=1");
  CHECK(each > 0);
  CHECK(once < each);
}

TEST_CASE("environment: variables for runs of several ranks", "[environment][dist][waits]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const auto ranks = [&](const std::string& name, const std::string& environment, const std::string& more = "") {
    return run_command(environment + " " + mpirun(2) + TRIAD_PROGRAM " train " + kTiny +
                       " --set runtime.device=cpu --set train.steps=2 --set log.out_dir=" + folder.file(name) + more);
  };
  const auto buckets = [&](const std::string& name, const std::string& environment) {
    const Outcome outcome = ranks(name, environment);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return std::stoi(read_text(folder.file(name) + "/ddp_buckets.txt"));  // the file begins with "N buckets, ..."
  };
  const int whole = buckets("whole", "TORCH_BACKEND=gloo");
  CHECK(buckets("cut", "NSA_DDP_BUCKET_MB=0.02") > whole);
  const Outcome nccl = ranks("nccl", "TORCH_BACKEND=nccl");
  INFO(nccl.output);
  CHECK(nccl.exit_code != 0);
  CHECK(nccl.output.find("dist.backend") != std::string::npos);
  // One rank sleeps for a minute, so the other reaches the timeout.
  const Outcome late = ranks("late", "NSA_PG_TIMEOUT_MIN=0.05 " + with_faults("TRIAD_FAULTS='1 60'"),
                             " --set train.steps=1000000 --set train.allow_unsafe=true --set log.every=1000");
  INFO(late.output);
  CHECK(late.exit_code != 0);
  CHECK(late.output.find("was not finished within dist.timeout_s = 3 s") != std::string::npos);
}

// Every supported variable is logged with the key that it overrides. Other tests check the effects.
TEST_CASE("environment: every variable is recognized, and logged with its key", "[environment]") {
  struct Honoured {
    const char *setting, *key;
  };
  const Honoured all[] = {{"NSA_SEQ_LEN=32", "train.seq_len"},
                          {"NSA_BATCH_SIZE=1", "train.micro_batch_size"},
                          {"NSA_ACCUM=2", "train.accumulate_grad_batches"},
                          {"NSA_LR=0.1", "train.lr"},
                          {"NSA_FORCE_BRANCH=none", "nsa.force_branch"},
                          {"NSA_FORCE_UNIFORM_GATE=0", "nsa.uniform_gate"},
                          {"NSA_STOPGRAD_GATES=1", "nsa.stopgrad_gates"},
                          {"NSA_GC_RANGE=0:1", "runtime.recompute"},
                          {"NSA_MEM_DUMP_EVERY=1", "log.memory_every"},
                          {"NSA_HEARTBEAT_EVERY=1", "log.heartbeat_every"},
                          {"NSA_TB_DISABLE=1", "log.tensorboard"},
                          {"NSA_DISABLE_CSV_LOGS=1", "log.csv"},
                          {"NSA_DISABLE_AUX_STATS=1", "log.stats"},
                          {"NSA_LOG_GRAD_NORM=1", "log.diagnostics"},
                          {"NSA_TRACE_GRADS=1", "log.diagnostics"},
                          {"NSA_TRACE_MODULE_BWD=1", "log.diagnostics"},
                          {"NSA_TRACE_DDP_BUCKETS=1", "log.diagnostics"},
                          {"NSA_STRICT_ASSERTS=1", "runtime.asserts"},
                          {"NSA_DDP_BUCKET_MB=1", "dist.bucket_mb"},
                          {"NSA_PG_TIMEOUT_MIN=1", "dist.timeout_s"},
                          {"TORCH_BACKEND=gloo", "dist.backend"},
                          {"NSA_DDP_STATIC_GRAPH=1", "runtime.cuda_graph"},
                          {"NSA_USE_FA2=0", "runtime.kernels"},
                          {"NSA_SDPA_NO_FLASH=1", "runtime.kernels"}};
  const TemporaryFolder folder;
  std::string environment;
  for (const Honoured& h : all) environment += std::string(h.setting) + " ";
  const Run together = train_with(folder, "all", environment);
  for (const Honoured& h : all)
    CHECK(prints(together, std::string("environment: ") + h.setting + " -> " + h.key + "\n"));
  CHECK(prints(train_with(folder, "one", "NSA_NO_GC=1"), "environment: NSA_NO_GC=1 -> runtime.recompute\n"));
  const Run flash = train_with(folder, "flash", "NSA_SDPA_FLASH_ONLY=1", "--set runtime.strict=false");
  for (const char* key : {"runtime.kernels", "runtime.strict"})
    CHECK(prints(flash, std::string("environment: NSA_SDPA_FLASH_ONLY=1 -> ") + key + "\n"));
}

TEST_CASE("environment: an error about a key names the variable that has set it", "[environment]") {
  const auto refused = [](const std::string& environment, const std::string& sets) {
    const Outcome outcome = run_program("plan " + kTiny + " " + sets, environment);
    INFO(outcome.output);
    CHECK(outcome.exit_code == 2);
    return outcome.output;
  };
  CHECK(refused("NSA_LR=-1", "").find("(set by the environment: NSA_LR=-1)") != std::string::npos);
  CHECK(refused("NSA_FORCE_BRANCH=sel NSA_FORCE_UNIFORM_GATE=1", "")
            .find("NSA_FORCE_BRANCH=sel, NSA_FORCE_UNIFORM_GATE=1)") != std::string::npos);
  // The last word is --set's; and an error about another key is not the variable's.
  CHECK(refused("NSA_LR=0.5", "--set train.lr=-1").find("NSA_LR") == std::string::npos);
  CHECK(refused("NSA_LR=0.5", "--set train.steps=-1").find("NSA_LR") == std::string::npos);
}

TEST_CASE("environment: secrets are shown as set, never by value", "[environment]") {
  const TemporaryFolder folder;
  const std::string secret = "eyJhbGciOiJIUzI1NiJ9";
  std::string environment = "SLURM_JOB_NAME=a-job HOME_TOKEN=" + secret + " TRIAD_SECRET=" + secret + " ";
  const std::vector<std::string> names = {"SLURM_JWT",   "NCCL_AUTH_TOKEN", "OMPI_KEYFILE",
                                          "PMIX_SECRET", "OMP_passphrase",  "CUDA_CREDENTIAL"};
  for (const std::string& name : names) environment += name + "=" + secret + " ";
  const Run run = train_with(folder, "run", environment);
  const Json shown = Json::parse(run.text("env.json"))["environment"];
  for (const std::string& name : names) CHECK(shown[name] == "(set)");
  CHECK(shown["SLURM_JOB_NAME"] == "a-job");
  for (const char* name : {"HOME_TOKEN", "TRIAD_SECRET", "PATH"}) CHECK_FALSE(shown.contains(name));
  // The report hides secrets also if an older version has written them to env.json.
  Json before = Json::parse(run.text("env.json"));
  before["environment"]["SLURM_JWT"] = secret;
  write_text(run.folder + "/env.json", before.dump());
  REQUIRE(run_program("report " + run.folder).exit_code == 0);
  fs::remove(run.folder + "/env.json");
  CHECK(run_command("grep -r " + secret + " " + run.folder).exit_code == 1);
  CHECK_FALSE(prints(run, secret));
  const Outcome unknown = run_program("train " + kTiny, "NSA_API_KEY=" + secret);
  CHECK(unknown.exit_code == 2);
  CHECK(has(unknown.output, "unknown environment variable NSA_API_KEY (value \"(set)\")"));
}

TEST_CASE("environment: CONFIG does not redirect --resume RUN", "[environment]") {
  const TemporaryFolder folder;
  const std::string on_cpu = "train " + kTiny + " --set runtime.device=cpu --set train.steps=2 --set log.out_dir=";
  for (const char* name : {"run", "other"})
    REQUIRE(run_program(on_cpu + folder.file(name) + " --set train.save_every=1").exit_code == 0);
  const std::string other = folder.file("other") + "/config.json", before = read_text(other);
  // A build system's value, and another run's config.
  int steps = 2;
  for (const std::string& config : {std::string("Release"), other})
    for (const char* from : {"", "/checkpoints", "/checkpoints/latest"}) {
      const Outcome resumed = run_program(
          fmt::format("train --resume {}{} --verbose --set train.steps={}", folder.file("run"), from, ++steps),
          "CONFIG=" + config);
      INFO(config << " " << from << "\n" << resumed.output);
      CHECK(resumed.exit_code == 0);
      CHECK(has(resumed.output, "CONFIG=" + config + ": not used, --resume names the run"));
      CHECK(fs::exists(folder.file("run") + "/checkpoints/step_" + std::to_string(steps)));
    }
  CHECK(read_text(other) == before);
  CHECK_FALSE(fs::exists(folder.file("other") + "/checkpoints/step_3"));
  // `latest` names no run, so it needs the config.
  CHECK(run_program("train --resume latest --set train.steps=4", "CONFIG=" + other).exit_code == 0);
  CHECK(fs::exists(folder.file("other") + "/checkpoints/step_4"));
}

TEST_CASE("environment: CONFIG names the config, and an unknown NSA_ variable is refused", "[environment]") {
  const TemporaryFolder folder;
  const std::string more = " --set runtime.device=cpu --set train.steps=1 --set log.out_dir=" + folder.file("run");
  REQUIRE(run_program("train" + more, "CONFIG=" + kTiny).exit_code == 0);
  CHECK(Json::parse(read_text(folder.file("run/env.json")))["environment"]["CONFIG"] == kTiny);
  CHECK(run_program("train" + more, "CONFIG=").exit_code == 2);
  const Outcome build = run_program("train" + more, "CONFIG=Release");
  CHECK(build.exit_code == 2);
  CHECK(has(build.output, "Release: cannot be opened"));
  CHECK(has(build.output, "(the environment variable CONFIG names it)"));
  const Outcome unknown = run_program("train " + kTiny + more, "NSA_SEQLEN=5");
  CHECK(unknown.exit_code == 2);
  CHECK(unknown.output.find("unknown environment variable NSA_SEQLEN (value \"5\")") != std::string::npos);
  for (const char* empty : {"NSA_LR=", "NSA_NO_GC=", "NSA_DISABLE_CSV_LOGS=", "NSA_TRACE_GRADS="}) {
    INFO(empty);
    CHECK(run_program("train " + kTiny + more, empty).exit_code == 2);
  }
}
