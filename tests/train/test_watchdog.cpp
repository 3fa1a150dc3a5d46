// Detecting hung and slow runs: the rules on made-up numbers, and whole runs with an injected fault.
#include "tests/support/train_run.h"
#include "train/monitor/watchdog.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <thread>

#include "engine/graph.h"
#include "engine/process/power.h"
#include "engine/process/stack_dump.h"
#include "tests/support/heartbeats.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

Config watched_config(const std::vector<std::string>& sets = {}) { return load_config(kTiny, sets).config; }

// Waits until a rank has logged more than `before` heartbeats with this msg, and returns the last one. Fails after
// three minutes, a limit for busy machines.
Json wait_for_heartbeat(const std::string& folder, int rank, const std::string& msg, size_t before = 0) {
  for (int i = 0; i < 1800; ++i) {
    const std::vector<Json> found = heartbeats(folder, rank, msg);
    if (found.size() > before) return found.at(before);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  FAIL("rank " << rank << " never logged \"" << msg << "\"");
  return {};
}

std::string stack_dump(const std::string& folder, int rank) {
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().filename().string().starts_with("stackdump_rank" + std::to_string(rank) + "_"))
      return read_text(entry.path().string());
  return "";
}

// Makes writing a stack dump hang from now on: pipes without a reader take the dump's file names.
void make_dumps_hang(const std::string& folder) {
  const std::time_t now = std::time(nullptr);
  for (int i = 0; i < 300; ++i)
    REQUIRE(mkfifo((folder + "/stackdump_rank0_" + std::to_string(now + i) + ".txt").c_str(), 0600) == 0);
}

// Returns the op in whose matrix product the process sleeps, according to the dump's own stack. With nested ops it's
// the outer one.
std::string sleeping_op(const std::string& dump) {
  REQUIRE(has(dump, "cblas_sgemm"));
  for (const std::string op : {"classifier_forward_backward", "linear_silu_forward", "linear_silu_backward"})
    if (has(dump, "triad::" + op + "(")) return op;
  return "matmul";
}

// Returns arguments for a run that ends only when stopped.
std::string endless(const std::string& out, const std::string& more) {
  return "train " + kTiny + " --set runtime.device=cpu --set log.out_dir=" + out +
         " --set train.steps=100000000 --set train.allow_unsafe=true --set log.every=1000 " + more;
}
std::string asleep_while(const std::string& file, int rank, const std::string& each_s) {
  return with_faults("TRIAD_FAULTS=\"" + std::to_string(rank) + " " + each_s + " " + file + "\"");
}
void halt(const std::string& folder) { write_text(folder + "/.HALT", ""); }

}  // namespace

TEST_CASE("watchdog: the usual time of a step is that of its stage", "[watchdog]") {
  const Config config =
      watched_config({"train.steps=null", R"(train.stages=[{"steps":9},{"steps":9,"seq_len":16}])", "log.slow_s=10"});
  StallRule rule(config, /*first_step=*/4);
  Progress::Position place{.stage = Stage::forward};
  double now = 0;
  const auto look = [&](double seconds, bool step) {
    now += seconds, ++place.count, place.steps += step;
    return rule.look(now, place);
  };
  for (int i = 0; i < 5; ++i) CHECK(look(1, true) == StallRule::State::advancing);
  for (int i = 0; i < 3; ++i) {
    CHECK(look(15, false) == StallRule::State::advancing);
    CHECK(look(5, true) == StallRule::State::advancing);
  }
  CHECK(*rule.usual_s() == Approx(20));
  CHECK(look(99, false) == StallRule::State::advancing);
  CHECK(look(1, false) == StallRule::State::slow);
}

