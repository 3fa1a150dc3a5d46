// runtime.kernels and runtime.strict: which kernel runs a call, what counts as a fallback, and what a run logs about
// both. What the attention ops choose by shape is tested in test_attention_routes.cpp.
#include <cmath>
#include <cstdio>
#include <map>
#include <set>
#include <sstream>

#include "engine/with_cuda.h"
#include "io/json_config.h"
#include "kernels/nsa/attend_selected.h"
#include "kernels/ops/linear_silu.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/matmul_tuned.h"
#include "tests/support/model_fixture.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/config/load_config.h"
#include "train/run/memory_plan.h"
#include "train/step/train_step.h"

using namespace triad;
using namespace triad::test;

namespace {

KernelChoices choices(const std::string& value) {
  return load_config(kTiny, {"runtime.kernels=" + value}).config.runtime.kernels;
}

Outcome train(const std::string& out, const std::string& sets, const std::string& environment = "") {
  std::string args = "train " + kTiny + " --set runtime.device=cpu --set train.steps=2 --set log.out_dir=" + out;
  return run_program(args + sets, environment);
}
// The fused kernels by their names in the route record.
const std::set<std::string> kFusedKernels = {"sm90",
                                             "sm90_d64",
                                             "sm90_d128",
                                             "query_stationary",
                                             "shared_tile",
                                             "resident_rows",
                                             "kv_stationary or shared_tile",
                                             "kv_stationary or query_stationary"};

Json runtime_of(const std::string& folder) { return Json::parse(read_text(folder + "/config.json"))["runtime"]; }

}  // namespace

TEST_CASE("routes: runtime.kernels is one word, or an object with words for branches", "[routes]") {
  CHECK(choices("general") == KernelChoices::all(KernelChoice::general));
  CHECK(choices("auto") == KernelChoices{});
  const KernelChoices mixed = choices(R"({"sel":"general","matmul":"reference"})");
  CHECK(mixed.sel == KernelChoice::general);
  CHECK(mixed.matmul == KernelChoice::reference);
  CHECK(mixed.cmp == KernelChoice::automatic);
  CHECK(json_config::to_json(mixed).dump() == R"({"cmp":"auto","sel":"general","win":"auto","matmul":"reference"})");
  CHECK(json_config::to_json(KernelChoices::all(KernelChoice::fused)).dump() == R"("fused")");
  for (const char* wrong : {"fast", "1", "[]", R"({"sel":"fast"})", R"({"select":"auto"})", R"({"sel":{}})"})
    check_error([&] { choices(wrong); }, {"runtime.kernels"});
}

TEST_CASE("routes: a call that a slower kernel than requested takes is a fallback", "[routes]") {
  const Tensor q(nullptr, DType::bf16, {2, 128, 12, 60}, Device::cpu()),
      k(nullptr, DType::bf16, {2, 128, 2, 60}, Device::cpu());
  const auto recorded = [&](const KernelChoices& wanted, const char* op, const char* kernel, const char* why) {
    Routes routes(wanted);
    routes.set_call(q, k);
    routes.record(op, kernel, why);
    return routes.counts()[0];
  };
  const KernelChoices fused = KernelChoices::all(KernelChoice::fused);
  CHECK(!recorded({}, "nsa_select", "cpu", "").is_fallback());
  CHECK(!recorded({}, "nsa_select", "general", "").is_fallback());
  CHECK(recorded({}, "nsa_select", "general", "odd heads").reason == "odd heads");
  CHECK(recorded(fused, "nsa_select", "cpu", "").reason == "the CPU has one route, which is not fused");
  CHECK(recorded(fused, "nsa_attend_window_forward", "general", "").reason == "fused kernels are for bf16 on sm_90");
  CHECK(recorded(fused, "nsa_attend_window_forward", "general", "odd heads").reason == "odd heads");
  CHECK(!recorded(fused, "nsa_attend_window_forward", "sm90", "").is_fallback());
  CHECK(!recorded(fused, "matmul", "cublaslt", "").is_fallback());
  CHECK(recorded(KernelChoices::all(KernelChoice::reference), "nsa_select", "general", "").kernel == "reference");
  CHECK(recorded({}, "nsa_select", "sm90", "").shapes() == "bf16 [2,128,12,60] [2,128,2,60]");
  // An object changes only the branches that it contains.
  KernelChoices window = {};
  window.win = KernelChoice::fused;
  CHECK(recorded(window, "nsa_attend_window_backward", "cpu", "").is_fallback());
  CHECK(!recorded(window, "nsa_attend_compressed_forward", "cpu", "").is_fallback());

  Routes strict({}, true);
  strict.set_call(q, k);
  strict.set_layer(3);
  strict.record("nsa_select", "sm90");
  check_error([&] { strict.record("nsa_select", "general", "heads of 60"); },
              {"nsa_select", "bf16 [2,128,12,60] [2,128,2,60]", "layer 3", "heads of 60", "runtime.strict"});
}

