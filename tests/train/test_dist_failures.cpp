// Runs in which a rank fails, gets a signal or is killed: the other ranks end, and a resume ends with the same bits as
// an uninterrupted run. Whole runs, started through mpirun.
#include <fmt/format.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <thread>

#include "engine/process/seconds_since.h"
#include "io/checkpoint.h"
#include "io/data/shards.h"
#include "io/json_config.h"
#include "tests/support/checked_run.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

const std::string kLong = "--set train.steps=1000000 --set train.allow_unsafe=true ";

constexpr Arrangement kArrangements[] = {{2, "--set dist.zero=0"},
                                         {2, "--set dist.zero=1"},
                                         {2, "--set dist.zero=2"},
                                         {2, "--set dist.zero=3"},
                                         {4, "--set dist.zero=3 --set dist.replicas=2"},
                                         {2, "--set dist.context=2"}};

}  // namespace

TEST_CASE("dist: a rank that is killed or suspended ends all ranks, with a message that says where", "[dist][waits]") {
  if (!require_mpirun()) return;
  for (const int signal : {SIGKILL, SIGSTOP})
    for (const Arrangement& arrangement : kArrangements) {
      const TemporaryFolder folder;
      const std::string out = folder.file("run"), log = folder.file("log");
      BackgroundProgram program(
          train_args(out, kLong + "--set dist.bucket_mb=0.02 --set dist.timeout_s=4 " + arrangement.keys),
          mpirun(arrangement.ranks), log);
      const std::vector<int> pids = pids_of(out, arrangement.ranks, 3);
      kill(pids[1], signal);
      CHECK(program.wait() != 0);
      CHECK(all_gone(pids));
      const std::string text = read_text(log);
      INFO(arrangement.keys << "\n" << text);
      for (const char* part : {"rank 0: ", "rank 1 (pid ", "collective ", " bytes",
                               " lost, because there is no checkpoint: the same command begins again"})
        CHECK(text.find(part) != std::string::npos);
      if (signal == SIGSTOP) CHECK(text.find("dist.timeout_s = 4 s") != std::string::npos);
      if (signal == SIGSTOP) CHECK(text.find("is stopped") != std::string::npos);
    }
}

TEST_CASE("dist: a rank ends in time although the disk for its last collectives hangs", "[dist]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log");
  BackgroundProgram other(train_args(out, kLong), as_torchrun_would(1) + "exec timeout -s KILL 300 "),
      first(train_args(out, kLong), as_torchrun_would(0) + "exec timeout -s KILL 300 ", log);
  const std::vector<int> pids = pids_of(out, 2, 3);
  const std::string hangs = out + "/ranks/rank_0_collectives.csv";
  REQUIRE(mkfifo(hangs.c_str(), 0600) == 0);  // a pipe without a reader, so opening it for writing blocks
  kill(pids[1], SIGKILL);
  CHECK(first.wait() == 1);  // 137 would mean that `timeout` has killed it
  CHECK(other.wait() != 0);
  CHECK(all_gone(pids));
  const std::string text = read_text(log);
  INFO(text);
  for (const char* part : {"triad: rank 0: ", "rank 1", "collective ", " bytes"})
    CHECK(text.find(part) != std::string::npos);
}

TEST_CASE("dist: a rank that waits for the others to connect ends at a signal", "[dist]") {
  const TemporaryFolder folder;
  BackgroundProgram alone(train_args(folder.file("run"), kLong), as_torchrun_would(1));
  // Waits until the shell has replaced itself by the program.
  wait_for_text("/proc/" + std::to_string(alone.pid()) + "/comm", "triad");
  std::this_thread::sleep_for(std::chrono::seconds(1));
  alone.send(SIGTERM);
  CHECK(alone.wait() == 128 + SIGTERM);
}

TEST_CASE("dist: a rank that throws ends all ranks, and its message is printed", "[dist][waits]") {
  if (!require_mpirun()) return;
  for (const Arrangement& arrangement : kArrangements) {
    const TemporaryFolder folder;
    const std::string out = folder.file("run"), log = folder.file("log");
    BackgroundProgram program(train_args(out, kLong + arrangement.keys), mpirun(arrangement.ranks), log);
    const std::vector<int> pids = pids_of(out, arrangement.ranks, 3);
    const rlimit limit{1000, 1000};  // rank 1's files now can't grow beyond 1,000 bytes
    REQUIRE(prlimit(pids[1], RLIMIT_FSIZE, &limit, nullptr) == 0);
    CHECK(program.wait() != 0);
    CHECK(all_gone(pids));
    const std::string text = read_text(log);
    INFO(arrangement.keys << "\n" << text);
    const size_t message = text.find("triad: rank 1: ");
    REQUIRE(message != std::string::npos);
    CHECK(text.find("File too large", message) != std::string::npos);
  }
}

