// What tells that a run hangs, is slow or goes wrong: rules on made-up numbers, and whole runs with a planted fault.
#include "train/watchdog.h"

#include <signal.h>
#include <sys/stat.h>

#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <thread>

#include "engine/graph.h"
#include "engine/stack_dump.h"
#include "tests/program.h"
#include "tests/test.h"
#include "train/anomaly.h"
#include "train/load_config.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

const std::string kTiny = TRIAD_SOURCE_DIR "/configs/tiny.json";

Config config_with(const std::vector<std::string>& sets = {}) { return load_config(kTiny, sets).config; }

std::vector<Json> heartbeats(const std::string& folder, int rank, const std::string& msg) {
  std::vector<Json> found;
  std::ifstream file(folder + "/heartbeat_rank" + std::to_string(rank) + ".jsonl");
  for (std::string line; std::getline(file, line);) {
    const Json json = Json::parse(line, nullptr, false);
    if (json.is_object() && json["msg"] == msg) found.push_back(json);
  }
  return found;
}

// Waits for it, a minute at most: machines that run tests are busy.
Json wait_for_heartbeat(const std::string& folder, int rank, const std::string& msg) {
  for (int i = 0; i < 600; ++i) {
    const std::vector<Json> found = heartbeats(folder, rank, msg);
    if (!found.empty()) return found.front();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  FAIL("rank " << rank << " never told of \"" << msg << "\"");
  return {};
}

std::string stack_dump(const std::string& folder, int rank) {
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().filename().string().starts_with("stackdump_rank" + std::to_string(rank) + "_"))
      return read_text(entry.path().string());
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The op whose product fell asleep, as the dump's own stack has it: one of the classifier's counts as that.
std::string sleeping_op(const std::string& dump) {
  REQUIRE(has(dump, "cblas_sgemm"));
  return has(dump, "triad::classifier_forward_backward(") ? "classifier_forward_backward" : "matmul";
}

// A run that ends when it is told to, in which products of one rank fall asleep.
std::string endless(const std::string& out, const std::string& more) {
  return "train " + kTiny + " --set runtime.device=cpu --set log.out_dir=" + out +
         " --set train.steps=100000000 --set train.allow_unsafe=true --set log.every=1000 " + more;
}
std::string planted(const std::string& plant) {
  return "ASAN_OPTIONS=verify_asan_link_order=0 LD_PRELOAD=" TRIAD_PLANT " TRIAD_PLANT=\"" + plant + "\" ";
}
// A test that fails leaves no run behind.
struct Ends {
  ~Ends() { program.send(SIGTERM); }
  BackgroundProgram& program;
};
void halt(const std::string& folder) { std::ofstream(folder + "/.HALT") << ""; }

struct Steps {
  explicit Steps(const Config& c) : rules(c) {}
  // Types of what is found in n steps; change(i, step) sets what they are told.
  template <class Change>
  std::vector<std::string> run(int n, Change&& change) {
    std::vector<std::string> types;
    for (int i = 0; i < n; ++i) {
      StepHealth health{.step = ++step, .updates = step, .loss = 0, .grad_norm = 1, .tokens = 1000, .seconds = 1};
      health.loss = 5.0 * std::exp(-0.01 * static_cast<double>(step));
      change(i, health);
      for (const Anomaly& anomaly : rules.step(health)) types.push_back(anomaly.type), text = anomaly.text;
    }
    return types;
  }
  AnomalyRules rules;
  int64_t step = 0;
  std::string text;
};

using Types = std::vector<std::string>;

}  // namespace