TEST_CASE("watchdog: a rank that advances slowly is slow, one that does not advance is hung", "[watchdog]") {
  const Config config = watched_config({"log.hang_s=30", "log.slow_s=10", "log.slow_factor=5"});
  StallRule rule(config);
  using State = StallRule::State;
  Progress::Position place{.stage = Stage::forward};
  double now = 0;
  const auto look = [&](double seconds, bool ops, bool step) {
    now += seconds;
    place.count += ops;
    place.steps += step;
    return rule.look(now, place);
  };
  for (int i = 0; i < 20; ++i) CHECK(look(1, true, true) == State::advancing);
  CHECK(*rule.usual_s() == Approx(1));
  // The step now takes longer than log.slow_factor (5) times the usual 1 s, but less than log.slow_s (10 s).
  for (int i = 0; i < 9; ++i) CHECK(look(1, true, false) == State::advancing);
  CHECK(look(1, true, false) == State::slow);
  for (int i = 0; i < 29; ++i) CHECK(look(1, false, false) == State::slow);
  CHECK(look(1, false, false) == State::hung);
  CHECK(rule.still_s() == Approx(30));
  CHECK(look(1, true, false) == State::slow);
  CHECK(look(1, true, true) == State::advancing);
  // A rank is not hung if its device advances while the host waits for it.
  for (int i = 0; i < 100; ++i) {
    ++place.device_mark;
    CHECK(look(1, false, i % 5 == 0) == State::advancing);
  }
  // Only steps can be slow. A checkpoint may take as long as other ranks' timeout.
  place.stage = Stage::evaluation;
  for (int i = 0; i < 100; ++i) CHECK(look(1, true, false) == State::advancing);
  place.stage = Stage::checkpoint;
  for (int i = 0; i < 599; ++i) CHECK(look(1, false, false) == State::advancing);
  CHECK(look(1, false, false) == State::hung);
}

TEST_CASE("watchdog: the first steps are never slow, because the usual duration is not known yet", "[watchdog]") {
  const Config config = watched_config();
  StallRule rule(config);
  Progress::Position place{.stage = Stage::forward};
  for (int i = 0; i < 1000; ++i) {
    ++place.count;
    CHECK(rule.look(i, place) == StallRule::State::advancing);
  }
}

TEST_CASE("watchdog: an evaluation, which has forward passes too, is not a slow step", "[watchdog]") {
  Runtime runtime({.device = Device::cpu(), .arena_bytes = 1 << 20, .scratch_bytes = 1 << 16});
  Context& ctx = runtime.ctx();
  Progress progress(Device::cpu());
  ctx.listeners->push_back(&progress);
  const Config config = watched_config({"log.slow_s=10", "log.slow_factor=5"});
  StallRule rule(config);
  using State = StallRule::State;
  double now = 0;
  const auto batch = [&] {
    for (int64_t layer = 0; layer < 2; ++layer) report_stage(ctx, Stage::forward, layer);
    report_stage(ctx, Stage::head);
    return rule.look(++now, progress.position());
  };
  for (int i = 0; i < 20; ++i) {
    report_stage(ctx, Stage::data);
    CHECK(batch() == State::advancing);
    progress.step_done();
  }
  for (const Stage next : {Stage::data, Stage::checkpoint}) {
    report_stage(ctx, Stage::evaluation);
    for (int i = 0; i < 100; ++i) CHECK(batch() == State::advancing);
    CHECK(progress.position().stage == Stage::evaluation);
    report_stage(ctx, next);
    CHECK(progress.position().stage == next);
  }
  report_stage(ctx, Stage::data);  // the next step is an ordinary one
  for (int i = 0; i < 9; ++i) CHECK(batch() == State::advancing);
  CHECK(progress.position().stage_text() == "head");
  CHECK(batch() == State::slow);
}

