// Recomputation: which layers keep which activations, the memory that a plan reports, and results that are the same to
// the bit.
#include <fmt/format.h>

#include "engine/check.h"
#include "io/json_config.h"
#include "model/flops.h"
#include "model/recompute.h"
#include "tests/support/model_fixture.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/fit/fit.h"
#include "train/run/memory_plan.h"

using namespace triad;
using namespace triad::test;

namespace {

constexpr const char* kPlans[] = {
    "mlp", "attention", "block", "pointwise", "0:1=block,1:3=mlp", "0:1=attention,1:3=pointwise", "0:2=mlp,2:3=block"};

ModelConfig three_layers() {
  ModelConfig c = small_model();
  c.n_layers = 3;
  return c;
}

// bounds: document bounds in the two rows; empty: each row is one document.
std::vector<std::vector<double>> gradients(const ModelConfig& c, int64_t T, Device device, DType dtype,
                                           const RecomputePlan& plan, const std::vector<int32_t>& bounds = {}) {
  ModelFixture f(c, 2, T, device, dtype, 3, 0.1, plan, {}, static_cast<int64_t>(bounds.size()));
  std::vector<std::vector<double>> all(static_cast<size_t>(f.model().params().count()));
  // The second pass runs on buffers that contain values from the first, which has other documents.
  for (int pass = 0; pass < 2; ++pass) {
    const auto end = static_cast<int32_t>(2 * T);
    if (!bounds.empty()) f.set_documents(pass == 0 ? std::vector{0, 7, end / 2, end} : bounds);
    f.loss_and_grads();
  }
  for (size_t i = 0; i < all.size(); ++i) all[i] = f.grad(static_cast<int64_t>(i));
  return all;
}

// Two micro-steps: all activations have their own memory (model/lent_grads.h).
Config m7c(const std::string& recompute, int64_t batch = 16, bool qk_norm = false) {
  return load_config(TRIAD_SOURCE_DIR "/configs/m7c_125m.json",
                     {"runtime.recompute=" + recompute, "train.micro_batch_size=" + std::to_string(batch),
                      "train.accumulate_grad_batches=2", fmt::format("model.qk_norm={}", qk_norm)})
      .config;
}

}  // namespace

TEST_CASE("recompute: a plan is the same after printing and parsing", "[recompute]") {
  const auto read = [](const char* text) { return RecomputePlan::parse(text, 12).str(); };
  CHECK(read("none") == "none");
  CHECK(read("block") == "0:12=block");
  CHECK(read("0:6=block,6:12=mlp") == "0:6=block,6:12=mlp");
  CHECK(read("3:4=attention") == "3:4=attention");
  CHECK(read("0:2=mlp,2:4=mlp") == "0:4=mlp");
  CHECK(RecomputePlan::parse("3:4=attention", 12).of(3) == Recompute::attention);
  CHECK(RecomputePlan::parse("3:4=attention", 12).of(4) == Recompute::none);
  CHECK(read("0:3=pointwise") == "0:3=pointwise");
  for (const char* text :
       {"", "all", "0:6", "0:6=", "=mlp", "6:0=mlp", "3:3=mlp", "0:13=mlp", "-1:2=mlp", "0:4=mlp,3:5=block",
        "0:6=block,", "0:6=blocks", "0 : 6=mlp", "0:6=mlp;6:8=mlp", "1=mlp", "0:99999999999999999999=mlp"}) {
    INFO(text);
    CHECK_THROWS_AS(RecomputePlan::parse(text, 12), UsageError);
  }
}

TEST_CASE("recompute: the last layer that recomputes a part does not compute it again", "[recompute]") {
  const auto replays = [](const char* text, LayerPart part) {
    std::string layers;
    for (int64_t i = 0; i < 4; ++i)
      if (RecomputePlan::parse(text, 4).replays(i, part)) layers += std::to_string(i);
    return layers;
  };
  CHECK(replays("none", LayerPart::mlp_in).empty());
  CHECK(replays("mlp", LayerPart::mlp_in) == "012");
  CHECK(replays("mlp", LayerPart::attention).empty());
  CHECK(replays("1:3=mlp", LayerPart::mlp_in) == "1");
  CHECK(replays("0:2=block,2:4=mlp", LayerPart::mlp_in) == "012");
  CHECK(replays("0:2=block,2:4=mlp", LayerPart::out_proj) == "0");
  CHECK(replays("0:2=attention,2:4=pointwise", LayerPart::qk) == "012");
  CHECK(replays("0:2=attention,2:4=pointwise", LayerPart::attention) == "0");
}