TEST_CASE("watchdog: slow is what still moves, hung what does not", "[watchdog]") {
  const Config config = config_with({"log.hang_s=30", "log.slow_s=10", "log.slow_factor=5"});
  StallRule rule(config);
  using State = StallRule::State;
  Progress::Place place{.stage = Stage::forward};
  double now = 0;
  const auto look = [&](double seconds, bool ops, bool step) {
    now += seconds;
    place.count += ops;
    place.steps += step;
    return rule.look(now, place);
  };
  for (int i = 0; i < 20; ++i) CHECK(look(1, true, true) == State::advancing);
  CHECK(*rule.usual_s() == Approx(1));
  for (int i = 0; i < 9; ++i) CHECK(look(1, true, false) == State::advancing);  // five times 1 s, but not slow_s
  CHECK(look(1, true, false) == State::slow);
  for (int i = 0; i < 29; ++i) CHECK(look(1, false, false) == State::slow);
  CHECK(look(1, false, false) == State::hung);
  CHECK(rule.still_s() == Approx(30));
  CHECK(look(1, true, false) == State::slow);
  CHECK(look(1, true, true) == State::advancing);
  // A device that moves on while the host waits for it is no hang.
  for (int i = 0; i < 100; ++i) {
    ++place.device_mark;
    CHECK(look(1, false, i % 5 == 0) == State::advancing);
  }
  // What is not a step is never a slow one, and a checkpoint may take as long as other ranks would wait.
  place.stage = Stage::evaluation;
  for (int i = 0; i < 100; ++i) CHECK(look(1, true, false) == State::advancing);
  place.stage = Stage::checkpoint;
  for (int i = 0; i < 599; ++i) CHECK(look(1, false, false) == State::advancing);
  CHECK(look(1, false, false) == State::hung);
}

TEST_CASE("watchdog: the first steps are not slow: nobody knows yet what is usual", "[watchdog]") {
  const Config config = config_with();
  StallRule rule(config);
  Progress::Place place{.stage = Stage::forward};
  for (int i = 0; i < 1000; ++i) {
    ++place.count;
    CHECK(rule.look(i, place) == StallRule::State::advancing);
  }
}

TEST_CASE("watchdog: a rank asleep is hung, and its dump says in which op; who waits for it says so", "[watchdog]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log");
  BackgroundProgram program(endless(out, "--set log.hang_s=3"), planted("1 2 0.5 12") + mpirun(2), log);
  const Ends ends{program};
  const Json asleep = wait_for_heartbeat(out, 1, "hung"), waits = wait_for_heartbeat(out, 0, "hung");
  const std::string dump = stack_dump(out, 1), other = stack_dump(out, 0);
  wait_for_heartbeat(out, 1, "recovered");
  halt(out);
  CHECK(program.wait() == 0);
  INFO(asleep.dump() << "\n" << waits.dump() << "\n" << dump << "\n" << other << "\n" << read_text(log));
  CHECK(asleep["waits_in_collective"] == false);
  CHECK(has(asleep["at"], "within " + sleeping_op(dump)));
  CHECK(has(dump, "rank 1 of 2"));
  CHECK(has(dump, "last op: " + sleeping_op(dump) + " (not ended)"));
  CHECK(has(dump, "nanosleep"));           // where it sleeps
  CHECK(has(dump, "Trainer::run_steps"));  // whence it was called
  CHECK(has(dump, "\"watchdog\""));        // all threads are there
  CHECK(waits["waits_in_collective"] == true);
  CHECK(has(other, "(under way)"));
  CHECK(has(other, "rank 1 has begun"));
  CHECK(has(read_text(log), "rank 1: HUNG"));
}

TEST_CASE("watchdog: a step made slow is slow, not hung", "[watchdog]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log");
  BackgroundProgram program(endless(out, "--set log.hang_s=5 --set log.slow_s=1"), planted("0 2 6 0.2"), log);
  const Ends ends{program};
  const Json slow = wait_for_heartbeat(out, 0, "slow");
  wait_for_heartbeat(out, 0, "recovered");
  halt(out);
  CHECK(program.wait() == 0);
  INFO(slow.dump() << read_text(log));
  CHECK(slow["step_s"] >= 1);
  CHECK(slow["usual_s"] < 1);
  CHECK(heartbeats(out, 0, "hung").empty());
  CHECK(stack_dump(out, 0).empty());
  CHECK(has(read_text(log), "SLOW, still advancing"));
  // Every heartbeat has its schema; what no GPU tells is null.
  const Json boot = heartbeats(out, 0, "boot").at(0);
  CHECK(boot["schema"] == 1);
  for (const char* key : {"gpu_used_mib", "gpu_util_pct", "power_w"}) CHECK(boot.at(key).is_null());
  CHECK(boot["host_mib"] > 1);
}

TEST_CASE("watchdog: a hang ends the run where that is asked for", "[watchdog]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  BackgroundProgram program(endless(out, "--set log.hang_s=2 --set log.on_anomaly=stop"), planted("0 1 0.5 60"));
  const Ends ends{program};
  CHECK(program.wait() == 1);
  CHECK(has(read_text(out + "/.anomaly_type"), "hung\n"));
  const std::string dump = stack_dump(out, 0);
  CHECK(has(dump, "last op: " + sleeping_op(dump) + " (not ended)"));
}