TEST_CASE("watchdog: a waiting rank logs its position before others can report it as hung", "[watchdog]") {
  const TemporaryFolder folder;
  const Config config = watched_config({"log.hang_s=3"});
  const Device cpu = Device::cpu();
  const std::unique_ptr<Comm> comm = make_self_comm(cpu);
  const Progress progress(cpu);
  std::vector<std::string> messages;
  std::atomic<bool> hung = false;
  {
    Watchdog watchdog(progress, *comm, cpu, config, folder.path(), 0,
                      {.heartbeat =
                           [&](int64_t, const std::string& msg, const Json&) {
                             messages.push_back(msg);
                             hung = hung || msg == "hung";
                           },
                       .alert = [](const std::string&) {}});
    for (int i = 0; i < 1800 && !hung; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  REQUIRE(messages.size() >= 2);
  CHECK(messages.front() == "progress");
  CHECK(messages.back() == "hung");
}

TEST_CASE("watchdog: a sleeping rank is hung, its dump names the op, and waiting ranks name the rank",
          "[watchdog][slow]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log"), sleeps = folder.file("sleeps");
  BackgroundProgram program(endless(out, "--set log.hang_s=8"), asleep_while(sleeps, 1, "300") + mpirun(2), log);
  wait_for_heartbeat(out, 1, "step_end", 2);
  write_text(sleeps, "");
  const Json asleep = wait_for_heartbeat(out, 1, "hung"), waits = wait_for_heartbeat(out, 0, "hung");
  const std::string dump = stack_dump(out, 1), other = stack_dump(out, 0);
  fs::remove(sleeps);
  wait_for_heartbeat(out, 1, "recovered");
  halt(out);
  CHECK(program.wait() == 0);
  INFO(asleep.dump() << "\n" << waits.dump() << "\n" << dump << "\n" << other << "\n" << read_text(log));
  CHECK(asleep["waits_in_collective"] == false);
  CHECK(has(asleep["at"], "within " + sleeping_op(dump)));
  CHECK(has(dump, "rank 1 of 2"));
  CHECK(has(dump, "last op: " + sleeping_op(dump) + " (not ended)"));
  // The dump shows where the main thread is, its callers, and the other threads. The main thread sleeps until a file is
  // gone: it is in nanosleep(), or it has just woken and looks for the file with access().
  CHECK((has(dump, "nanosleep") || has(dump, "#0  access")));
  CHECK(has(dump, "Trainer::run_steps"));
  CHECK(has(dump, "\"watchdog\""));
  CHECK(waits["waits_in_collective"] == true);
  CHECK(has(other, "(under way)"));
  CHECK(has(other, "rank 1 has begun"));
  CHECK(has(read_text(log), "rank 1: HUNG"));
}

TEST_CASE("watchdog: a step that is slowed down is slow, not hung", "[watchdog]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log"), sleeps = folder.file("sleeps");
  BackgroundProgram program(endless(out, "--set log.hang_s=20 --set log.slow_s=1"), asleep_while(sleeps, 0, "0.2"),
                            log);
  wait_for_heartbeat(out, 0, "step_end", 2);
  std::this_thread::sleep_for(std::chrono::seconds(3));  // meanwhile the watchdog updates the usual step duration
  const size_t before = heartbeats(out, 0, "slow").size(), recovered = heartbeats(out, 0, "recovered").size();
  write_text(sleeps, "");
  const Json slow = wait_for_heartbeat(out, 0, "slow", before);
  fs::remove(sleeps);
  wait_for_heartbeat(out, 0, "recovered", recovered);
  halt(out);
  CHECK(program.wait() == 0);
  INFO(slow.dump() << read_text(log));
  CHECK(slow["step_s"] >= 1);
  CHECK(slow["step_s"].get<double>() >= 5 * slow["usual_s"].get<double>());  // log.slow_factor is 5
  CHECK(heartbeats(out, 0, "hung").empty());
  CHECK(stack_dump(out, 0).empty());
  CHECK(has(read_text(log), "SLOW, still advancing"));
  // Every heartbeat has its schema version. Values that need a GPU are null.
  const Json boot = heartbeats(out, 0, "boot").at(0);
  CHECK(boot["schema"] == 1);
  for (const char* key : {"gpu_used_mib", "gpu_util_pct", "power_w"}) CHECK(boot.at(key).is_null());
  CHECK(boot["host_mib"] > 1);
}

TEST_CASE("watchdog: a hang ends the run if configured", "[watchdog][slow]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), sleeps = folder.file("sleeps");
  BackgroundProgram program(endless(out, "--set log.hang_s=8 --set log.on_anomaly=stop"),
                            asleep_while(sleeps, 0, "300"));
  wait_for_heartbeat(out, 0, "step_end", 2);
  write_text(sleeps, "");
  CHECK(program.wait() == 1);
  CHECK(has(read_text(out + "/.anomaly_type"), "hung\n"));
  const std::string dump = stack_dump(out, 0);
  CHECK(has(dump, "last op: " + sleeping_op(dump) + " (not ended)"));
}

TEST_CASE("watchdog: a hang ends the run although the disk hangs, too", "[watchdog][slow]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log"), sleeps = folder.file("sleeps");
  BackgroundProgram program(endless(out, "--set log.hang_s=8 --set log.on_anomaly=stop"),
                            asleep_while(sleeps, 0, "1e6"), log);
  wait_for_heartbeat(out, 0, "step_end", 2);
  make_dumps_hang(out);
  write_text(sleeps, "");
  // Both the matrix product and the stack dump would block forever, so the watchdog's time limit ends the process. It
  // writes .anomaly_type before the dump and the heartbeat "hung" after it.
  CHECK(program.wait() == 1);
  CHECK(has(read_text(out + "/.anomaly_type"), "hung\n"));
  CHECK(heartbeats(out, 0, "hung").empty());
}