TEST_CASE("recompute: every plan gives the same bits, on packed rows too", "[recompute]") {
  const std::pair<const char*, void (*)(ModelConfig&)> models[] = {
      {"NSA", [](ModelConfig&) {}},
      {"dense", [](ModelConfig& c) { c.attention = AttentionKind::dense; }},
      {"mixed", [](ModelConfig& c) { c.dense_layers = "1:2"; }},
      {"mixed, shared k and v", [](ModelConfig& c) { c.dense_layers = "0:1", c.nsa.shared_kv = true; }},
      {"qkv_bias and qk_norm", [](ModelConfig& c) { c.qkv_bias = c.qk_norm = true; }},
      {"dense, qkv_bias and qk_norm",
       [](ModelConfig& c) { c.attention = AttentionKind::dense, c.qkv_bias = c.qk_norm = true; }},
      {"mixed, shared k and v, qkv_bias and qk_norm",
       [](ModelConfig& c) { c.dense_layers = "0:1", c.nsa.shared_kv = c.qkv_bias = c.qk_norm = true; }},
      {"nsa.layers, qk_norm",
       [](ModelConfig& c) { c.nsa.layers = layered_model().nsa.layers, c.n_layers = 4, c.qk_norm = true; }}};
  const std::vector<int32_t> packed = {0, 1, 20, 33, 50, 57, 100};
  for (const auto& [name, change] : models)
    for (const DType dtype : {DType::f32, DType::bf16}) {
      ModelConfig c = three_layers();
      change(c);
      c.resolve();
      const auto whole = gradients(c, 50, Device::cpu(), dtype, {});
      for (const std::vector<int32_t>& bounds : {std::vector<int32_t>{}, packed}) {
        const auto kept = gradients(c, 50, Device::cpu(), dtype, {}, bounds);
        CHECK((kept == whole) == bounds.empty());
        for (const char* plan : kPlans) {
          INFO(name << (bounds.empty() ? " " : ", packed: ") << plan);
          CHECK(gradients(c, 50, Device::cpu(), dtype, RecomputePlan::parse(plan, c.n_layers), bounds) == kept);
        }
      }
    }
}

TEST_CASE("recompute: every plan gives the same bits on the GPU, on packed rows too", "[recompute][gpu]") {
  if (!require_gpu()) return;
  const std::vector<int32_t> packed = {0, 130, 131, 400, 700, 731, 1400};
  const std::pair<const char*, void (*)(ModelConfig&)> models[] = {
      {"NSA", [](ModelConfig&) {}},
      {"dense", [](ModelConfig& c) { c.attention = AttentionKind::dense; }},
      {"mixed", [](ModelConfig& c) { c.dense_layers = "1:2"; }},
      {"mixed, qkv_bias and qk_norm", [](ModelConfig& c) { c.dense_layers = "1:2", c.qkv_bias = c.qk_norm = true; }}};
  for (const auto& [name, change] : models) {
    ModelConfig c = three_layers();
    c.dim = 128, c.n_heads = 12, c.d_k = c.d_v = 64, c.vocab_size = 307, c.mlp_hidden = 0;
    c.nsa.l = 32, c.nsa.d = 16, c.nsa.l_sel = 64, c.nsa.n_sel = 4, c.nsa.w = 100;
    change(c);
    c.resolve();
    for (const std::vector<int32_t>& bounds : {std::vector<int32_t>{}, packed}) {
      const auto kept = gradients(c, 700, Device::cuda(), DType::bf16, {}, bounds);
      for (const char* plan : kPlans) {
        INFO(name << (bounds.empty() ? " " : ", packed: ") << plan);
        CHECK(gradients(c, 700, Device::cuda(), DType::bf16, RecomputePlan::parse(plan, c.n_layers), bounds) == kept);
      }
    }
  }
}