TEST_CASE("watchdog: a hang ends the run though the disk hangs too", "[watchdog]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log");
  BackgroundProgram program(endless(out, "--set log.hang_s=4 --set log.on_anomaly=stop"), planted("0 1 0.5 100"), log);
  const Ends ends{program};
  wait_for_heartbeat(out, 0, "boot");
  const std::time_t now = std::time(nullptr);  // no dump of the time to come gets further than its name
  for (int i = 0; i < 90; ++i)
    REQUIRE(mkfifo((out + "/stackdump_rank0_" + std::to_string(now + i) + ".txt").c_str(), 0600) == 0);
  const auto began = std::chrono::steady_clock::now();
  CHECK(program.wait() == 1);
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(60));
  CHECK(has(read_text(out + "/.anomaly_type"), "hung\n"));  // comes before the dump
  CHECK(heartbeats(out, 0, "hung").empty());                // behind it: what ended the run was the time
}

TEST_CASE("watchdog: SIGUSR1 writes a dump, and the run goes on", "[watchdog]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  BackgroundProgram program(endless(out, ""));
  const Ends ends{program};
  wait_for_heartbeat(out, 0, "step_end");
  program.send(SIGUSR1);
  const int64_t step = wait_for_heartbeat(out, 0, "stackdump")["step"];
  while (heartbeats(out, 0, "step_end").back()["step"] < step + 2)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  halt(out);
  CHECK(program.wait() == 0);
  const std::string dump = stack_dump(out, 0);
  INFO(dump);
  CHECK(fs::exists(out + "/mem_step" + std::to_string(step) + ".json"));
  CHECK(has(dump, "asked for by SIGUSR1"));
  CHECK(has(dump, "(main)"));
  CHECK(has(dump, "main  [triad+"));
}

