// The gradient ledger: which gradients have arrived, their norms, which of them are zero or not finite, and the trace
// of the backward pass.
#include <cmath>
#include <filesystem>
#include <limits>
#include <set>
#include <sstream>

#include "io/json_config.h"
#include "kernels/step/per_param_norms.h"
#include "tests/support/model_fixture.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/config/load_config.h"
#include "train/inference.h"
#include "train/monitor/grad_report.h"
#include "train/run/memory_plan.h"

using namespace triad;
using namespace triad::test;

namespace {

std::vector<std::string> text_lines(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

// Trains the model of configs/tiny.json, one step at a time.
struct Stepper {
  explicit Stepper(Device device, std::vector<std::string> sets = {})
      : config(load_config(kTiny, sets).config), runtime(allocate_planned(config, device)), step(*runtime, config) {
    step.model().params().init(runtime->ctx(), 7);
  }
  const Params& params() { return step.model().params(); }
  int64_t index(const std::string& name) {
    for (int64_t i = 0; i < params().count(); ++i)
      if (params().specs()[static_cast<size_t>(i)].name == name) return i;
    fail("no parameter {}", name);
  }
  void fill(const std::string& name, float value) {
    const Tensor w = params().part(params().weights(), index(name));
    std::vector<float> host(static_cast<size_t>(w.numel()), value);
    REQUIRE(w.dtype == DType::f32);
    write(runtime->ctx(), w, host.data());
  }
  TrainStep::Result run(int64_t number, bool trace = false) {
    const int64_t n = config.train.seq_len * config.train.micro_batch_size;
    std::vector<int32_t> tokens, targets;
    for (int64_t i = 0; i < n; ++i) {
      tokens.push_back(static_cast<int32_t>((number + 7 * i + i * i / 3) % 256));
      targets.push_back(static_cast<int32_t>((number + 5 * i) % 256));
    }
    step.begin(trace);
    step.micro_step(tokens, targets, n);
    step.update(number, n, false, true);
    return step.result();
  }
  Config config;
  std::unique_ptr<Runtime> runtime;
  TrainStep step;
};

// A GradSink that passes on all gradients but one.
struct Skipping final : GradSink {
  Skipping(GradSink& to, const Tensor& skipped) : to(to), skipped(skipped) {}
  void ready(ConstTensor grad, const Stream& on) override {
    if (grad.data != skipped.data) to.ready(grad, on);
  }
  GradSink& to;
  Tensor skipped;
};

void check_facts(Device device) {
  Stepper s(device);
  const TrainStep::Result result = s.run(0);
  REQUIRE(result.grads);
  double squares = 0;
  std::set<std::string> zero;
  for (int64_t i = 0; i < s.params().count(); ++i) {
    const std::vector<double> grad = read_floats(s.runtime->ctx(), s.params().part(s.params().grads(), i));
    double sum = 0;
    for (const double x : grad) sum += x * x;
    squares += sum;
    const auto at = static_cast<size_t>(i);
    INFO(s.params().specs()[at].name);
    CHECK(result.grads->norm[at] == Approx(std::sqrt(sum)).epsilon(1e-9));
    CHECK(result.grads->not_finite[at] == 0);
    if (result.grads->is_zero(at)) zero.insert(s.params().specs()[at].name);
  }
  CHECK(result.grad_norm == Approx(std::sqrt(squares)).epsilon(1e-9));
  // In the first step the gate's fc2 is zero, so fc1's gradient must be zero.
  CHECK(zero == std::set<std::string>{"blocks.0.attn.gate.fc1.bias", "blocks.0.attn.gate.fc1.weight",
                                      "blocks.1.attn.gate.fc1.bias", "blocks.1.attn.gate.fc1.weight"});
  CHECK(unexpected_zeros(s.params(), s.config, 1, *result.grads).empty());
  CHECK(unexpected_zeros(s.params(), s.config, 2, *result.grads).size() == 4);
  const TrainStep::Result second = s.run(1);
  CHECK(unexpected_zeros(s.params(), s.config, 2, *second.grads).empty());
  const std::vector<double> layers = layer_norms(s.params(), s.config.model, *second.grads);
  REQUIRE(layers.size() == 2);
  double rest = 0;
  for (int64_t i = 0; i < s.params().count(); ++i)
    if (!s.params().specs()[static_cast<size_t>(i)].name.starts_with("blocks."))
      rest += std::pow(second.grads->norm[static_cast<size_t>(i)], 2);
  CHECK(second.grad_norm == Approx(std::sqrt(layers[0] * layers[0] + layers[1] * layers[1] + rest)).epsilon(1e-9));
}

void check_injected_zeros_and_nans(Device device) {
  // An unexpected zero: if the MLP's fc2 is zero, layer 1's fc1 and norm2 get no gradient.
  Stepper dead(device);
  dead.fill("blocks.1.mlp.fc2.weight", 0);
  const TrainStep::Result result = dead.run(0);
  CHECK(unexpected_zeros(dead.params(), dead.config, 1, *result.grads) ==
        std::vector<std::string>{"blocks.1.norm2.weight", "blocks.1.mlp.fc1.weight"});
  // Values that are not finite are counted by parameter.
  Stepper broken(device, {"train.on_nonfinite=skip"});
  broken.fill("lm_head.weight", std::numeric_limits<float>::quiet_NaN());
  const TrainStep::Result bad = broken.run(0);
  CHECK(!bad.finite);
  CHECK(bad.grads->not_finite[static_cast<size_t>(broken.index("blocks.0.norm1.weight"))] == 32);
}

// Compares norms over parts with any size and alignment, some empty, with sums on the host.
void check_per_param_norms(Device device) {
  Runtime runtime({.device = device, .arena_bytes = 8 << 20, .scratch_bytes = 1 << 20});
  const int64_t n = 300001;
  std::vector<float> host;
  for (int64_t i = 0; i < n; ++i) host.push_back(static_cast<float>((i * 37 % 101) - 50) / 16);
  host[70000] = std::numeric_limits<float>::infinity(), host[70001] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::pair<int64_t, int64_t>> parts = {{0, 1},      {1, 3},         {4, 0},        {5, 16384},
                                                          {16389, 7},  {16397, 50000}, {66397, 3603}, {70000, 3},
                                                          {70003, 17}, {70021, 229980}};
  std::vector<int64_t> pieces, first = {0};
  for (const auto& [begin, count] : parts) {
    for (int64_t at = 0; at < count; at += 16384)
      pieces.insert(pieces.end(), {begin + at, std::min<int64_t>(16384, count - at)});
    first.push_back(static_cast<int64_t>(pieces.size()) / 2);
  }
  const auto put = [&](DType type, const Shape& shape, const void* data) {
    const Tensor t = runtime.arena().alloc(MemTag::io, "x", type, shape);
    write(runtime.ctx(), t, data);
    return t;
  };
  const Tensor x = put(DType::f32, {n}, host.data()),
               p = put(DType::i64, {static_cast<int64_t>(pieces.size()) / 2, 2}, pieces.data()),
               f = put(DType::i64, {static_cast<int64_t>(first.size())}, first.data());
  const int64_t count = static_cast<int64_t>(parts.size());
  const Tensor facts = runtime.arena().alloc(MemTag::io, "facts", DType::f64, {count, ParamNorms::count});
  std::vector<double> got(static_cast<size_t>(count * ParamNorms::count), -1.0), again = got;
  write(runtime.ctx(), facts, got.data());
  per_param_norms(runtime.ctx(), facts, x, p, f);
  read(runtime.ctx(), got.data(), facts);
  per_param_norms(runtime.ctx(), facts, x, p, f);
  read(runtime.ctx(), again.data(), facts);
  CHECK(std::equal(got.begin(), got.begin() + 7 * 2, again.begin()));
  for (size_t i = 0; i < parts.size(); ++i) {
    double squares = 0;
    int64_t bad = 0;
    for (int64_t j = parts[i].first; j < parts[i].first + parts[i].second; ++j) {
      const double v = host[static_cast<size_t>(j)];
      squares += v * v, bad += !std::isfinite(v);
    }
    INFO("part " << i);
    CHECK(got[2 * i + ParamNorms::not_finite] == static_cast<double>(bad));
    if (bad > 0)
      CHECK(!std::isfinite(got[2 * i]));
    else
      CHECK(got[2 * i] == Approx(squares).epsilon(1e-12));
  }
}

void check_trace(Device device, bool graph) {
  Stepper s(device, {std::string("runtime.cuda_graph=") + (graph ? "true" : "false")});
  std::vector<BackwardTrace::Op> first;
  for (const int64_t step : {0, 1, 2, 3}) {
    const bool traced = step % 2 == 1;
    const TrainStep::Result result = s.run(step, traced);
    CHECK(result.trace.empty() == !traced);
    if (!traced) continue;
    if (first.empty()) first = result.trace;
    REQUIRE(result.trace.size() == first.size());
    std::vector<int64_t> layers;
    std::set<std::string> names;
    for (size_t i = 0; i < first.size(); ++i) {
      const BackwardTrace::Op& op = result.trace[i];
      CHECK((op.name == first[i].name && op.layer == first[i].layer));
      CHECK((op.ms >= 0 && op.begin_ms >= 0));
      if (layers.empty() || layers.back() != op.layer) layers.push_back(op.layer);
      names.insert(op.name);
    }
    CHECK(layers ==
          // Backward's order: the head, the layers from the last to the first, the embedding.
          std::vector<int64_t>{-1, 1, 0, -1});
    for (const char* op :
         {"classifier_forward_backward", "nsa_attend_selected_backward", "matmul", "embedding_backward"})
      CHECK(names.count(op) == 1);
    CHECK(names.count("nsa_attend_selected_forward") == 0);
  }
}

}  // namespace

TEST_CASE("ledger: a gradient that backward skips is reported by name", "[ledger]") {
  ModelConfig config_of_model = small_model();
  config_of_model.qkv_bias = config_of_model.qk_norm = true;
  ModelFixture f(config_of_model, 2, 45, Device::cpu(), DType::f32);
  Runtime memory({.device = Device::cpu(), .arena_bytes = 1 << 20});
  const Params& params = f.model().params();
  GradLedger ledger(f.ctx(), memory.arena(), params);
  const auto backward = [&](GradSink& sink) {
    ledger.begin(nullptr);
    f.loss();
    f.model().loss_and_backward(f.ctx(), f.activations(), 1, true, &sink);
  };
  backward(ledger);
  CHECK(ledger.missing().empty());
  CHECK_NOTHROW(ledger.require_all());
  for (int64_t i = 0; i < params.count(); ++i) {
    // Some gradients are reported together with the previous parameter's.
    if (params.specs()[static_cast<size_t>(i)].joins_previous) continue;
    std::vector<std::string> expected;
    for (int64_t j = i; j < params.count() && (j == i || params.specs()[static_cast<size_t>(j)].joins_previous); ++j)
      expected.push_back(params.specs()[static_cast<size_t>(j)].name);
    Skipping skipping(ledger, params.part(params.grads(), i));
    backward(skipping);
    CHECK(ledger.missing() == expected);
    check_error([&] { ledger.require_all(); },
                {fmt::format("{} of {} gradients never came", expected.size(), params.count()), expected[0]});
  }
  // A run writes the names of parameters without gradients to a file.
  const TemporaryFolder folder;
  Config config;
  config.log.out_dir = folder.file("run");
  FolderLock lock;
  const RunFolder run(config.log.out_dir, RunFolder::Start::fresh, lock);
  GradReport(config, run, params, true, -1, 0).missing(5, MissingGradients({"a.weight", "b.bias"}, 195));
  CHECK(read_text(run.file("all_missing_params.txt")) == "step 5: arrived=193 missing=2\na.weight\nb.bias\n");
}

TEST_CASE("ledger: norms, zeros and values that are not finite, by parameter", "[ledger]") {
  check_facts(Device::cpu());
  check_injected_zeros_and_nans(Device::cpu());
  check_per_param_norms(Device::cpu());
}

TEST_CASE("ledger: norms, zeros and values that are not finite, by parameter, on the GPU", "[ledger][gpu]") {
  if (!require_gpu()) return;
  check_facts(Device::cuda());
  check_injected_zeros_and_nans(Device::cuda());
  check_per_param_norms(Device::cuda());
}

TEST_CASE("ledger: gradients that must be zero are counted as expected", "[ledger]") {
  struct Case {
    const char* set;
    int64_t zeros;  // expected zero gradients (35 in all) in the second step
  };
  // Each of the two layers has 4 zero gradients in the gate, none in phi (avg has no parameters), and 4 in k and v of
  // the two branches forced off.
  for (const Case& c :
       {Case{"nsa.force_branch=win", 16}, Case{"nsa.force_branch=cmp", 16}, Case{"nsa.uniform_gate=true", 8},
        Case{"nsa.stopgrad_gates=true", 8}, Case{"train.seq_len=7", 4}, Case{"train.seq_len=8", 2},
        Case{"train.seq_len=11", 2}, Case{"train.seq_len=12", 0}, Case{"nsa.w=1", 2}, Case{"nsa.phi=conv", 0}}) {
    Stepper s(Device::cpu(), {c.set});
    s.run(0);
    const TrainStep::Result result = s.run(1);
    int64_t zeros = 0;
    for (size_t i = 0; i < result.grads->norm.size(); ++i) zeros += result.grads->is_zero(i);
    INFO(c.set);
    CHECK(zeros == c.zeros);
    CHECK(unexpected_zeros(s.params(), s.config, 2, *result.grads) == std::vector<std::string>{});
  }
}

TEST_CASE("ledger: the trace of a backward pass lists its ops in order", "[ledger]") {
  check_trace(Device::cpu(), false);
}

TEST_CASE("ledger: the trace of a backward pass lists its ops on the GPU, with graphs too", "[ledger][gpu]") {
  if (!require_gpu()) return;
  check_trace(Device::cuda(), false);
  check_trace(Device::cuda(), true);
}

TEST_CASE("ledger: NSA_TRACE_GRADS, NSA_LOG_GRAD_NORM and NSA_TRACE_MODULE_BWD", "[ledger]") {
  const TemporaryFolder folder;
  const auto train = [&](const std::string& name, const std::string& environment, const std::string& more = "") {
    return run_program("train " + kTiny + " --set runtime.device=cpu --set train.steps=4 --set log.every=2 " + more +
                           " --set log.out_dir=" + folder.file(name),
                       environment);
  };
  const Outcome usual = train("usual", "");
  REQUIRE(usual.exit_code == 0);
  CHECK(usual.output.find("[GRAD-") == std::string::npos);
  for (const char* file : {"/grad_ledger.csv", "/all_missing_params.txt", "/traces.log"})
    CHECK(!std::filesystem::exists(folder.file("usual") + file));

  const Outcome traced = train("traced", "NSA_TRACE_GRADS=1");
  INFO(traced.output);
  REQUIRE(traced.exit_code == 0);
  for (const char* line :
       {"[GRAD-TRACE] after_backward_step1 arrived=35 missing=0 zero=4 unexpected_zero=0 not_finite=0\n",
        "[GRAD-TRACE] after_backward_step4 arrived=35 missing=0 zero=0 unexpected_zero=0 not_finite=0\n"})
    CHECK(has(read_text(folder.file("traced/ranks/rank_0.log")), line));
  CHECK_FALSE(has(traced.output, "[GRAD-"));  // the trace goes to a file, not to the terminal
  CHECK(read_text(folder.file("traced/all_missing_params.txt")) == "step 1: arrived=35 missing=0\n");
  const std::vector<std::string> rows = text_lines(read_text(folder.file("traced/grad_ledger.csv")));
  REQUIRE(rows.size() == 1 + 2 * 35);
  CHECK(rows[0] == "step,parameter,norm,zero,not_finite");
  CHECK(rows[1].starts_with("2,embed.weight,"));
  CHECK(Json::parse(read_text(folder.file("traced/config.json")))["log"]["diagnostics"].dump() == R"(["ledger"])");

  const Outcome norms = train("norms", "NSA_LOG_GRAD_NORM=1");
  REQUIRE(norms.exit_code == 0);
  const std::string log = read_text(folder.file("norms/ranks/rank_0.log"));
  for (const char* line : {"[GRAD-NORM] step1 layer0 ", "[GRAD-NORM] step4 layer0 "}) CHECK(has(log, line));
  CHECK_FALSE(has(log, "[GRAD-TRACE]"));
  std::istringstream beats(read_text(folder.file("norms/heartbeat_rank0.jsonl")));
  int64_t with_norms = 0;
  for (std::string line; std::getline(beats, line);)
    if (const Json beat = Json::parse(line); beat.contains("layer_grad_norms")) {
      REQUIRE(beat["layer_grad_norms"].size() == 2);
      CHECK(beat["layer_grad_norms"][0].get<double>() < beat["grad_norm"].get<double>());
      ++with_norms;
    }
  CHECK(with_norms == 4);

  REQUIRE(train("backward", "NSA_TRACE_MODULE_BWD=1").exit_code == 0);
  const std::string trace = read_text(folder.file("backward/traces.log"));
  CHECK(trace.find("step 2: backward of its first micro-step, ") != std::string::npos);
  CHECK(trace.find("step 4: backward") != std::string::npos);
  CHECK(trace.find("step 1: ") == std::string::npos);
  CHECK(trace.find("\nlayer 1    matmul") < trace.find("\nlayer 0    matmul"));
  CHECK(trace.find("in all") != std::string::npos);

  // Diagnostics do not change the weights. A variable that is 0 switches one off. Diagnostics from the file and from
  // variables are combined.
  REQUIRE(train("all", "NSA_TRACE_GRADS=1 NSA_LOG_GRAD_NORM=1 NSA_TRACE_MODULE_BWD=1").exit_code == 0);
  REQUIRE(train("off", "NSA_TRACE_GRADS=0 NSA_LOG_GRAD_NORM=0 NSA_TRACE_MODULE_BWD=0").exit_code == 0);
  for (const char* name : {"all", "off", "traced"})
    CHECK(read_text(folder.file(std::string(name) + "/model.safetensors")) ==
          read_text(folder.file("usual/model.safetensors")));
  CHECK(Json::parse(read_text(folder.file("all/config.json")))["log"]["diagnostics"].size() == 3);
  CHECK(Json::parse(read_text(folder.file("off/config.json")))["log"]["diagnostics"].empty());
  const Outcome wrong = train("wrong", "", "--set 'log.diagnostics=[\"grads\"]'");
  CHECK(wrong.exit_code == 2);
  CHECK(wrong.output.find("log.diagnostics holds \"grads\"") != std::string::npos);
  CHECK(train("wrong", "NSA_TRACE_GRADS=maybe").exit_code == 2);
}
