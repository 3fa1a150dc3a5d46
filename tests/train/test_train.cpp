// Whole program runs: two runs give the same bits, a resume is exact to the bit, what a run's folder contains, and how
// a run is stopped.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <sstream>
#include <thread>

#include "engine/rng.h"
#include "io/checkpoint.h"
#include "io/data/loader.h"
#include "io/data/shards.h"
#include "io/json_config.h"
#include "io/safetensors.h"
#include "model/flops.h"
#include "model/params.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/run/memory_plan.h"
#include "train/run/stop_signal.h"
#include "train/step/train_step.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

const std::string kTiny = TRIAD_SOURCE_DIR "/configs/tiny.json";

std::string train_args(const std::string& out, const std::string& device, const std::string& more = "") {
  return "train " + kTiny + " --set log.out_dir=" + out + " --set runtime.device=" + device + " " + more;
}

void run(const std::string& args, const std::string& environment = "") {
  const Outcome outcome = run_program(args, environment);
  INFO("triad " << args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
}

std::string weights(const std::string& folder) { return read_text(folder + "/model.safetensors"); }

std::vector<std::string> lines(const std::string& path) {
  std::vector<std::string> out;
  std::istringstream in(read_text(path));
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

// Waits until training.csv has this many rows, for three minutes at most.
void wait_for_rows(const std::string& folder, size_t rows) {
  for (int i = 0; i < 180000 && lines(folder + "/training.csv").size() < rows + 1; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void check_same_bits_and_resume(const std::string& device, const std::string& precision) {
  const TemporaryFolder folder;
  const std::string more = "--set train.accumulate_grad_batches=2 --set runtime.precision=" + precision + " ";
  run(train_args(folder.file("a"), device, more));
  run(train_args(folder.file("b"), device, more));
  REQUIRE(!weights(folder.file("a")).empty());
  CHECK(weights(folder.file("a")) == weights(folder.file("b")));
  // Resumes a finished run from its step-7 checkpoint.
  run(train_args(folder.file("c"), device, more + "--set train.save_every=7"));
  run(train_args(folder.file("c"), device,
                 more + "--set train.save_every=7 --overwrite --resume " + folder.file("c/checkpoints/step_7")));
  CHECK(weights(folder.file("a")) == weights(folder.file("c")));
  CHECK(lines(folder.file("a/training.csv")).size() == 21);
  // The header and 20 steps: rows after the checkpoint were cut and written again.
  CHECK(lines(folder.file("c/training.csv")).size() == 21);
}

// Trains configs/tiny.json's model on a device, one step at a time, and gives access to its master weights.
struct SmallStep {
  SmallStep(Device device, const std::vector<std::string>& sets)
      : config(load_config(kTiny, sets).config), runtime(allocate_planned(config, device)), step(*runtime, config) {
    step.model().params().init(runtime->ctx(), 7);
  }
  std::vector<float> master() {
    std::vector<float> host(static_cast<size_t>(step.model().params().stored_elements()));
    read(runtime->ctx(), host.data(), step.model().params().master());
    return host;
  }
  std::vector<int32_t> tokens(int32_t first) const {
    std::vector<int32_t> out;
    for (int64_t i = 0; i < config.train.seq_len * config.train.micro_batch_size; ++i)
      out.push_back(static_cast<int32_t>((first + 7 * i) % config.model.vocab_size));
    return out;
  }
  // Queues a step whose tokens begin with `first`.
  void queue(int64_t number, int32_t first) {
    const int64_t positions = config.train.seq_len * config.train.micro_batch_size;
    step.begin();
    step.micro_step(tokens(first), tokens(first + 1), positions);
    step.update(number, positions);
  }
  Config config;
  std::unique_ptr<Runtime> runtime;
  TrainStep step;
};

// Queues three steps: the second reads a NaN weight, the third doesn't.
void check_bad_step(Device device, const std::string& on_nonfinite) {
  SmallStep small(device, {"train.on_nonfinite=" + on_nonfinite, "runtime.cuda_graph=true"});
  const Params& params = small.step.model().params();
  const Tensor gain = params.part(params.weights(), params.count() - 2);  // norm_f, on which all gradients depend
  REQUIRE(params.specs()[static_cast<size_t>(params.count() - 2)].name == "norm_f.weight");
  Context& ctx = small.runtime->ctx();
  small.queue(0, 1);
  CHECK(small.step.result().finite);
  const std::vector<float> before = small.master();
  std::vector<float> good(static_cast<size_t>(gain.numel())), bad = good;
  read(ctx, good.data(), gain);
  bad = good;
  bad[3] = std::numeric_limits<float>::quiet_NaN();
  write(ctx, gain, bad.data());
  small.queue(1, 2);
  write(ctx, gain, good.data());
  small.queue(2, 3);  // queued before the host reads the second step's result
  const TrainStep::Result second = small.step.result();
  CHECK(!second.finite);
  CHECK(second.bad_tensor == "the gradient of embed.weight");
  const TrainStep::Result third = small.step.result();
  CHECK(third.finite);
  CHECK(third.bad_tensor.empty());
  const bool stopped = on_nonfinite == "stop";
  CHECK((small.master() == before) == stopped);
  small.queue(3, 4);
  CHECK(small.step.result().finite);
  CHECK((small.master() == before) == stopped);
}

}  // namespace

TEST_CASE("train: a step that is not finite changes nothing, and with `stop` no later step does", "[train]") {
  for (const char* on_nonfinite : {"stop", "skip"}) check_bad_step(Device::cpu(), on_nonfinite);
}

TEST_CASE("train: a step that is not finite changes nothing on the GPU either", "[train][gpu]") {
  if (!require_gpu()) return;
  for (const char* on_nonfinite : {"stop", "skip"}) check_bad_step(Device::cuda(), on_nonfinite);
}

TEST_CASE("train: a micro-step replayed from a graph gives the bits of one that runs directly", "[train][gpu]") {
  if (!require_gpu()) return;
  for (const char* precision : {"fp32", "bf16"}) {
    std::vector<float> weights[2];
    for (const bool graph : {false, true}) {
      SmallStep small(Device::cuda(), {std::string("runtime.precision=") + precision,
                                       std::string("runtime.cuda_graph=") + (graph ? "true" : "false")});
      for (int32_t i = 0; i < 6; ++i) {
        small.queue(i, 3 * i);
        if (i > 0) CHECK(small.step.result().finite);
      }
      CHECK(small.step.result().finite);
      weights[graph] = small.master();
    }
    CHECK(weights[0] == weights[1]);
  }
}

TEST_CASE("train: same seed, same bits, and resume to the exact bit", "[train]") {
  check_same_bits_and_resume("cpu", "fp32");
  check_same_bits_and_resume("cpu", "bf16");
}

TEST_CASE("train: a resume in the third file of the second epoch ends with the same bits", "[train]") {
  constexpr int64_t T = 48, kSequences = 8, kStep = 2;  // values in configs/tiny.json
  const TemporaryFolder folder;
  const int64_t tokens[] = {100, 110, 180};  // chosen so that only the third file contains sequences 5, 6 and 7
  const Philox random(1, 0);
  for (uint64_t file = 0; file < 3; ++file) {
    ShardWriter writer(folder.file("part" + std::to_string(file) + ".bin"), TokenWidth::u16);
    for (int64_t i = 0; i < tokens[file]; ++i)
      writer.append(std::vector{static_cast<int32_t>(random.below(file << 32 | static_cast<uint64_t>(i), 256))});
    writer.finish();
  }
  const std::string more = "--set data.kind=shards --set 'data.paths=[\"" + folder.file("part*.bin") +
                           "\"]' --set data.val_fraction=0 --set train.save_every=1 --set train.keep_last=0 ";
  run(train_args(folder.file("whole"), "cpu", more));
  const auto seed = static_cast<uint64_t>(load_config(kTiny, {}).config.data.seed);
  int resumes = 0;
  for (int64_t step = kSequences / kStep; step < 2 * kSequences / kStep; ++step) {  // second-epoch steps
    const int64_t next = sequence_position(step * kStep, kSequences, seed);
    if (next * T < tokens[0] + tokens[1]) continue;
    ++resumes;
    const std::string out = folder.file("from" + std::to_string(step));
    run(train_args(out, "cpu", more + "--resume " + folder.file("whole/checkpoints/step_" + std::to_string(step))));
    CHECK(weights(out) == weights(folder.file("whole")));
  }
  CHECK(resumes >= 1);
}

TEST_CASE("train: same seed, same bits, and resume to the exact bit on the GPU", "[train][gpu]") {
  if (!require_gpu()) return;
  check_same_bits_and_resume("cuda", "fp32");
  check_same_bits_and_resume("cuda", "bf16");
  const TemporaryFolder folder;
  for (const char* graph : {"false", "true"})
    run(train_args(folder.file(graph), "cuda",
                   std::string("--set train.accumulate_grad_batches=2 --set runtime.precision=bf16 --set "
                               "runtime.cuda_graph=") +
                       graph));
  CHECK(weights(folder.file("false")) == weights(folder.file("true")));
}

TEST_CASE("train: a resume after a kill at any moment ends with the same bits", "[train]") {
  const TemporaryFolder folder;
  const std::string more = "--set train.steps=60 --set train.save_every=1 ";
  run(train_args(folder.file("whole"), "cpu", more));
  for (const size_t rows : {1, 9, 30}) {
    const std::string out = folder.file("killed" + std::to_string(rows));
    BackgroundProgram program(train_args(out, "cpu", more));
    wait_for_rows(out, rows);
    program.send(SIGKILL);
    program.wait();
    run(train_args(out, "cpu", more + "--resume latest"));
    CHECK(weights(out) == weights(folder.file("whole")));
    CHECK(lines(out + "/training.csv").size() == 61);
  }
}

namespace {

const std::string kEndless = "--set train.steps=1000000 --set train.allow_unsafe=true ";

void check_stops(const std::string& device) {
  const TemporaryFolder folder;
  const std::string more =
      kEndless + (device == "cpu" ? "" : "--set train.save_every=9999 --set runtime.precision=bf16 ");
  constexpr int kByFile = 0;
  for (const int signal : {kByFile, SIGTERM, SIGINT, SIGHUP, SIGUSR2, SIGXCPU}) {
    if (device != "cpu" && signal > SIGTERM) continue;
    INFO("signal " << signal);
    const std::string out = folder.file(std::to_string(signal));
    BackgroundProgram program(train_args(out, device, more));
    wait_for_rows(out, 2);
    if (signal == kByFile)
      write_text(out + "/.HALT", "");
    else
      program.send(signal);
    CHECK(program.wait() == 0);
    CHECK(fs::exists(out + "/checkpoints/latest/state.json"));
    CHECK(!fs::exists(out + "/.HALT"));
    // Every step before the checkpoint has a row in training.csv.
    const Json state = Json::parse(read_text(out + "/checkpoints/latest/state.json"));
    CHECK(static_cast<size_t>(state["step"].get<int64_t>()) + 1 == lines(out + "/training.csv").size());
  }
}

}  // namespace

TEST_CASE("train: .HALT and signals stop after the current step with a checkpoint", "[train]") { check_stops("cpu"); }

namespace {

struct SignalOutcome {
  size_t survived = 0;  // signals that didn't end the process
  std::vector<std::string> lines;
};

// Forks a process that handles stop signals, in step 9 of a run, and sends these signals to it, one after another.
// whole: the newest checkpoint's step; -1: none.
SignalOutcome after_signals(const std::vector<int>& signals, const std::string& log, const std::string& launcher = "",
                            int64_t whole = -1) {
  const int child = fork();
  if (child == 0) {
    const int file = open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(file, STDERR_FILENO);
    await_stop_signals(/*acknowledge=*/true, launcher, "the/run");
    if (whole >= 0) checkpoint_is_whole(whole);
    step_begins(9);
    for (const int number : signals) {
      raise(number);
      if (write(STDERR_FILENO, "survived\n", 9) != 9) _exit(3);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  SignalOutcome outcome;
  for (const std::string& line : lines(log))
    line == "survived" ? void(++outcome.survived) : outcome.lines.push_back(line);
  REQUIRE((WIFEXITED(status) &&
           WEXITSTATUS(status) == (outcome.survived == signals.size() ? 0 : 128 + signals[outcome.survived])));
  return outcome;
}

}  // namespace

TEST_CASE("train: a stop signal ends the run at once if and only if an earlier message announced that", "[train]") {
  const TemporaryFolder folder;
  for (size_t n = 1; n <= 4; ++n)
    for (size_t bits = 0; bits < size_t{1} << n; ++bits) {
      std::vector<int> signals;
      std::string names;
      for (size_t i = 0; i < n; ++i) {
        // The four others count as one signal: n - i are in use, so they mix.
        constexpr int kOthers[] = {SIGTERM, SIGHUP, SIGUSR2, SIGXCPU};
        signals.push_back((bits >> i & 1) != 0 ? SIGINT : kOthers[(n - i) % 4]);
        names += signals.back() == SIGINT ? " INT" : " TERM";
      }
      const int last = signals.back();
      signals.pop_back();
      const SignalOutcome before = after_signals(signals, folder.file("before"));
      if (before.survived < signals.size()) continue;  // an earlier signal has already ended the process
      bool announced = false;
      for (const std::string& line : before.lines)
        announced = announced || has(line, last == SIGINT ? "; Ctrl-C " : " or SIGTERM again ends at once");
      signals.push_back(last);
      INFO(names);
      CHECK((after_signals(signals, folder.file("after")).survived < n) == announced);
      // Launchers may send SIGTERM twice; the second must not prevent the checkpoint.
      if (names == " TERM TERM" || names == " INT TERM TERM") CHECK_FALSE(announced);
      if (names == " INT INT" || names == " INT TERM INT" || names == " TERM INT TERM") CHECK(announced);
    }
}

TEST_CASE("train: a signal's message promises no more than the launcher allows, and says which steps are lost",
          "[train]") {
  const TemporaryFolder folder;
  const auto message = [&](const std::vector<int>& signals, const std::string& launcher, int64_t whole) {
    const SignalOutcome outcome = after_signals(signals, folder.file("log"), launcher, whole);
    REQUIRE(outcome.lines.size() == signals.size());
    return outcome.lines.back();
  };
  const std::string begun = " when its step ends (step 9 has begun)";
  CHECK(message({SIGHUP}, "", 4) == "triad: stops with a checkpoint" + begun);
  // mpirun kills its ranks about a second after it has sent them a signal, and they cannot know when.
  const std::string mpirun = message({SIGTERM}, "Open MPI", 4), slurm = message({SIGTERM}, "Slurm", 4);
  for (const char* part : {"triad: tries to save a checkpoint", begun.c_str(), "mpirun may kill it before",
                           "about a second", "the/run/.HALT", "--mca odls_base_sigkill_timeout SECONDS"})
    CHECK(has(mpirun, part));
  CHECK(has(slurm, "tries to save a checkpoint" + begun + ". Slurm may kill it before"));
  CHECK(has(slurm, "the/run/.HALT"));
  CHECK_FALSE(has(slurm, "mpirun"));
  setenv("OMPI_MCA_odls_base_sigkill_timeout", "77", 1);
  CHECK(has(message({SIGTERM}, "Open MPI", 4), "mpirun kills it 77 s after its own signal"));
  unsetenv("OMPI_MCA_odls_base_sigkill_timeout");
  const std::string last = "; the last whole checkpoint is that of step ";
  CHECK(message({SIGINT, SIGINT}, "", 4) == "triad: ends at once: 5 steps are lost" + last + "4");
  CHECK(message({SIGINT, SIGINT}, "", 8) == "triad: ends at once: 1 step is lost" + last + "8");
  CHECK(message({SIGINT, SIGINT}, "", 9) == "triad: ends at once: no step is lost" + last + "9");
  CHECK(message({SIGINT, SIGINT}, "", -1) == "triad: ends at once: 9 steps are lost; there is no checkpoint");
}

TEST_CASE("train: a launcher of one process is known too", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log");
  BackgroundProgram program(train_args(out, "cpu", kEndless), "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 ", log);
  wait_for_rows(out, 2);
  program.send(SIGTERM);
  CHECK(program.wait() == 0);
  CHECK(fs::exists(out + "/checkpoints/latest/state.json"));
  CHECK(has(read_text(log), "\ntriad: tries to save a checkpoint when its step ends"));
}

TEST_CASE("train: nohup's run goes on after SIGHUP", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log");
  BackgroundProgram program(train_args(out, "cpu", kEndless), "trap '' HUP; exec ", log);
  wait_for_rows(out, 2);
  program.send(SIGHUP);
  wait_for_rows(out, lines(out + "/training.csv").size() + 3);
  CHECK_FALSE(has(read_text(log), "stops with a checkpoint"));
  program.send(SIGTERM);
  CHECK(program.wait() == 0);
  CHECK(has(read_text(log), "stopped by signal 15"));
}

TEST_CASE("train: a stop whose checkpoint cannot be written says how many steps are lost, also by its exit code",
          "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log");
  BackgroundProgram program(
      train_args(out, "cpu", kEndless + "--set train.save_every=1000000 --set log.csv=false --set log.every=1000000"),
      "", log);
  wait_for_text(log, "step 1/");
  const rlimit limit{100'000, 100'000};  // files now can't be as large as the weights
  REQUIRE(prlimit(program.pid(), RLIMIT_FSIZE, &limit, nullptr) == 0);
  program.send(SIGTERM);
  const int exit_code = program.wait();
  const std::string text = read_text(log);
  INFO(text);
  CHECK(has(text, "File too large"));
  CHECK(has(text, "; the run was stopped by signal 15 after step "));
  CHECK(has(text, " lost: the last whole checkpoint is that of step 0\n"));
  CHECK(exit_code == 128 + SIGTERM);
}

TEST_CASE("train: Ctrl-C prints a message during a step, and a second one ends the run at once", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log");
  const std::string asleep = folder.file("asleep");
  BackgroundProgram program(train_args(out, "cpu", "--set train.steps=1000000 --set train.allow_unsafe=true"),
                            with_faults("TRIAD_FAULTS='0 1e6 " + asleep + "'"), log);
  wait_for_rows(out, 2);
  write_text(asleep, "");
  wait_for_file(asleep + ".asleep");
  program.send(SIGINT);
  wait_for_text(log, "again ends at once\n");
  const std::string messages = read_text(log);
  INFO(messages);
  // The file has a header and one row per finished step, so its line count is the running step's number.
  const size_t rows = lines(out + "/training.csv").size();
  CHECK(has(messages, "\ntriad: stops with a checkpoint when its step ends (step " + std::to_string(rows) +
                          " has begun); Ctrl-C again ends at once\n"));
  program.send(SIGINT);
  CHECK(program.wait() == 128 + SIGINT);
  CHECK(has(read_text(log), "\ntriad: ends at once: " + std::to_string(rows) + " steps are lost; there is no"));
  CHECK(fs::exists(asleep));  // the injected fault still sleeps in a matrix product, so the step has not ended
  CHECK_FALSE(fs::exists(out + "/checkpoints"));
}

TEST_CASE("train: .HALT and SIGTERM stop a run on the GPU too", "[train][gpu]") {
  if (require_gpu()) check_stops("cuda");
}

TEST_CASE("train: checkpoints are written concurrently with the steps, and old ones are removed", "[train]") {
  const TemporaryFolder folder;
  const std::string often = "--set train.steps=9 --set train.save_every=1 ";
  run(train_args(folder.file("all"), "cpu", often + "--set train.keep_last=0"));
  run(train_args(folder.file("few"), "cpu", often + "--set train.keep_last=2 --set train.keep_every=3"));
  CHECK(list_checkpoints(folder.file("all/checkpoints")).size() == 10);  // ten with step_0
  std::vector<int64_t> kept;
  for (const CheckpointFolder& c : list_checkpoints(folder.file("few/checkpoints"))) kept.push_back(c.step);
  CHECK(kept == std::vector<int64_t>{3, 6, 8, 9});
  run(train_args(folder.file("usual"), "cpu", often));
  kept.clear();
  for (const CheckpointFolder& c : list_checkpoints(folder.file("usual/checkpoints"))) kept.push_back(c.step);
  CHECK(kept == std::vector<int64_t>{7, 8, 9});
  // The log names every checkpoint.
  const std::string log = read_text(folder.file("usual/ranks/rank_0.log"));
  for (int step = 0; step <= 9; ++step)
    CHECK(has(log, fmt::format("checkpoint {}/checkpoints/step_{}, written in ", folder.file("usual"), step)));
  // Each checkpoint contains its own step's state, although later steps run while it is being written.
  run(train_args(folder.file("five"), "cpu", "--set train.steps=9 --set train.save_every=5"));
  for (const char* file : {"model.safetensors", "optimizer.safetensors"})
    CHECK(read_text(folder.file("all/checkpoints/step_5/") + file) ==
          read_text(folder.file("five/checkpoints/step_5/") + file));
  int written = 0;
  for (const std::string& line : lines(folder.file("all/heartbeat_rank0.jsonl"))) {
    const Json beat = parse_json(line, "a heartbeat");
    if (beat["msg"] != "checkpoint") continue;
    ++written;
    CHECK(beat.contains("stall_ms"));
    CHECK(beat["write_s"].get<double>() > 0);
  }
  CHECK(written == 10);
}

TEST_CASE("train: the time of the first checkpoint is not counted as the first step's", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  // The disk is slowed down, so that a checkpoint takes seconds.
  run(train_args(out, "cpu", "--set train.steps=1 --set train.save_every=1000"),
      with_faults("TRIAD_SLOW_SYNC='0.2 /checkpoints'"));
  std::istringstream row(lines(out + "/training.csv").at(1));
  std::string row_ms;
  for (int i = 0; i < 6; ++i) std::getline(row, row_ms, ',');
  double write_s = 0, step_ms = 0;
  for (const std::string& line : lines(out + "/heartbeat_rank0.jsonl")) {
    const Json beat = Json::parse(line);
    if (beat["msg"] == "checkpoint" && write_s == 0) write_s = beat["write_s"];
    if (beat["msg"] == "step_end") step_ms = beat["step_ms"];
  }
  CHECK(write_s > 1);
  INFO("the step took " << step_ms << " ms, the checkpoint " << write_s << " s");
  CHECK(std::stod(row_ms) < step_ms + 500 * write_s);
}

TEST_CASE("train: a run's folder contains its tables, config, metrics and weights", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  write_text(folder.file("text.txt"), read_text(TRIAD_SOURCE_DIR "/train/trainer.cpp"));
  run(train_args(out, "cpu",
                 "--set data.kind=text --set 'data.paths=[\"" + folder.file("text.txt") +
                     "\"]' --set train.eval_every=10 "
                     "--set train.eval_batches=2"),
      "NSA_LR=2e-3 NSA_ENV_STATIC=1");
  CHECK(lines(out + "/training.csv").front() == "step,loss,lr,tokens_per_s,grad_norm,step_ms,mfu");
  CHECK(lines(out + "/val.csv").size() == 3);
  const Json config = Json::parse(read_text(out + "/config.json"));
  CHECK(config["train"]["lr"] == 2e-3);
  CHECK(config["model"]["mlp_hidden"] == 128);
  CHECK(config["data"]["seed"] == 1337);
  const Json metrics = Json::parse(read_text(out + "/metrics.json"));
  for (const char* key : {"step", "train_loss", "val_loss", "tokens", "seconds", "tokens_per_s", "peak_mib"})
    CHECK(metrics.contains(key));
  const Json environment = Json::parse(read_text(out + "/env.json"));
  CHECK(environment["environment"]["NSA_LR"] == "2e-3");
  CHECK(!environment["environment"].contains("PATH"));
  const std::vector<std::string> beats = lines(out + "/heartbeat_rank0.jsonl");
  REQUIRE(beats.size() >= 22);
  CHECK(Json::parse(beats.front())["msg"] == "boot");
  CHECK(Json::parse(beats[1])["msg"] == "step_end");
  const SafetensorsFile model(out + "/model.safetensors");
  CHECK(model.entries().size() == param_specs(config_from_json(config).model).size());
  run("generate --device cpu --tokens 5 --prompt int --checkpoint " + out);
  run("eval --device cpu --checkpoint " + out + " --data " + folder.file("text.txt"));
  run("inspect " + out + "/model.safetensors");
}

namespace {

void check_explosion(const std::string& device) {
  const TemporaryFolder folder;
  const std::string explode = "--set train.lr=1e30 --set train.grad_clip=0 ";
  const Outcome stopped = run_program(train_args(folder.file("stop"), device, explode));
  INFO(stopped.output);
  CHECK(stopped.exit_code == 1);
  CHECK(stopped.output.find("rank 0") != std::string::npos);
  CHECK(stopped.output.find("first bad tensor") != std::string::npos);
  run(train_args(folder.file("skip"), device, explode + "--set train.on_nonfinite=skip"));
  CHECK(lines(folder.file("skip/training.csv")).size() == 21);
}

}  // namespace

TEST_CASE("train: a loss that is not finite stops the run or skips the step", "[train]") { check_explosion("cpu"); }

TEST_CASE("train: a loss that is not finite stops a run on the GPU too", "[train][gpu]") {
  if (require_gpu()) check_explosion("cuda");
}

TEST_CASE("model: the M7C shape has 195 tensors and its parameter counts", "[model]") {
  const Config cpu = load_config(TRIAD_SOURCE_DIR "/configs/m7c_125m_cpu.json", {}).config;
  CHECK(param_specs(cpu.model).size() == 195);
  CHECK(count_parameters(cpu.model) == 78295332);
  CHECK(count_parameters(load_config(TRIAD_SOURCE_DIR "/configs/m7c_125m.json", {}).config.model) == 155096868);
  // The expected mean of selected tokens per row.
  for (const auto& [T, mean] : {std::pair{512, 256.5}, {2048, 752.5}, {4096, 872.5}})
    CHECK(attended_pairs(cpu.model, AttentionKind::nsa, T).sel / T == mean);
}
