// Anomalies in runs that still advance: the rules on made-up numbers, and whole runs that report an anomaly or are
// stopped by one.
#include "tests/support/train_run.h"
#include "train/monitor/anomaly.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <random>

#include "tests/support/heartbeats.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/monitor/grad_ledger.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

Config config_with(const std::vector<std::string>& sets = {}) { return load_config(kTiny, sets).config; }

struct AnomalySteps {
  explicit AnomalySteps(const Config& c) : rules(c) {}
  // Passes n steps to the rules, after change(i, step) has modified step i, and returns the anomaly types.
  template <class Change>
  std::vector<std::string> run(int n, Change&& change) {
    std::vector<std::string> types;
    for (int i = 0; i < n; ++i) {
      StepHealth health{.step = ++step, .loss = 0, .grad_norm = 1, .tokens = 1000, .seconds = 1};
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

TEST_CASE("anomaly: a healthy run has none", "[anomaly]") {
  const Config config = config_with();
  std::mt19937 random(1);
  std::normal_distribution<double> noise(0, 1);
  AnomalySteps steps(config);
  // An occasional slow step is no anomaly, and neither is memory that grows and is freed again.
  CHECK(steps.run(5000, [&](int i, StepHealth& s) {
    s.loss = 6 - 0.0005 * static_cast<double>(s.step) + 0.1 * noise(random);
    s.seconds = 1 + 0.1 * noise(random) + (i % 50 == 0 ? 9 : 0);
    s.host_mib = 500 + 300.0 * (i % 70) / 70;
    s.device_mib = 4000;
  }) == Types{});
}

TEST_CASE("anomaly: a lasting fall of throughput is reported once", "[anomaly]") {
  const Config config = config_with({"log.throughput_drop=0.5"});
  AnomalySteps steps(config);
  CHECK(steps.run(200, [](int, StepHealth&) {}) == Types{});
  CHECK(steps.run(100, [](int, StepHealth& s) { s.tokens = 600; }) == Types{});
  CHECK(steps.run(300, [](int, StepHealth& s) { s.tokens = 400; }) == Types{"throughput_flat"});
  CHECK(has(steps.text, "400 tokens/s"));
  CHECK(has(steps.text, "step 320: "));  // 20 slow steps complete the span at step 320
  CHECK(steps.run(40, [](int, StepHealth&) {}) == Types{});
  CHECK(steps.run(40, [](int, StepHealth& s) { s.tokens = 10; }) == Types{"throughput_flat"});
  // The span is at least 20 steps and at least 10 s long; if steps take 1 ms, it is 10,000 steps.
  const auto quick = [](double tokens) { return [=](int, StepHealth& s) { s.tokens = tokens, s.seconds = 1e-3; }; };
  AnomalySteps short_steps(config_with({"log.plateau_steps=0"}));
  CHECK(short_steps.run(60000, quick(1)) == Types{});
  CHECK(short_steps.run(1000, quick(0.1)) == Types{});
  CHECK(short_steps.run(20000, quick(0.1)) == Types{"throughput_flat"});
}

TEST_CASE("anomaly: a loss that no longer falls over log.plateau_steps", "[anomaly]") {
  const Config config = config_with();
  std::mt19937 random(1);
  std::normal_distribution<double> noise(0, 0.1);
  AnomalySteps steps(config);
  CHECK(steps.run(1000, [&](int, StepHealth& s) {
    s.loss = 8 - 0.004 * static_cast<double>(s.step) + noise(random);
  }) == Types{});
  CHECK(steps.run(1500, [&](int, StepHealth& s) { s.loss = 4 + noise(random); }) == Types{});
  CHECK(steps.run(600, [&](int, StepHealth& s) { s.loss = 4 + noise(random); }) == Types{"loss_plateau"});
  AnomalySteps never(config_with({"log.plateau_steps=0"}));
  CHECK(never.run(5000, [&](int, StepHealth& s) { s.loss = 4; }) == Types{});
}

TEST_CASE("anomaly: memory that grows steadily, on the host or the device", "[anomaly]") {
  const Config config = config_with({"log.creep_mib=100", "log.plateau_steps=0"});
  AnomalySteps steps(config);
  // Host memory grows by 50 MiB in 500 steps.
  CHECK(steps.run(1000, [](int i, StepHealth& s) { s.host_mib = 1000 + 0.1 * i; }) == Types{});
  CHECK(steps.run(1000, [](int i, StepHealth& s) { s.host_mib = 1100 + 0.4 * i; }) == Types{"host_memory_creep"});
  CHECK(has(steps.text, "MiB more in 500 steps"));
  AnomalySteps device(config);
  CHECK(device.run(1000, [](int i, StepHealth& s) { s.device_mib = 9000 + 0.5 * i + 500 * (i % 7 == 0); }) ==
        Types{"device_memory_creep"});
}

TEST_CASE("anomaly: collapsed gates are reported by layer, but not if a branch is forced", "[anomaly]") {
  const GateHealth good{.layer = 0, .entropy_mean = 1.0, .max_mean = 0.4, .collapse_frac = 0};
  const std::vector<GateHealth> healthy = {good, {.layer = 1, .entropy_mean = 0.6, .max_mean = 0.8}};
  const std::vector<GateHealth> collapsed = {good,
                                             {.layer = 1, .entropy_mean = 0.2, .max_mean = 0.95, .collapse_frac = 0.9}};
  const Config config = config_with();
  AnomalySteps steps(config);
  CHECK(steps.run(10, [&](int, StepHealth& s) { s.gates = healthy; }) == Types{});
  CHECK(steps.run(2, [&](int, StepHealth& s) { s.gates = collapsed; }) == Types{});  // reported from the third time on
  CHECK(steps.run(5, [&](int i, StepHealth& s) { s.gates = i == 0 ? healthy : collapsed; }) == Types{"gate_collapse"});
  CHECK(has(steps.text, "layer 1 (entropy 0.200"));
  CHECK(!has(steps.text, "layer 0"));
  CHECK(steps.run(5, [](int, StepHealth&) {}) == Types{});  // steps without gate statistics do not count
  const Config forced_config = config_with({"nsa.force_branch=win"});
  AnomalySteps forced(forced_config);
  CHECK(forced.run(10, [&](int, StepHealth& s) { s.gates = collapsed; }) == Types{});
}

TEST_CASE("anomaly: dead gates are reported by layer, and not as collapsed", "[anomaly]") {
  const Config config = config_with();
  AnomalySteps steps(config);
  const auto gates = [](double dead) {  // if all rows in a layer are dead, the other statistics are NaN
    const double known = dead < 1 ? 1.0 : NAN;
    return std::vector<GateHealth>{
        {.layer = 0, .entropy_mean = 1.0, .max_mean = 0.4},
        {.layer = 1, .entropy_mean = known, .max_mean = 0.5 * known, .collapse_frac = 0 * known, .dead_frac = dead}};
  };
  const auto few = gates(0.009), some = gates(0.02), all = gates(1);
  CHECK(steps.run(10, [&](int, StepHealth& s) { s.gates = few; }) == Types{});
  CHECK(steps.run(2, [&](int, StepHealth& s) { s.gates = some; }) == Types{});  // reported from the third time on
  CHECK(steps.run(5, [&](int i, StepHealth& s) { s.gates = i == 0 ? few : some; }) == Types{"gate_dead"});
  CHECK(has(steps.text, "layer 1 (2% of its rows)"));
  CHECK(!has(steps.text, "layer 0"));
  CHECK(steps.run(1, [&](int, StepHealth& s) { s.gates = few; }) == Types{});
  CHECK(steps.run(5, [&](int, StepHealth& s) { s.gates = all; }) == Types{"gate_dead"});
}

TEST_CASE("anomaly: zero gradients are reported, except those that are zero by construction", "[anomaly]") {
  const Config config = config_with();
  AnomalySteps steps(config);
  CHECK(steps.run(1, [](int, StepHealth& s) { s.grad_norm = 0; }) == Types{"zero_gradients"});
  const std::vector<std::string> fc1 = {"blocks.0.attn.gate.fc1.weight", "blocks.0.attn.gate.fc1.bias"};
  const std::vector<std::string> query = {"blocks.1.attn.q_proj.weight"};
  AnomalySteps first(config);
  CHECK(first.run(2, [&](int, StepHealth& s) { s.zero_grads = fc1; }) == Types{"zero_gradients"});
  CHECK(has(first.text, "2 gradients are zero: blocks.0.attn.gate.fc1.weight"));
  AnomalySteps second(config);
  CHECK(second.run(1, [&](int, StepHealth& s) { s.zero_grads = query; }) == Types{"zero_gradients"});

  const auto zero = [](const std::string& name, std::vector<std::string> sets) {
    if (name.starts_with("phi_"))
      sets.push_back(name.find(".fc1.") != std::string::npos ? "nsa.phi=mlp" : "nsa.phi=conv");
    const Config c = config_with(sets);
    const std::vector<ParamSpec> params = param_specs(c.model);
    const auto param = std::find_if(params.begin(), params.end(),
                                    [&](const ParamSpec& p) { return p.name == "blocks.0.attn." + name; });
    REQUIRE(param != params.end());
    return expects_zero_gradient(c.model, c.train.seq_len, 6, *param);
  };
  for (const char* name : {"gate.fc1.weight", "gate.fc2.bias", "k_cmp_proj.weight", "v_sel_proj.weight",
                           "k_win_proj.weight", "q_proj.weight", "out_proj.weight", "phi_k.weight"})
    CHECK_FALSE(zero(name, {}));
  for (const char* name :
       {"gate.fc1.weight", "gate.fc2.bias", "k_cmp_proj.weight", "phi_k.weight", "v_sel_proj.weight"})
    CHECK(zero(name, {"nsa.force_branch=win"}));
  // No document fills a compression block.
  {
    const Config c = config_with({});
    for (const ParamSpec& p : param_specs(c.model)) {
      const bool cmp = p.name.find("_cmp_proj") != std::string::npos;
      if (cmp) CHECK(expects_zero_gradient(c.model, c.model.nsa.l - 1, 6, p));
      if (cmp) CHECK_FALSE(expects_zero_gradient(c.model, c.model.nsa.l + c.model.nsa.d, 6, p));
    }
  }
  for (const char* name : {"k_win_proj.weight", "q_proj.weight", "out_proj.weight"})
    CHECK_FALSE(zero(name, {"nsa.force_branch=win"}));
  CHECK(zero("gate.fc2.weight", {"nsa.uniform_gate=true"}));
  CHECK(zero("gate.fc2.weight", {"nsa.stopgrad_gates=true"}));
  CHECK_FALSE(zero("k_sel_proj.weight", {"nsa.stopgrad_gates=true"}));
  // A sequence shorter than nsa.l = 8 has no compressed block.
  CHECK(zero("k_cmp_proj.weight", {"train.seq_len=7"}));
  // With only one compressed block its softmax weight is 1, so its key gets no gradient. The second block ends at token
  // nsa.l + nsa.d = 12.
  for (const char* name : {"k_cmp_proj.weight", "phi_k.weight", "phi_k.fc1.weight"}) {
    CHECK(zero(name, {"train.seq_len=8"}));
    CHECK(zero(name, {"train.seq_len=11"}));
    CHECK_FALSE(zero(name, {"train.seq_len=12"}));
  }
  for (const char* name : {"v_cmp_proj.weight", "phi_v.weight"}) CHECK_FALSE(zero(name, {"train.seq_len=8"}));
  CHECK(zero("k_win_proj.weight", {"nsa.w=1"}));
  CHECK_FALSE(zero("k_win_proj.weight", {"nsa.w=2"}));
  CHECK_FALSE(zero("v_win_proj.weight", {"nsa.w=1"}));
  CHECK_FALSE(zero("k_win_proj.weight", {"model.attention=dense", "nsa.force_branch=cmp"}));
  // Biases and norms follow their projections.
  const auto zero_qkv = [&](const std::string& name, std::vector<std::string> sets) {
    sets.insert(sets.end(), {"model.qkv_bias=true", "model.qk_norm=true"});
    return zero(name, sets);
  };
  for (const char* name : {"k_win_proj.bias", "k_win_norm.weight", "v_win_proj.bias", "q_proj.bias", "q_norm.weight"})
    CHECK_FALSE(zero_qkv(name, {}));
  for (const char* name : {"k_win_proj.bias", "k_win_norm.weight", "v_win_proj.bias"}) {
    CHECK(zero_qkv(name, {"nsa.force_branch=sel"}));
    CHECK(zero_qkv(name, {"nsa.w=1"}) == (name[0] == 'k'));
  }
}

TEST_CASE("anomaly: an anomaly stops the run with a checkpoint, if configured", "[anomaly]") {
  const TemporaryFolder folder;
  const std::string common = "train " + kTiny +
                             " --set runtime.device=cpu --set train.lr=0 --set train.steps=300 "
                             "--set log.plateau_steps=20 --set log.out_dir=";
  const Outcome stopped = run_program(common + folder.file("stop") + " --set log.on_anomaly=stop");
  INFO(stopped.output);
  CHECK(stopped.exit_code == 1);
  CHECK(has(stopped.output, "triad: stopped by an anomaly"));
  CHECK(has(stopped.output, "log.on_anomaly is stop"));
  CHECK(has(read_text(folder.file("stop") + "/.anomaly_type"), "loss_plateau\n"));
  CHECK(fs::exists(folder.file("stop") + "/checkpoints/latest"));
  const Outcome reported = run_program(common + folder.file("report"));
  INFO(reported.output);
  CHECK(reported.exit_code == 0);
  CHECK(has(reported.output, "anomaly loss_plateau: step "));
  CHECK(heartbeats(folder.file("report"), 0, "anomaly").at(0)["type"] == "loss_plateau");
  CHECK(heartbeats(folder.file("report"), 0, "step_end").back()["step"] == 300);
  CHECK_FALSE(fs::exists(folder.file("report") + "/.anomaly_type"));

  // An anomaly in the last step does not change how the run ends.
  const auto last = heartbeats(folder.file("report"), 0, "anomaly").at(0)["step"].get<int64_t>();
  const Outcome complete = run_program(common + folder.file("last") +
                                       " --set log.on_anomaly=stop --set train.steps=" + std::to_string(last));
  INFO(complete.output);
  CHECK(complete.exit_code == 0);
  CHECK(has(complete.output, "anomaly loss_plateau: step "));
  CHECK(heartbeats(folder.file("last"), 0, "done").size() == 1);
  CHECK_FALSE(fs::exists(folder.file("last") + "/.anomaly_type"));
}

TEST_CASE("anomaly: rank 0 reports what concerns all ranks, each rank what concerns it alone", "[anomaly]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const Outcome outcome =
      run_ranks(2, "train " + kTiny +
                       " --set runtime.device=cpu --set train.lr=0 --set train.steps=120 --set log.plateau_steps=20 "
                       "--set log.on_anomaly=stop --set log.out_dir=" +
                       out);
  INFO(outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(has(outcome.output, "rank 0: stopped by an anomaly"));
  CHECK(fs::exists(out + "/checkpoints/latest/state.json"));
  const size_t reported = outcome.output.find("anomaly loss_plateau: step ");
  REQUIRE(reported != std::string::npos);
  CHECK(outcome.output.find("anomaly loss_plateau", reported + 1) == std::string::npos);
  CHECK(heartbeats(out, 0, "anomaly").size() == 1);
  CHECK(heartbeats(out, 1, "anomaly").empty());
  CHECK(heartbeats(out, 1, "stopped").size() == 1);  // rank 1 stops too
  CHECK(has(read_text(out + "/.anomaly_type"), "loss_plateau\n"));

  const Config config = config_with({"log.creep_mib=100", "log.plateau_steps=20"});
  AnomalyRules rules(config);
  std::map<std::string, bool> own;
  for (int i = 1; i <= 1000; ++i)
    for (const Anomaly& a : rules.step(
             {.step = i, .loss = 4, .grad_norm = 1, .tokens = 1000, .seconds = 1, .host_mib = i, .device_mib = i}))
      own[a.type] = a.single_rank;
  CHECK(own == std::map<std::string, bool>{
                   {"device_memory_creep", true}, {"host_memory_creep", true}, {"loss_plateau", false}});
  std::vector<Anomaly> flat;
  AnomalyRules rate(config);
  for (int i = 1; i <= 300 && flat.empty(); ++i)
    flat = rate.step(
        {.step = i, .loss = -static_cast<double>(i), .grad_norm = 1, .tokens = i < 200 ? 1e3 : 1, .seconds = 1});
  REQUIRE(flat.size() == 1);
  CHECK(flat[0].type == "throughput_flat");
  CHECK(flat[0].single_rank);  // each rank measures throughput by its own clock
}