TEST_CASE("watchdog: an error is printed and ends the run while the watchdog waits for a hanging disk", "[watchdog]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log");
  BackgroundProgram program(endless(out, ""), "", log);
  wait_for_heartbeat(out, 0, "step_end");
  make_dumps_hang(out);
  program.send(SIGUSR1);
  std::this_thread::sleep_for(std::chrono::seconds(2));
  CHECK(heartbeats(out, 0, "stackdump").empty());
  const rlimit limit{100000, 100000};  // bytes: the heartbeats soon exceed this limit, the log does not
  REQUIRE(prlimit(program.pid(), RLIMIT_FSIZE, &limit, nullptr) == 0);
  wait_for_text(log, "File too large");
  CHECK(program.wait() == 1);
}

TEST_CASE("watchdog: SIGUSR1 before main does not end the process, and is handled once the watchdog runs",
          "[watchdog]") {
  const std::string early = with_faults("TRIAD_EARLY_USR1=1");
  CHECK(run_program("--version", early).exit_code == 0);
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log");
  BackgroundProgram program(endless(out, ""), early + mpirun(2), log);
  for (const int rank : {0, 1}) {
    wait_for_heartbeat(out, rank, "stackdump");
    CHECK(has(stack_dump(out, rank), "asked for by SIGUSR1"));
  }
  halt(out);
  CHECK(program.wait() == 0);
}

// A thread in an OpenBLAS kernel shows a one-frame stack in a dump, because these kernels have no unwind tables. So the
// test asks for dumps until one finds the main thread elsewhere.
TEST_CASE("watchdog: SIGUSR1 writes a dump, and the run goes on", "[watchdog]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  BackgroundProgram program(endless(out, ""));
  wait_for_heartbeat(out, 0, "step_end");
  constexpr size_t kMostDumps = 50;
  int64_t step = 0;
  std::string dump;
  for (size_t i = 0; i < kMostDumps && !has(dump, "main  [triad+"); ++i) {
    program.send(SIGUSR1);
    const Json written = wait_for_heartbeat(out, 0, "stackdump", i);
    step = written["step"];
    dump = read_text(written["file"].get<std::string>());
  }
  while (heartbeats(out, 0, "step_end").back()["step"] < step + 2)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  halt(out);
  CHECK(program.wait() == 0);
  INFO(dump);
  CHECK(fs::exists(out + "/mem_step" + std::to_string(step) + ".json"));
  CHECK(has(dump, "asked for by SIGUSR1"));
  CHECK(has(dump, "(main)"));
  CHECK(has(dump, "main  [triad+"));
}