TEST_CASE("routes: calls of one op with different shapes are separate entries, in any order", "[routes]") {
  Routes routes;
  const Tensor a(nullptr, DType::f32, {2, 3}, Device::cpu()), b(nullptr, DType::f32, {3, 2}, Device::cpu());
  for (const int round : {0, 1, 2})
    for (const bool swapped : {false, true, true}) {
      routes.set_call(swapped ? b : a, swapped ? a : b);
      routes.set_layer(round == 2 ? 1 : 0);
      routes.record("matmul", "cublaslt");
    }
  REQUIRE(routes.counts().size() == 4);
  CHECK(routes.counts()[0].calls == 2);
  CHECK(routes.counts()[1].calls == 4);
  CHECK(routes.counts()[3].calls == 2);
}

TEST_CASE("routes: what a call costs does not grow with the number of layers", "[routes]") {
  // A step's calls: in each layer one product twice, with another between, then many products outside the layers, as in
  // Muon.
  const auto looks_per_call = [](int64_t layers) {
    Routes routes;
    const Tensor a(nullptr, DType::f32, {2, 3}, Device::cpu()), b(nullptr, DType::f32, {3, 2}, Device::cpu());
    const auto product = [&](const Tensor& first, const Tensor& second) {
      routes.set_call(first, second);
      routes.record("matmul", "cpu");
    };
    for (int step = 0; step < 3; ++step) {
      for (int64_t layer = 0; layer < layers; ++layer) {
        routes.set_layer(layer);
        product(a, b), product(b, a), product(a, b);
      }
      routes.set_layer(-1);
      for (int64_t layer = 0; layer < layers; ++layer) product(a, a), product(b, b);
    }
    CHECK(static_cast<int64_t>(routes.counts().size()) == 2 * layers + 2);
    return static_cast<double>(routes.looks()) / static_cast<double>(3 * 5 * layers);
  };
  CHECK(looks_per_call(1000) < 2);
  CHECK(looks_per_call(10) < 2);
}

TEST_CASE("routes: the CPU's route is logged, and is a fallback if fused kernels are requested", "[routes]") {
  const TemporaryFolder folder;
  const Outcome automatic = train(folder.file("auto"), " --verbose");
  REQUIRE(automatic.exit_code == 0);
  CHECK(automatic.output.find("kernel of nsa_select: cpu f32 [2,48,4,8] [2,11,2,8] (layers 0 to 1)\n") !=
        std::string::npos);
  CHECK(automatic.output.find("fallback") == std::string::npos);
  CHECK(train(folder.file("quiet"), " --verbose --set log.route_steps=0").output.find("kernel of ") ==
        std::string::npos);

  for (const char* word : {"general", "reference"}) {
    const std::string out = folder.file(word);
    REQUIRE(train(out, std::string(" --set runtime.kernels=") + word).exit_code == 0);
    CHECK(read_text(out + "/fallback_counters.csv") == "step,layer,branch,kernel,reason,count\n");
    CHECK(read_text(out + "/model.safetensors") == read_text(folder.file("auto/model.safetensors")));
  }

  // A fallback forced by the environment is counted by layer and branch, also in the heartbeats. With runtime.strict it
  // is an error, raised before any file is written, that names op, shape and reason.
  const std::string out = folder.file("fused");
  REQUIRE(train(out, " --set 'runtime.kernels={\"sel\":\"fused\"}'").exit_code == 0);
  const std::string csv = read_text(out + "/fallback_counters.csv");
  CHECK(csv.find("1,0,sel,nsa_attend_selected_forward cpu,the CPU has one route; which is not fused,1\n") !=
        std::string::npos);
  CHECK(csv.find("2,1,select,nsa_select cpu,") != std::string::npos);
  CHECK(csv.find("win,") == std::string::npos);
  std::istringstream lines(read_text(out + "/heartbeat_rank0.jsonl"));
  Json last;
  for (std::string line; std::getline(lines, line);)
    if (const Json beat = Json::parse(line); beat["msg"] == "step_end") last = beat;
  CHECK(last["fb_sel"] == 2 * 2 * 2);  // 2 steps, 2 layers, forward and backward
  CHECK(last["fb_select"] == 2 * 2);
  CHECK(last["fb_win"] == 0);
  CHECK(last["fb_total"] == 12);
  const Outcome strict =
      train(folder.file("strict"), " --set 'runtime.kernels={\"sel\":\"fused\"}' --set runtime.strict=true");
  INFO(strict.output);
  CHECK(strict.exit_code == 1);
  for (const char* word : {"nsa_select", "f32 [2,48,4,8]", "in layer 0", "the CPU has one route", "runtime.strict"})
    CHECK(strict.output.find(word) != std::string::npos);
  // The refused strict run has created no folder. A strict run without fallbacks succeeds.
  CHECK(count_files(folder.path()) == 5);
  CHECK(train(folder.file("strict"), " --set runtime.strict=true").exit_code == 0);
}

