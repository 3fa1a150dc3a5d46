// Activations in gradient memory (model/lent_grads.h): the same bits as with their own memory, and less of it.
#include <fmt/ranges.h>

#include <algorithm>

#include "model/lent_grads.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/inference.h"
#include "train/run/memory_plan.h"
#include "train/step/train_step.h"

using namespace triad;
using namespace triad::test;

namespace {

struct Trained {
  std::vector<double> numbers;  // losses, gradient norms and an evaluation's loss, then the master weights
  int64_t bytes;                // activation memory
};

// Trains three steps with one micro-step each. Only a config with one micro-step per step lets activations use gradient
// memory. So without `lends` the config has two, although only one of them is executed.
Trained train_lent(Device device, bool lends, std::vector<std::string> sets) {
  sets.insert(sets.end(),
              {"model.n_layers=4", "train.seq_len=32", "train.micro_batch_size=1", "runtime.cuda_graph=true",
               lends ? "train.accumulate_grad_batches=1" : "train.accumulate_grad_batches=2"});
  const Config config = load_config(TRIAD_SOURCE_DIR "/configs/tiny.json", sets).config;
  const std::unique_ptr<Runtime> runtime = allocate_planned(config, device);
  TrainStep step(*runtime, config);
  Params& params = step.model().params();
  params.init(runtime->ctx(), 7);
  Trained out;
  for (int32_t i = 0; i < 3; ++i) {
    std::vector<int32_t> tokens;
    for (int32_t t = 0; t <= config.train.seq_len; ++t) tokens.push_back((t * t + 5 * i) % 256);
    const std::span<const int32_t> inputs(tokens.data(), tokens.size() - 1), targets(tokens.data() + 1, inputs.size());
    step.begin();
    step.micro_step(inputs, targets, config.train.seq_len);
    const TrainStep::Result result = step.finish(i, config.train.seq_len);
    const double evaluated = step.evaluate(inputs, targets);
    out.numbers.insert(out.numbers.end(), {result.loss, result.grad_norm, evaluated});
  }
  const std::vector<double> weights = read_floats(runtime->ctx(), params.master());
  out.numbers.insert(out.numbers.end(), weights.begin(), weights.end());
  out.bytes = runtime->arena().used_bytes(MemTag::activations);
  return out;
}

void check_same_bits(Device device) {
  const std::vector<std::string> variants[] = {
      {},
      {"runtime.precision=bf16", "model.tie_embeddings=true"},
      {"model.mlp=swiglu", "model.mlp_hidden=50", "model.dense_layers=1:2"},  // matrices with padding after them
      {"runtime.recompute=0:2=block", "model.qk_norm=true"},
      {"runtime.recompute=mlp", "runtime.precision=bf16"}};
  for (const std::vector<std::string>& sets : variants) {
    INFO(fmt::format("{}", fmt::join(sets, " ")));
    const Trained lent = train_lent(device, true, sets), own = train_lent(device, false, sets);
    const auto first = std::ranges::mismatch(lent.numbers, own.numbers).in1 - lent.numbers.begin();
    CHECK(first == static_cast<int64_t>(own.numbers.size()));  // no gradient differs
    CHECK(lent.bytes < own.bytes);
  }
}

}  // namespace

TEST_CASE("lent gradients: a step has the bits of one whose activations have memory of their own", "[train]") {
  check_same_bits(Device::cpu());
}

TEST_CASE("lent gradients: the same bits on the GPU too, from a graph", "[train][gpu]") {
  if (require_gpu()) check_same_bits(Device::cuda());
}

TEST_CASE("lent gradients: the memory of a tensor is in the gradients of earlier layers, and used once", "[train]") {
  Runtime runtime({.device = Device::cpu(), .planning = true});
  const ModelConfig c = load_config(TRIAD_SOURCE_DIR "/configs/tiny.json", {"model.n_layers=3"}).config.model;
  Params params(runtime.arena(), c, {.grads = true});
  LentGrads lent(params);
  const Tensor grads = params.grads();
  std::byte* end = grads.data + grads.bytes();
  for (int64_t layer = c.n_layers; layer > 0; --layer)
    for (int i = 0; i < 3; ++i) {
      const Tensor t = lent.take(DType::bf16, {100, 3}, layer);
      REQUIRE(!t.empty());
      CHECK(t.data + t.bytes() <= std::min(end, grads.data + params.segments()[layer - 1].end * size_of(grads.dtype)));
      CHECK(t.data >= grads.data + params.segments()[0].begin * size_of(grads.dtype));
      end = t.data;
    }
  for (const int64_t elements : {1, 300}) CHECK(lent.take(DType::bf16, {elements}, 0).empty());
  CHECK(lent.take(DType::f32, {grads.numel()}, 1).empty());
  CHECK_THROWS_AS(lent.take(DType::bf16, {100, 3}, c.n_layers + 1), Error);
}

namespace {

// Planned bytes for a large model whose activations use gradient memory (lent) or don't (own).
struct Plans {
  int64_t lent, own;
  explicit Plans(Device device) : lent(peak_bytes(device, "1")), own(peak_bytes(device, "2")) {}
  static int64_t peak_bytes(Device device, const std::string& micro_steps) {
    const Config config = load_config(TRIAD_SOURCE_DIR "/configs/llama_1b.json",
                                      {"train.seq_len=8192", "train.micro_batch_size=4", "runtime.recompute=none",
                                       "train.accumulate_grad_batches=" + micro_steps})
                              .config;
    return plan_memory(config, device).peak_bytes();
  }
};

void check_saved_bytes(const Plans& plans) {
  int64_t layer_bytes = 0;  // the layers' product gradients
  for (const ParamSpec& spec : param_specs(load_config(TRIAD_SOURCE_DIR "/configs/llama_1b.json", {}).config.model))
    if (spec.is_layer_product()) layer_bytes += 4 * spec.shape.numel();
  CHECK(plans.own - plans.lent > 0.9 * static_cast<double>(layer_bytes));
  CHECK(plans.own - plans.lent <= layer_bytes);
}

}  // namespace

TEST_CASE("lent gradients: a plan needs as much less as the layers' gradients have", "[train][build]") {
  check_saved_bytes(Plans(Device::cpu()));
}

TEST_CASE("lent gradients: a GPU's plan needs as much less too, and fits the memory it was measured with",
          "[train][build]") {
  if (!require_hopper_plan()) return;  // other kernels need more memory than the fused ones
  const Plans plans(Device::cuda());
  check_saved_bytes(plans);
  CHECK(plans.lent <= 54'700'000'000);
}
