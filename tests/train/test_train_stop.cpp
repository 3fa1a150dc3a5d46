// How a run is stopped: .HALT, signals and what their messages promise.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "io/json_config.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/run/stop_signal.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

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
    BackgroundProgram program(train_on(out, device, more));
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
  BackgroundProgram program(train_on(out, "cpu", kEndless), "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 ", log);
  wait_for_rows(out, 2);
  program.send(SIGTERM);
  CHECK(program.wait() == 0);
  CHECK(fs::exists(out + "/checkpoints/latest/state.json"));
  CHECK(has(read_text(log), "\ntriad: tries to save a checkpoint when its step ends"));
}

TEST_CASE("train: nohup's run goes on after SIGHUP", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log");
  BackgroundProgram program(train_on(out, "cpu", kEndless), "trap '' HUP; exec ", log);
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
      train_on(out, "cpu", kEndless + "--set train.save_every=1000000 --set log.csv=false --set log.every=1000000"), "",
      log);
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
  BackgroundProgram program(train_on(out, "cpu", "--set train.steps=1000000 --set train.allow_unsafe=true"),
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