TEST_CASE("routes: NSA_USE_FA2, NSA_SDPA_NO_FLASH and NSA_SDPA_FLASH_ONLY choose kernels", "[routes]") {
  const TemporaryFolder folder;
  for (const char* variable : {"NSA_USE_FA2=0", "NSA_SDPA_NO_FLASH=1", "NSA_USE_FA2=0 NSA_SDPA_NO_FLASH=1"}) {
    REQUIRE(train(folder.file("general"), " --overwrite", variable).exit_code == 0);
    CHECK(runtime_of(folder.file("general"))["kernels"] == "general");
    CHECK(runtime_of(folder.file("general"))["strict"] == false);
  }
  for (const char* variable : {"NSA_USE_FA2=1", "NSA_SDPA_NO_FLASH=0", "NSA_SDPA_FLASH_ONLY=0"}) {
    REQUIRE(train(folder.file("auto"), " --overwrite --set runtime.strict=true", variable).exit_code == 0);
    CHECK(runtime_of(folder.file("auto"))["kernels"] == "auto");
  }
  const Outcome only = train(folder.file("only"), "", "NSA_SDPA_FLASH_ONLY=1");
  CHECK(only.exit_code == 1);
  CHECK(only.output.find("runtime.strict is true") != std::string::npos);
  REQUIRE(train(folder.file("only"), " --set runtime.strict=false", "NSA_SDPA_FLASH_ONLY=1").exit_code == 0);
  CHECK(runtime_of(folder.file("only"))["kernels"] == "fused");
  const Outcome both = train(folder.file("both"), "", "NSA_SDPA_FLASH_ONLY=1 NSA_USE_FA2=0");
  INFO(both.output);
  CHECK(both.exit_code == 2);
  for (const char* word : {"NSA_SDPA_FLASH_ONLY=1", "NSA_USE_FA2=0", "contradict", "runtime.kernels"})
    CHECK(both.output.find(word) != std::string::npos);
}