TEST_CASE("watchdog: registered functions are called on SIGUSR1", "[watchdog]") {
  const TemporaryFolder folder;
  const Config config = watched_config();
  const Device cpu = Device::cpu();
  const std::unique_ptr<Comm> comm = make_self_comm(cpu);
  const Progress progress(cpu);
  std::atomic<int> calls = 0;
  Watchdog watchdog(progress, *comm, cpu, config, folder.path(), 7,
                    {.heartbeat = [](int64_t, const std::string&, const Json&) {},
                     .alert = [](const std::string&) {},
                     .after_dump = [&](int64_t step) { calls += step == 7; }});
  raise(SIGUSR1);
  for (int i = 0; i < 1800 && calls == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK(calls == 1);
  CHECK(has(stack_dump(folder.path(), 0), "steps done: 7"));
}

TEST_CASE("watchdog: a stack dump has every thread, by name", "[watchdog]") {
  std::atomic<bool> stop = false;
  std::thread other([&] {
    pthread_setname_np(pthread_self(), "otherthread");
    while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  std::string text;
  // A new thread has no name at first, and a thread that gets no CPU time for a second is dumped as "no answer".
  for (int i = 0; i < 60 && (!has(text, "\"otherthread\"") || has(text, "no answer")); ++i) text = dump_stacks();
  stop = true;
  other.join();
  INFO(text);
  CHECK(has(text, "\"otherthread\""));
  CHECK(has(text, "triad::dump_stacks"));
  CHECK(has(text, "nanosleep"));
  CHECK(!has(text, "no answer"));
}

TEST_CASE("watchdog: NVML's values are absent without a GPU", "[watchdog]") {
  const GpuUse use = Nvml("").sample();
  CHECK_FALSE(use.used_mib);
  CHECK_FALSE(use.util_pct);
  CHECK_FALSE(use.power_w);
  CHECK_FALSE(Nvml("ffff:ff:1f.0").sample().used_mib);
  const GpuEnergy power = Nvml("").energy();
  CHECK_FALSE(power.energy_j);
  CHECK_FALSE(power.clock_mhz);
  CHECK_FALSE(power.capped);
}

TEST_CASE("power: energy, power and clock of a step, from readings of the card", "[watchdog]") {
  const auto reading = [](double seconds, double joules, double mhz, bool capped) {
    return TimedEnergy{seconds,
                       {.energy_j = joules, .limit_w = 700, .clock_mhz = mhz, .max_clock_mhz = 1980, .capped = capped}};
  };
  // The first and the last reading show an idle card, and their clocks don't count. The counter is renewed before the
  // readings at 0.5 and 1.5 s, so these give the power.
  std::vector<TimedEnergy> readings = {reading(0, 1000, 345, false),   reading(0.25, 1000, 1600, true),
                                       reading(0.5, 1100, 1700, true), reading(1, 1400, 1800, false),
                                       reading(1.5, 1700, 1700, true), reading(1.75, 1700, 345, false)};
  const PowerUse use = summarize_power(readings, 4, 2.0);
  CHECK(use.watts == 600.0);
  CHECK(use.joules == 300.0);
  CHECK(use.clock_mhz == 1700.0);
  CHECK(use.capped_share == 0.75);
  CHECK(describe(use) ==
        "600 of 700 W; the power limit lowers the clock 75% of the time; SM clock 1700 of 1980 MHz; 300 J a step");
  CHECK(describe(use, "run").ends_with("300 J a run"));
  // Below kLeastMeteredSeconds between renewed counters, energy and power are absent.
  readings[4].card.energy_j = 1400, readings[5].card.energy_j = 1400;
  const PowerUse brief = summarize_power(readings, 4, 2.0);
  CHECK_FALSE(brief.joules);
  CHECK_FALSE(brief.watts);
  CHECK(describe(brief) == "the power limit lowers the clock 75% of the time; SM clock 1700 of 1980 MHz");
  CHECK(describe(summarize_power({{}, {}, {}}, 2, 1.0)) == "");  // a card that reports nothing
  CHECK(describe(summarize_power({}, 2, 1.0)) == "");
}

TEST_CASE("power: when the card is read does not matter, though its counter is renewed every 100 ms", "[watchdog]") {
  for (const double phase : {0.0, 13.0, 50.0, 99.0}) {
    std::vector<TimedEnergy> readings;
    for (int i = 0; i <= 300; ++i) {  // every 10 ms for 3 s, at 600 W
      const double ms = 10.0 * i + phase;
      readings.push_back({ms * 1e-3, {}});
      readings.back().card.energy_j = 60 * std::floor(ms / 100);
    }
    const PowerUse use = summarize_power(readings, 1000, 3.0);
    REQUIRE(use.watts);
    CHECK(*use.watts == Approx(600).epsilon(0.004));
    CHECK(*use.joules == Approx(1.8).epsilon(0.004));
  }
}

TEST_CASE("watchdog: a GPU's NVML values, and the position that its stream records, in a graph too",
          "[watchdog][gpu]") {
  if (!require_gpu()) return;
  const Device gpu = Device::cuda();
  const GpuUse use = Nvml(backend::pci_address(gpu)).sample();
  REQUIRE(use.used_mib);
  CHECK(*use.used_mib > 1);
  REQUIRE(use.power_w);
  CHECK(*use.power_w > 1);
  const GpuEnergy power = Nvml(backend::pci_address(gpu)).energy();
  REQUIRE(power.energy_j);
  CHECK(*power.energy_j > 1);
  REQUIRE(power.limit_w);
  CHECK(*power.limit_w > 1);
  REQUIRE(power.clock_mhz);
  REQUIRE(power.max_clock_mhz);
  CHECK(*power.clock_mhz > 1);
  CHECK(*power.clock_mhz <= *power.max_clock_mhz);
  CHECK(power.capped);
  Runtime runtime({.device = gpu, .arena_bytes = 1 << 20, .scratch_bytes = 1 << 16});
  Context& ctx = runtime.ctx();
  Progress progress(gpu);
  ctx.listeners->push_back(&progress);
  CHECK(progress.position().device_text().empty());
  report_stage(ctx, Stage::backward, 3);
  ctx.stream.synchronize();
  CHECK(progress.position().device_text() == "backward of layer 3");
  Graph graph(gpu);
  graph.record(ctx, [&] { report_stage(ctx, Stage::forward, 5); });
  ctx.stream.synchronize();
  // A graph that is recorded does not run its kernels.
  CHECK(progress.position().device_text() == "backward of layer 3");
  graph.launch(ctx.stream);
  ctx.stream.synchronize();
  CHECK(progress.position().device_text() == "forward of layer 5");
}