TEST_CASE("watchdog: whoever wants to is called on SIGUSR1", "[watchdog]") {
  const TemporaryFolder folder;
  const Config config = config_with();
  const Device cpu = Device::cpu();
  const std::unique_ptr<Comm> comm = make_self_comm(cpu);
  const Progress progress(cpu);
  std::atomic<int> calls = 0;
  Watchdog watchdog(progress, *comm, cpu, config, folder.path(), 7,
                    {.heartbeat = [](int64_t, const std::string&, const Json&) {}, .alert = [](const std::string&) {}});
  watchdog.on_request([&](int64_t step) { calls += step == 7; });
  raise(SIGUSR1);
  for (int i = 0; i < 600 && calls == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
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
  for (int i = 0; i < 20 && !has(text, "\"otherthread\""); ++i) text = dump_stacks();
  stop = true;
  other.join();
  INFO(text);
  CHECK(has(text, "\"otherthread\""));
  CHECK(has(text, "triad::dump_stacks"));
  CHECK(has(text, "nanosleep"));
  CHECK(!has(text, "no answer"));
}

TEST_CASE("anomaly: a healthy run has none", "[watchdog]") {
  const Config config = config_with();
  std::mt19937 random(1);
  std::normal_distribution<double> noise(0, 1);
  Steps steps(config);
  CHECK(steps.run(5000, [&](int i, StepHealth& s) {
    s.loss = 6 - 0.0005 * static_cast<double>(s.step) + 0.1 * noise(random);
    s.seconds = 1 + 0.1 * noise(random) + (i % 50 == 0 ? 9 : 0);  // one slow step now and then
    s.host_mib = 500 + 300.0 * (i % 70) / 70;                     // a sawtooth that gives all back
    s.device_mib = 4000;
  }) == Types{});
}

TEST_CASE("anomaly: throughput that falls flat, once", "[watchdog]") {
  const Config config = config_with({"log.throughput_drop=0.5"});
  Steps steps(config);
  CHECK(steps.run(200, [](int, StepHealth&) {}) == Types{});
  CHECK(steps.run(100, [](int, StepHealth& s) { s.tokens = 600; }) == Types{});
  CHECK(steps.run(300, [](int, StepHealth& s) { s.tokens = 400; }) == Types{"throughput_flat"});
  CHECK(has(steps.text, "400 tokens/s"));
  CHECK(has(steps.text, "step 320: "));  // after one window of it
  CHECK(steps.run(40, [](int, StepHealth&) {}) == Types{});
  CHECK(steps.run(40, [](int, StepHealth& s) { s.tokens = 10; }) == Types{"throughput_flat"});
  // Steps of a millisecond: 20 of them say nothing, ten seconds do.
  const auto quick = [](double tokens) { return [=](int, StepHealth& s) { s.tokens = tokens, s.seconds = 1e-3; }; };
  Steps short_steps(config_with({"log.plateau_steps=0"}));
  CHECK(short_steps.run(60000, quick(1)) == Types{});
  CHECK(short_steps.run(1000, quick(0.1)) == Types{});
  CHECK(short_steps.run(20000, quick(0.1)) == Types{"throughput_flat"});
}

TEST_CASE("anomaly: a loss that no longer falls over log.plateau_steps", "[watchdog]") {
  const Config config = config_with();
  std::mt19937 random(1);
  std::normal_distribution<double> noise(0, 0.1);
  Steps steps(config);
  CHECK(steps.run(1000, [&](int, StepHealth& s) {
    s.loss = 8 - 0.004 * static_cast<double>(s.step) + noise(random);
  }) == Types{});
  CHECK(steps.run(1500, [&](int, StepHealth& s) { s.loss = 4 + noise(random); }) == Types{});
  CHECK(steps.run(600, [&](int, StepHealth& s) { s.loss = 4 + noise(random); }) == Types{"loss_plateau"});
  Steps never(config_with({"log.plateau_steps=0"}));
  CHECK(never.run(5000, [&](int, StepHealth& s) { s.loss = 4; }) == Types{});
}

TEST_CASE("anomaly: memory that creeps, on the host or the device", "[watchdog]") {
  const Config config = config_with({"log.creep_mib=100", "log.plateau_steps=0"});
  Steps steps(config);
  CHECK(steps.run(1000, [](int i, StepHealth& s) { s.host_mib = 1000 + 0.1 * i; }) == Types{});  // 50 MiB in 500 steps
  CHECK(steps.run(1000, [](int i, StepHealth& s) { s.host_mib = 1100 + 0.4 * i; }) == Types{"host_memory_creep"});
  CHECK(has(steps.text, "MiB more in 500 steps"));
  Steps device(config);
  CHECK(device.run(1000, [](int i, StepHealth& s) { s.device_mib = 9000 + 0.5 * i + 500 * (i % 7 == 0); }) ==
        Types{"device_memory_creep"});
}

TEST_CASE("anomaly: gates that collapse, by layer; forced ones are as they should be", "[watchdog]") {
  const GateHealth good{.layer = 0, .entropy_mean = 1.0, .max_mean = 0.4, .collapse_frac = 0};
  const std::vector<GateHealth> healthy = {good, {.layer = 1, .entropy_mean = 0.6, .max_mean = 0.8}};
  const std::vector<GateHealth> collapsed = {good,
                                             {.layer = 1, .entropy_mean = 0.2, .max_mean = 0.95, .collapse_frac = 0.9}};
  const Config config = config_with();
  Steps steps(config);
  CHECK(steps.run(10, [&](int, StepHealth& s) { s.gates = healthy; }) == Types{});
  CHECK(steps.run(2, [&](int, StepHealth& s) { s.gates = collapsed; }) == Types{});  // not yet three times in a row
  CHECK(steps.run(5, [&](int i, StepHealth& s) { s.gates = i == 0 ? healthy : collapsed; }) == Types{"gate_collapse"});
  CHECK(has(steps.text, "layer 1 (entropy 0.200"));
  CHECK(!has(steps.text, "layer 0"));
  CHECK(steps.run(5, [](int, StepHealth&) {}) == Types{});  // steps without a look at gates say nothing
  const Config forced_config = config_with({"nsa.force_branch=win"});
  Steps forced(forced_config);
  CHECK(forced.run(10, [&](int, StepHealth& s) { s.gates = collapsed; }) == Types{});
}

TEST_CASE("anomaly: gates that die, by layer, are not taken for collapsed ones", "[watchdog]") {
  const Config config = config_with();
  Steps steps(config);
  const auto gates = [](double dead) {  // of a layer's rows; where all are, there is nothing else to tell
    const double known = dead < 1 ? 1.0 : NAN;
    return std::vector<GateHealth>{
        {.layer = 0, .entropy_mean = 1.0, .max_mean = 0.4},
        {.layer = 1, .entropy_mean = known, .max_mean = 0.5 * known, .collapse_frac = 0 * known, .dead_frac = dead}};
  };
  const auto few = gates(0.009), some = gates(0.02), all = gates(1);
  CHECK(steps.run(10, [&](int, StepHealth& s) { s.gates = few; }) == Types{});
  CHECK(steps.run(2, [&](int, StepHealth& s) { s.gates = some; }) == Types{});  // not yet three times in a row
  CHECK(steps.run(5, [&](int i, StepHealth& s) { s.gates = i == 0 ? few : some; }) == Types{"gate_dead"});
  CHECK(has(steps.text, "layer 1 (2% of its rows)"));
  CHECK(!has(steps.text, "layer 0"));
  CHECK(steps.run(1, [&](int, StepHealth& s) { s.gates = few; }) == Types{});
  CHECK(steps.run(5, [&](int, StepHealth& s) { s.gates = all; }) == Types{"gate_dead"});
}

TEST_CASE("anomaly: zero gradients, but those that are zero by construction", "[watchdog]") {
  const Config config = config_with();
  Steps steps(config);
  CHECK(steps.run(1, [](int, StepHealth& s) { s.grad_norm = 0; }) == Types{"zero_gradients"});
  const std::vector<std::string> fc1 = {"blocks.0.attn.gate.fc1.weight", "blocks.0.attn.gate.fc1.bias"};
  const std::vector<std::string> query = {"blocks.1.attn.q_proj.weight"};
  Steps first(config);
  CHECK(first.run(1, [&](int, StepHealth& s) { s.updates = 0, s.zero_grads = fc1; }) == Types{});
  CHECK(first.run(1, [&](int, StepHealth& s) { s.updates = 1, s.zero_grads = fc1; }) == Types{"zero_gradients"});
  CHECK(has(first.text, "2 gradients are zero: blocks.0.attn.gate.fc1.weight"));
  Steps second(config);
  CHECK(second.run(1, [&](int, StepHealth& s) { s.zero_grads = query; }) == Types{"zero_gradients"});

  const auto zero = [](const char* name, const std::vector<std::string>& sets) {
    return zero_by_construction("blocks.0.attn." + std::string(name), config_with(sets), 5);
  };
  for (const char* name : {"gate.fc1.weight", "gate.fc2.bias", "k_cmp_proj.weight", "v_sel_proj.weight",
                           "k_win_proj.weight", "q_proj.weight", "out_proj.weight", "phi_k.weight"})
    CHECK_FALSE(zero(name, {}));
  for (const char* name :
       {"gate.fc1.weight", "gate.fc2.bias", "k_cmp_proj.weight", "phi_k.weight", "v_sel_proj.weight"})
    CHECK(zero(name, {"nsa.force_branch=win"}));
  for (const char* name : {"k_win_proj.weight", "q_proj.weight", "out_proj.weight"})
    CHECK_FALSE(zero(name, {"nsa.force_branch=win"}));
  CHECK(zero("gate.fc2.weight", {"nsa.uniform_gate=true"}));
  CHECK(zero("gate.fc2.weight", {"nsa.stopgrad_gates=true"}));
  CHECK_FALSE(zero("k_sel_proj.weight", {"nsa.stopgrad_gates=true"}));
  CHECK(zero("k_cmp_proj.weight", {"train.seq_len=7"}));  // nsa.l is 8
  CHECK_FALSE(zero("k_win_proj.weight", {"model.attention=dense", "nsa.force_branch=cmp"}));
}

TEST_CASE("anomaly: one stops the run where that is asked for, with a checkpoint", "[watchdog]") {
  const TemporaryFolder folder;
  const std::string common = "train " + kTiny +
                             " --set runtime.device=cpu --set train.lr=0 --set train.steps=300 "
                             "--set log.plateau_steps=20 --set log.out_dir=";
  const Outcome stopped = run_program(common + folder.file("stop") + " --set log.on_anomaly=stop");
  INFO(stopped.output);
  CHECK(stopped.exit_code == 0);
  CHECK(has(stopped.output, "stopped by an anomaly"));
  CHECK(has(read_text(folder.file("stop") + "/.anomaly_type"), "loss_plateau\n"));
  CHECK(fs::exists(folder.file("stop") + "/checkpoints/latest"));
  const Outcome reported = run_program(common + folder.file("report"));
  INFO(reported.output);
  CHECK(reported.exit_code == 0);
  CHECK(has(reported.output, "anomaly loss_plateau: step "));
  CHECK(heartbeats(folder.file("report"), 0, "anomaly").at(0)["type"] == "loss_plateau");
  CHECK(heartbeats(folder.file("report"), 0, "step_end").back()["step"] == 300);
  CHECK_FALSE(fs::exists(folder.file("report") + "/.anomaly_type"));
}

TEST_CASE("anomaly: what all ranks see one tells, what is a rank's own that rank", "[watchdog]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const Outcome outcome =
      run_ranks(2, "train " + kTiny +
                       " --set runtime.device=cpu --set train.lr=0 --set train.steps=120 --set log.plateau_steps=20 "
                       "--set log.on_anomaly=stop --set log.out_dir=" +
                       out);
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
  const size_t told = outcome.output.find("anomaly loss_plateau: step ");
  REQUIRE(told != std::string::npos);
  CHECK(outcome.output.find("anomaly loss_plateau", told + 1) == std::string::npos);
  CHECK(heartbeats(out, 0, "anomaly").size() == 1);
  CHECK(heartbeats(out, 1, "anomaly").empty());
  CHECK(heartbeats(out, 1, "stopped").size() == 1);  // it stops all the same
  CHECK(has(read_text(out + "/.anomaly_type"), "loss_plateau\n"));

  const Config config = config_with({"log.creep_mib=100", "log.plateau_steps=20"});
  AnomalyRules rules(config);
  std::map<std::string, bool> own;
  for (int i = 1; i <= 1000; ++i)
    for (const Anomaly& a : rules.step({.step = i,
                            .updates = i,
                            .loss = 4,
                            .grad_norm = 1,
                            .tokens = 1000,
                            .seconds = 1,
                            .host_mib = i,
                            .device_mib = i}))
      own[a.type] = a.of_one_rank;
  CHECK(own == std::map<std::string, bool>{
                   {"device_memory_creep", true}, {"host_memory_creep", true}, {"loss_plateau", false}});
  std::vector<Anomaly> flat;
  AnomalyRules rate(config);
  for (int i = 1; i <= 300 && flat.empty(); ++i)
    flat = rate.step({.step = i,
                      .updates = i,
                      .loss = -static_cast<double>(i),
                      .grad_norm = 1,
                      .tokens = i < 200 ? 1e3 : 1,
                      .seconds = 1});
  REQUIRE(flat.size() == 1);
  CHECK(flat[0].type == "throughput_flat");
  CHECK(flat[0].of_one_rank);  // by its own clock
}

TEST_CASE("watchdog: NVML's values are absent without a GPU", "[watchdog]") {
  const GpuUse use = Nvml("").sample();
  CHECK_FALSE(use.used_mib);
  CHECK_FALSE(use.util_pct);
  CHECK_FALSE(use.power_w);
  CHECK_FALSE(Nvml("ffff:ff:1f.0").sample().used_mib);
}

TEST_CASE("watchdog: a GPU's NVML values, and the marks its stream leaves, in a graph too", "[watchdog][gpu]") {
  if (!require_gpu()) return;
  const Device gpu = Device::cuda();
  const GpuUse use = Nvml(backend::pci_address(gpu)).sample();
  REQUIRE(use.used_mib);
  CHECK(*use.used_mib > 1);
  REQUIRE(use.power_w);
  CHECK(*use.power_w > 1);
  Runtime runtime({.device = gpu, .arena_bytes = 1 << 20, .scratch_bytes = 1 << 16});
  Context& ctx = runtime.ctx();
  Progress progress(gpu);
  ctx.listeners->push_back(&progress);
  CHECK(progress.place().device_text().empty());
  tell_stage(ctx, Stage::backward, 3);
  ctx.stream.synchronize();
  CHECK(progress.place().device_text() == "backward of layer 3");
  Graph graph(gpu);
  graph.record(ctx, [&] { tell_stage(ctx, Stage::forward, 5); });
  ctx.stream.synchronize();
  CHECK(progress.place().device_text() == "backward of layer 3");  // recorded, not run
  graph.launch(ctx.stream);
  ctx.stream.synchronize();
  CHECK(progress.place().device_text() == "forward of layer 5");
}