TEST_CASE("routes: each choice reaches the kernels of its branch", "[routes]") {
  if (!require_hopper_plan()) return;
  const auto kernels_of = [](const std::string& kernels, const std::string& precision, bool strict = false,
                             const std::string& mlp = "silu") {
    Config config = load_config(kTiny, {"model.d_k=64", "model.d_v=64", "model.mlp=" + mlp, "nsa.l=32", "nsa.d=16",
                                        "nsa.l_sel=64", "runtime.kernels=" + kernels, "runtime.precision=" + precision})
                        .config;
    Runtime plan({.device = Device::cuda(), .planning = true, .kernels = config.runtime.kernels, .strict = strict});
    TrainStep step(plan, config);
    step.micro_step({}, {}, 1);
    // From branch to kernel, "fused" for any fused one; "!" after the kernel marks a fallback.
    std::map<std::string, std::string> out;
    for (const Routes::Count& c : plan.ctx().routes.counts()) {
      const std::string kernel = (kFusedKernels.contains(c.kernel) ? "fused" : c.kernel) + (c.is_fallback() ? "!" : "");
      const bool mlp_in = c.op.starts_with("linear_silu") || c.op.starts_with("linear_swiglu");
      const std::string of = mlp_in ? "silu" : branch_of(c.op);
      const auto [at, is_new] = out.try_emplace(of, kernel);
      INFO(c.op);
      CHECK(at->second == kernel);
    }
    return out;
  };
  using Map = std::map<std::string, std::string>;
  // `silu`: route for matrix products followed by SiLU or SwiGLU, which one kernel may compute together; "" if they
  // have the same route as other products.
  const auto all = [](const char* kernel, const char* product, const char* silu) {
    Map map{{"cmp", kernel}, {"sel", kernel}, {"select", kernel}, {"win", kernel}, {"matmul", product}};
    if (*silu != 0) map["silu"] = silu;
    return map;
  };
  CHECK(kernels_of("auto", "bf16") == all("fused", "cublaslt", "fused"));
  CHECK(kernels_of("auto", "bf16", /*strict=*/true, "swiglu") == all("fused", "cublaslt", "fused"));
  CHECK(kernels_of("fused", "bf16") == all("fused", "cublaslt", "fused"));
  CHECK(kernels_of("general", "bf16") == all("general", "cublaslt first", ""));
  CHECK(kernels_of("reference", "bf16") == all("reference", "reference", ""));
  CHECK(kernels_of("auto", "fp32") == all("general", "cublaslt", "general"));
  CHECK(kernels_of("auto", "fp32", /*strict=*/false, "swiglu") == all("general", "cublaslt", "general"));
  CHECK(kernels_of("fused", "fp32") == all("general!", "cublaslt", "general!"));
  CHECK(kernels_of("reference", "fp32") == all("reference", "reference", ""));
  CHECK(kernels_of(R"({"sel":"general"})", "bf16") == Map{{"cmp", "fused"},
                                                          {"sel", "general"},
                                                          {"select", "general"},
                                                          {"win", "fused"},
                                                          {"matmul", "cublaslt"},
                                                          {"silu", "fused"}});
  CHECK(kernels_of(R"({"cmp":"reference","win":"general","matmul":"general"})", "bf16") ==
        Map{{"cmp", "reference"},
            {"sel", "fused"},
            {"select", "fused"},
            {"win", "general"},
            {"matmul", "cublaslt first"}});
  // This choice changes matrix products only. In fp32, and on GPUs other than Hopper, no fused kernel computes the
  // product with SiLU.
  CHECK(kernels_of(R"({"matmul":"fused"})", "fp32") == all("general", "cublaslt", "general!"));
  check_error([&] { kernels_of(R"({"matmul":"fused"})", "fp32", /*strict=*/true); },
              {"linear_silu_forward of f32", "in layer 0", "fused kernels are for bf16 on sm_90", "runtime.strict"});
}

TEST_CASE("routes: a product names its algorithm, which its sizes and runtime.kernels decide", "[routes]") {
  if (!require_hopper_plan()) return;
  if (Runtime({.device = Device::cuda(), .planning = true}).ctx().num_sms != cuda::kTunedSms)
    return void(skip("no algorithms were measured for this number of SMs"));
  struct Product {
    int64_t rows, batch = 0;  // rows in x; products per matmul_batched() call, or 0 for linear_forward()
    bool has_bias = false;
  };
  const auto kernel_of = [](KernelChoice choice, const Product& p) {
    Runtime plan({.device = Device::cuda(), .planning = true, .kernels = KernelChoices::all(choice)});
    const int64_t in = 768, out = 1536;
    const auto make = [&](Shape shape) {
      if (p.batch > 0) shape = {p.batch, shape[0], shape[1]};
      return plan.arena().alloc(MemTag::io, "x", DType::bf16, shape);
    };
    const Tensor x = make({p.rows, in}), w = make({out, in}), y = make({p.rows, out});
    const Tensor bias = plan.arena().alloc(MemTag::io, "bias", DType::bf16, {out});
    if (p.batch > 0)
      matmul_batched(plan.ctx(), y, x, w, {.trans_b = true});
    else
      linear_forward(plan.ctx(), y, x, w, p.has_bias ? repeat_row(bias, p.rows) : ConstTensor{});
    REQUIRE(plan.ctx().routes.counts().size() == 1);
    return plan.ctx().routes.counts()[0].kernel;
  };
  using enum KernelChoice;
  CHECK(kernel_of(automatic, {.rows = 16384}) == "cublaslt measured");
  CHECK(kernel_of(fused, {.rows = 16384}) == "cublaslt measured");
  CHECK(kernel_of(general, {.rows = 16384}) == "cublaslt first");
  CHECK(kernel_of(reference, {.rows = 16384}) == "reference");
  // No algorithm was measured for these: few rows, a bias, and batches with several matrices.
  CHECK(kernel_of(automatic, {.rows = 64}) == "cublaslt");
  CHECK(kernel_of(automatic, {.rows = 16384, .has_bias = true}) == "cublaslt");
  CHECK(kernel_of(automatic, {.rows = 16384, .batch = 2}) == "cublaslt");
  CHECK(kernel_of(automatic, {.rows = 16384, .batch = 1}) == "cublaslt measured");
  CHECK(kernel_of(general, {.rows = 16384, .batch = 1}) == "cublaslt first");
}