TEST_CASE("dist: a rank whose data cannot be read ends all ranks, and its message names file and offset", "[dist]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log"), shard = folder.file("part.bin");
  ShardWriter writer(shard, TokenWidth::u16);
  writer.append(std::vector<int32_t>(20'000, 7));
  writer.finish();
  const std::string args = train_args(out, kLong + "--set data.kind=shards --set data.paths=" + shard);
  BackgroundProgram first(args, as_torchrun_would(0) + "exec timeout -s KILL 100 "),
      other(args, as_torchrun_would(1) + with_faults("TRIAD_BAD_DISK=" + shard) + "exec timeout -s KILL 100 ", log);
  const std::vector<int> pids = pids_of(out, 2, 3);
  write_text(shard + ".bad", "");
  CHECK(other.wait() == 1);
  CHECK(first.wait() == 1);
  CHECK(all_gone(pids));
  const std::string text = read_text(log);
  INFO(text);
  CHECK(has(text, "triad: rank 1: " + shard + ": cannot be read at offset "));
}

TEST_CASE("dist: SIGTERM to one rank, or .HALT, stops all ranks after one step, with a checkpoint", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  for (const bool by_file : {true, false}) {
    const std::string out = folder.file(by_file ? "halt" : "term"), log = folder.file("log");
    BackgroundProgram program(train_args(out, kLong), mpirun(2), log);
    const std::vector<int> pids = pids_of(out, 2, 3);
    if (by_file)
      write_text(out + "/.HALT", "");
    else
      kill(pids[1], SIGTERM);
    CHECK(program.wait() == 0);
    INFO(read_text(log));
    const Json state = Json::parse(read_text(out + "/checkpoints/latest/state.json"));
    CHECK(static_cast<size_t>(state["step"].get<int64_t>()) + 1 == lines(out + "/training.csv").size());
    for (const char* rank : {"0", "1"}) {
      const std::string last = lines(out + "/ranks/rank_" + rank + ".log").back();
      CHECK(last.find("after step " + std::to_string(state["step"].get<int64_t>())) != std::string::npos);
    }
  }
}

TEST_CASE("dist: ranks of which one got the signal end alike when the checkpoint cannot be written", "[dist]") {
  for (const char* keys : {"--set dist.zero=0 ", "--set dist.zero=1 "}) {
    const TemporaryFolder folder;
    const std::string out = folder.file("run"), log = folder.file("log"),
                      args = train_args(out, kLong + "--set train.save_every=0 " + keys);
    const std::string limited = "exec timeout -s KILL 300 ";
    BackgroundProgram first(args, as_torchrun_would(0) + with_faults("TRIAD_FULL_DISK='checkpoints model'") + limited,
                            log),
        other(args, as_torchrun_would(1) + limited);
    const std::vector<int> pids = pids_of(out, 2, 3);
    kill(pids[1], SIGTERM);
    CHECK(first.wait() == 128 + SIGTERM);
    CHECK(other.wait() == 128 + SIGTERM);
    const std::string text = read_text(log);
    INFO(keys << text);
    CHECK(has(text, "No space left on device"));
    CHECK(has(text, "; the run was stopped by signal 15 after step "));
    CHECK(has(text, " lost: there is no checkpoint"));
  }
}

namespace {

// TRIAD_KILL_TRIALS and TRIAD_KILL_SEED set the trial count and the seed. The default is a few trials with a random
// seed.
int64_t number_from(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::stoll(text) : otherwise;
}

bool has_half_written(const std::string& folder) {
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    if (entry.path().filename().string().find(".tmp.") != std::string::npos) return true;
  return false;
}

}  // namespace

TEST_CASE("dist: a loss that is not finite ends all ranks, after the pending checkpoint is written", "[dist][waits]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string explode = "--set train.save_every=1 --set train.lr=1e30 --set train.grad_clip=0 ";
  const Outcome stopped = run_command(with_faults("TRIAD_SLOW_SYNC=0.1") + mpirun(2) + TRIAD_PROGRAM " " +
                                      train_args(folder.file("run"), explode));
  INFO(stopped.output);
  CHECK(stopped.exit_code == 1);
  CHECK(has(stopped.output, "triad: rank 0: step 2: "));
  CHECK(has(stopped.output,
            "triad: rank 0: 1 step is lost since the checkpoint of step 1. To go on, under the same "
            "launcher: "));
  const std::string newest = resolve_checkpoint(folder.file("run"));
  CHECK(has(newest, "step_1"));
  // inspect verifies checksums, too.
  CHECK(run_program("inspect " + newest + kWeights).exit_code == 0);
  CHECK(count_files(folder.file("run/checkpoints")) == 3);  // step_0, step_1, latest
}

TEST_CASE("dist: an error is printed, and a pending checkpoint delays the end by dist.timeout_s at most",
          "[dist][waits]") {
  const TemporaryFolder folder;
  const std::string explode =
      "--set train.save_every=1 --set train.lr=1e30 --set train.grad_clip=0 --set dist.timeout_s=1 ";
  const Outcome stopped = run_command(with_faults("TRIAD_SLOW_SYNC='0.5 /checkpoints'") + TRIAD_PROGRAM " " +
                                      train_args(folder.file("run"), explode));
  INFO(stopped.output);
  CHECK(stopped.exit_code == 1);
  CHECK(has(stopped.output, "triad: step 2: "));
  CHECK(has(resolve_checkpoint(folder.file("run")), "step_0"));  // step_1 was not written within the timeout
  refused(train_args(folder.file("other"), "--set train.save_every=1 --set train.lr=1e30 --set train.grad_clip=0"), 1,
          {"triad: step 2: ", "triad: 1 step is lost since the checkpoint of step 1. To go on: "});
}

TEST_CASE("dist: after kills at random moments, every resume on 2 ranks ends with the same bits", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  constexpr int kSteps = 40;
  const std::string more = "--set train.steps=40 --set train.save_every=2 --set train.keep_last=3 ";
  const std::string ranks = "--set train.accumulate_grad_batches=2 ";
  const auto seed = static_cast<uint64_t>(number_from("TRIAD_KILL_SEED", std::random_device{}()));
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform(0, 1);

  // Measures the time from when the first step ends until the run ends. Kills are uniformly distributed over it.
  const std::string whole = folder.file("whole");
  BackgroundProgram uninterrupted(train_args(whole, ranks + more), mpirun(2));
  pids_of(whole, 2, 1);
  const auto start = std::chrono::steady_clock::now();
  REQUIRE(uninterrupted.wait() == 0);
  double seconds = seconds_since(start);

  const int64_t trials = number_from("TRIAD_KILL_TRIALS", 3);
  int64_t in_save = 0, ended_first = 0;
  for (int64_t trial = 0; trial < trials;) {
    const std::string out = folder.file("killed");
    const double wait = uniform(random) * seconds;
    const int victims = std::uniform_int_distribution(1, 3)(random);  // if bit r is set, rank r is killed
    INFO("seed " << seed << ", trial " << trial << ": after " << wait << " of " << seconds << " s, ranks (bits) "
                 << victims);
    BackgroundProgram program(train_args(out, ranks + more), mpirun(2));
    const std::vector<int> pids = pids_of(out, 2, 1);
    const auto first_step = std::chrono::steady_clock::now();
    std::this_thread::sleep_for(std::chrono::duration<double>(wait));
    for (const int r : {0, 1})
      if ((victims >> r & 1) != 0) kill(pids[static_cast<size_t>(r)], SIGKILL);
    if (program.wait() == 0) {  // the run ended before the kill, so the trial is repeated with a shorter wait
      REQUIRE(++ended_first < 10 + trials);
      seconds = std::min(0.9 * seconds, seconds_since(first_step));
      fs::remove_all(out);
      continue;
    }
    CHECK(all_gone(pids));
    in_save += has_half_written(out + "/checkpoints");
    REQUIRE(fs::exists(out + "/checkpoints/latest/state.json"));
    run(out, 2, more + "--resume latest");
    CHECK(same_file(whole + kWeights, out + kWeights));
    CHECK(column(out + "/training.csv", "loss") == column(whole + "/training.csv", "loss"));
    CHECK(lines(out + "/training.csv").size() == kSteps + 1);
    fs::remove_all(out);
    ++trial;
  }
  std::printf("seed %llu: %lld kills within %.2f s, %lld of them in the midst of a save; %lld came too late\n",
              static_cast<unsigned long long>(seed), static_cast<long long>(trials), seconds,
              static_cast<long long>(in_save), static_cast<long long>(ended_first));
}

TEST_CASE("dist: a run has a whole checkpoint from its first step on", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), more = "--set train.steps=12 --set train.save_every=1000 ";
  BackgroundProgram program(train_args(out, kLong + "--set train.save_every=1000 "), mpirun(2));
  const std::vector<int> pids = pids_of(out, 2, 1);
  CHECK(fs::exists(out + "/checkpoints/step_0/state.json"));
  kill(pids[0], SIGKILL);
  CHECK(program.wait() != 0);
  CHECK(all_gone(pids));
  run(out, 2, more + "--resume latest");
  CHECK(same_file(run(folder.file("whole"), 2, more) + kWeights, out + kWeights));
}