TEST_CASE("recompute: the more is recomputed, the less memory is kept", "[recompute]") {
  const auto peak = [](const std::string& recompute) {
    return plan_memory(m7c(recompute), Device::cuda()).peak_bytes();
  };
  const int64_t none = peak("none"), mlp = peak("mlp"), attention = peak("attention"), block = peak("block"),
                half = peak("0:6=block");
  CHECK(mlp < none);
  CHECK(attention < none);
  CHECK(block < mlp);
  CHECK(block < attention);
  CHECK(block < half);
  CHECK(half < none);
  const auto recomputed_qk = [&](const std::string& recompute, const std::string& without_norm) {
    return plan_memory(m7c(recompute, 16, /*qk_norm=*/true), Device::cuda()).peak_bytes() - peak(without_norm);
  };
  // q and k after the norm: 32,768 rows, 18 heads, 64 wide, in bf16, in each of 12 layers or once for all that
  // recompute
  constexpr int64_t kQk = int64_t{2} * 32768 * 18 * 64;
  CHECK(recomputed_qk("none", "none") / kQk == 12);
  CHECK(recomputed_qk("attention", "attention") / kQk == 1);
  CHECK(recomputed_qk("pointwise", "none") / kQk == 1);
  CHECK(recomputed_qk("0:6=pointwise", "none") / kQk == 7);
  CHECK(block <= 6'000'000'000);  // bytes, for M7C with vocabulary 50257 and 16 sequences, 2048 tokens each
  const ModelConfig c = m7c("none").model;
  const auto replayed = [&](const char* text) { return replay_flops(c, 16, 2048, RecomputePlan::parse(text, 12)); };
  CHECK(training_flops(c, 16, 2048, RecomputePlan::parse("block", 12)) ==
        Approx(training_flops(c, 16, 2048) + replayed("block")));
  CHECK(replayed("block") == Approx(11 * replayed("0:2=block")));
  CHECK(replayed("0:2=mlp") == 2.0 * 32768 * 768 * 3072);
  CHECK(replayed("pointwise") == 0);
}

TEST_CASE("recompute: the plan refuses more sequences and groups than a GPU's grid allows", "[recompute]") {
  Config config = load_config(TRIAD_SOURCE_DIR "/configs/tiny.json", {"train.seq_len=1"}).config;
  const int64_t groups = config.model.n_kv_groups;
  REQUIRE(groups == 2);
  config.train.micro_batch_size = 65535 / groups;
  plan_memory(config, Device::cuda());
  ++config.train.micro_batch_size;
  check_error([&] { plan_memory(config, Device::cuda()); },
              {"train.micro_batch_size", "model.n_kv_groups", "32768 sequences", "2 groups", "at most 32767"});
  plan_memory(config, Device::cpu());  // a CPU has no grid limit
  CHECK(fit_batch(config, Device::cuda(), int64_t{1} << 50)->micro_batch_size == 32767);
}

TEST_CASE("recompute: --fit finds the largest batch and the plan that fit into the given memory", "[recompute]") {
  const Config config = m7c("none");
  constexpr int64_t kBytes = 8'000'000'000;
  const std::optional<RecomputeFit> recompute = fit_recompute(config, Device::cuda(), kBytes);
  REQUIRE(recompute);
  CHECK(recompute->plan.peak_bytes() <= kBytes);
  CHECK(recompute->recompute != "none");
  CHECK(plan_memory(m7c(recompute->recompute), Device::cuda()).peak_bytes() == recompute->plan.peak_bytes());
  const std::optional<BatchFit> batch = fit_batch(config, Device::cuda(), kBytes);
  REQUIRE(batch);
  CHECK(batch->plan.peak_bytes() <= kBytes);
  CHECK(plan_memory(m7c("none", batch->micro_batch_size + 1), Device::cuda()).peak_bytes() > kBytes);
  CHECK(!fit_batch(config, Device::cuda(), 1'000'000'000));
  CHECK(!fit_recompute(config, Device::cuda(), 1'000'000'000));
  CHECK(fit_recompute(config, Device::cuda(), 100'000'000'000)->recompute == "none");
}

TEST_CASE("recompute: plan and train print what they recompute, and refuse invalid plans", "[recompute]") {
  const std::string config = TRIAD_SOURCE_DIR "/configs/m7c_125m.json --set runtime.device=auto";
  const Outcome plan = run_program("plan " + config + " --fit --memory-gb 6 --json --set runtime.recompute=0:3=mlp");
  INFO(plan.output);
  REQUIRE(plan.exit_code == 0);
  const Json json = parse_json(plan.standard_output, "the output of plan");
  CHECK(json["parameters"] == 155096868);
  CHECK(json["tensors"] == 195);
  CHECK(json["recompute"] == "0:3=mlp");
  CHECK(json["fit"]["recompute_peak_bytes"].get<int64_t>() <= 6'000'000'000);
  CHECK(run_program("plan " + config + " --fit --memory-gb 1").exit_code == 1);
  for (const char* value : {"0:13=mlp", "everything", "0:2=pointwise"}) {
    const Outcome refused = run_program("plan " + config + " --set runtime.recompute=" + value);
    INFO(refused.output);
    CHECK(refused.exit_code == 2);
    CHECK(refused.output.find("runtime.recompute") != std::string::npos);
    CHECK(refused.output.find(value) != std::string::npos);
  }
  const Outcome range = run_program("plan " + config + " --json", "NSA_GC_RANGE=2:5");
  INFO(range.output);
  CHECK(parse_json(range.standard_output, "plan")["recompute"] == "2:5=block");
  CHECK(
      parse_json(run_program("plan " + config + " --json --set runtime.recompute=block", "NSA_NO_GC=1").standard_output,
                 "plan")["recompute"] == "0:12=block");  // --set overrides the environment
}