TEST_CASE("routes: a linear layer with SiLU or SwiGLU rejects matrices of wrong sizes on every route", "[routes]") {
  for (const Device device : {Device::cpu(), Device::cuda()}) {
    if (device.is_cuda() && !backend::built_with_cuda()) continue;
    Runtime plan({.device = device, .planning = true});
    Context& ctx = plan.ctx();
    const auto make = [&](const Shape& shape, DType dtype = DType::bf16) {
      return plan.arena().alloc(MemTag::io, "x", dtype, shape);
    };
    const Tensor x = make({6, 16}), y = make({6, 24}), pre = make({6, 48}), f32 = make({6, 24}, DType::f32);
    const Tensor w = make({48, 16}), half_of_w = make({24, 16}), narrow_w = make({48, 8}), w_next = make({16, 24});
    linear_swiglu_forward(ctx, y, pre, x, w);
    linear_swiglu_backward(ctx, pre, y, x, w_next, pre);
    linear_silu_forward(ctx, pre, pre, x, w);
    const std::string swiglu = "linear_swiglu_forward", silu = "linear_silu_forward";
    check_error([&] { linear_swiglu_forward(ctx, y, pre, x, half_of_w); }, {swiglu, "[24,16]", "[48,16]"});
    check_error([&] { linear_swiglu_forward(ctx, y, pre, x, narrow_w); }, {swiglu, "[48,8]", "[48,16]"});
    check_error([&] { linear_swiglu_forward(ctx, y, y, x, w); }, {swiglu, "[6,24]", "[6,48]"});
    check_error([&] { linear_silu_forward(ctx, y, y, x, w); }, {silu, "[48,16]", "[24,16]"});
    check_error([&] { linear_silu_forward(ctx, y, f32, x, half_of_w); }, {silu, "f32", "bf16"});
    check_error([&] { linear_swiglu_backward(ctx, pre, y, x, w, pre); }, {"linear_swiglu_backward", "[48,16]"});
    check_error([&] { linear_silu_backward(ctx, y, y, x, half_of_w, y); }, {"linear_silu_backward", "[24,16]"});
  }
}

namespace {

ModelConfig hopper_model() {
  ModelConfig c;
  c.dim = 128, c.n_layers = 2, c.n_heads = 12, c.n_kv_groups = 2, c.d_k = 64, c.d_v = 64, c.vocab_size = 307;
  c.nsa.l = 32, c.nsa.d = 16, c.nsa.l_sel = 64, c.nsa.n_sel = 4, c.nsa.w = 100;
  c.resolve();
  return c;
}

double norm(const std::vector<double>& v) {
  double sum = 0;
  for (const double x : v) sum += x * x;
  return std::sqrt(sum);
}

}  // namespace

// For the same lists all routes compute the same function: each one's error against the CPU in f32 comes from storing
// bf16.
TEST_CASE("routes: every route gives the gradients of the CPU, on the GPU", "[routes][gpu]") {
  if (!require_gpu()) return;
  const ModelConfig config = hopper_model();
  ModelFixture exact(config, 2, 300, Device::cpu(), DType::f32);
  exact.loss_and_grads();
  double largest = 0;
  for (int64_t i = 0; i < exact.model().params().count(); ++i) largest = std::max(largest, norm(exact.grad(i)));
  KernelChoices only_window = {}, only_selected = {};
  only_window.win = KernelChoice::reference, only_selected.sel = KernelChoice::general;
  const KernelChoices all[] = {{},
                               KernelChoices::all(KernelChoice::general),
                               KernelChoices::all(KernelChoice::reference),
                               only_window,
                               only_selected};
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const KernelChoices& kernels : all) {
      ModelFixture gpu(config, 2, 300, Device::cuda(), dtype, 3, 0.1, {}, kernels);
      for (int64_t i = 0; i < config.n_layers; ++i) gpu.set_lists(i, exact.lists(i));
      gpu.loss_and_grads();
      for (int64_t i = 0; i < exact.model().params().count(); ++i) {
        const std::vector<double> want = exact.grad(i), got = gpu.grad(i);
        std::vector<double> difference = want;
        for (size_t j = 0; j < want.size(); ++j) difference[j] -= got[j];
        INFO(json_config::to_json(kernels).dump()
             << " " << name_of(dtype) << " " << exact.model().params().specs()[static_cast<size_t>(i)].name);
        const double tolerance = dtype == DType::f32 ? 1e-4 : 3e-2;
        CHECK(norm(difference) <= tolerance * std::max(norm(want), 1e-2 * largest));
      }
      std::vector<std::vector<double>> first;
      for (int64_t i = 0; i < exact.model().params().count(); ++i) first.push_back(gpu.grad(i));
      gpu.loss_and_grads();
      for (int64_t i = 0; i < exact.model().params().count(); ++i) CHECK(gpu.grad(i) == first[static_cast<size_t>(i)]);
    }
}

TEST_CASE("routes: on the GPU the reference route selects the same blocks as the CPU", "[routes][gpu]") {
  if (!require_gpu()) return;
  const ModelConfig config = hopper_model();
  ModelFixture cpu(config, 2, 700, Device::cpu(), DType::bf16),
      gpu(config, 2, 700, Device::cuda(), DType::bf16, 3, 0.1, {}, KernelChoices::all(KernelChoice::reference));
  cpu.loss();
  gpu.loss();
  const std::vector<int32_t> want = cpu.lists(0), got = gpu.lists(0);
  int64_t differ = 0;
  for (size_t i = 0; i < want.size(); ++i) differ += want[i] != got[i];
  INFO(differ << " of " << want.size());
  // Only lists with nearly equal scores differ.
  CHECK(static_cast<double>(differ) < 0.01 * static_cast<double>(want.size()));
}

// The fused kernel runs any length and also combines the branches. If its shared memory did not suffice for some
// length, that would be a fallback without combination.
TEST_CASE("routes: the selected branch is fused at any length, and also combines the branches", "[routes]") {
  if (!require_hopper_plan()) return;
  for (const int64_t l_sel : {32, 64, 128})
    for (const int64_t T : {int64_t{2048}, int64_t{9000}, int64_t{65537}, int64_t{1} << 20, (int64_t{1} << 24) + 1})
      for (const int64_t heads : {1, 2, 6, 11, 16, 32}) {
        Runtime plan({.device = Device::cuda(), .planning = true});
        const auto alloc = [&](DType type, const Shape& shape) {
          return plan.arena().alloc(MemTag::io, "x", type, shape);
        };
        const Tensor q = alloc(DType::bf16, {1, T, heads, 64}), k = alloc(DType::bf16, {1, T, 1, 64}),
                     o = alloc(DType::bf16, q.shape()), lse = alloc(DType::f32, {1, T, heads}),
                     lists = alloc(DType::i32, {1, T, 1, 16}), gate = alloc(DType::f32, {3, 1, T, 1});
        const CombineAlong combine{o, o, o, gate};
        const bool along = nsa_attend_selected_combines(plan.ctx(), {o, lse}, {q, k, k}, lists, l_sel, combine);
        nsa_attend_selected_forward(plan.ctx(), {o, lse}, {q, k, k}, lists, l_sel, along ? &combine : nullptr);
        INFO("T " << T << ", blocks of " << l_sel << ", " << heads << " heads");
        REQUIRE(plan.ctx().routes.counts().size() == 1);
        CHECK(kFusedKernels.contains(plan.ctx().routes.counts()[0].kernel));
        CHECK(along);
      }
}
