// Steps whose documents change from step to step: the same memory and, on a GPU, the same recorded graph give the same
// bits as a step that knows no other documents.
#include <memory>
#include <span>
#include <vector>

#include "tests/support/dist_run.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/inference.h"
#include "train/run/memory_plan.h"
#include "train/step/train_step.h"

using namespace triad;
using namespace triad::test;

namespace {

using Bounds = std::vector<int32_t>;
constexpr int64_t kRows = 2, kMostDocuments = 12;

// One document a row, many, single tokens, few, and twice the same.
std::vector<Bounds> changing_bounds(int32_t T) {
  Bounds single = {0};
  for (int32_t i = 1; i < kMostDocuments; ++i) single.push_back(i);
  single.insert(single.end(), {T, T + 1, 2 * T});
  return {{0, T, 2 * T},
          {0, 1, 9, 10, 17, T, T + 7, T + 8, 2 * T},
          single,
          {0, T - 1, T, T + T / 2, 2 * T},
          {0, 3, T, 2 * T - 1, 2 * T},
          {0, 3, T, 2 * T - 1, 2 * T},
          {0, T, 2 * T}};
}

// Steps with configs/tiny.json's model, each from the same initial weights.
class Steps {
 public:
  Steps(Device device, int64_t T, const std::vector<std::string>& sets)
      : config_(load_config(kTiny, sets_of(T, sets)).config),
        runtime_(allocate_planned(config_, device, nullptr, kMostDocuments)),
        step_(*runtime_, config_, nullptr, kMostDocuments) {}

  // One micro-step's loss and all gradients.
  std::vector<std::vector<double>> run(const Bounds& bounds) {
    std::vector<int32_t> tokens, targets;
    for (int32_t i = 0; i < bounds.back(); ++i) {
      tokens.push_back((i * i + 3 * i) % 256);
      targets.push_back((7 * i + 1) % 256);
    }
    const auto positions = static_cast<int64_t>(targets.size());
    const Params& params = step_.model().params();
    step_.model().params().init(runtime_->ctx(), 7);
    step_.begin();
    step_.micro_step(tokens, targets, positions, bounds);
    std::vector<std::vector<double>> all;
    for (int64_t i = 0; i < params.count(); ++i)
      all.push_back(read_floats(runtime_->ctx(), params.part(params.grads(), i)));
    step_.update(number_, positions);
    ++number_;
    all.push_back({step_.result().loss});
    return all;
  }

 private:
  static std::vector<std::string> sets_of(int64_t T, std::vector<std::string> sets) {
    sets.push_back("train.seq_len=" + std::to_string(T));
    sets.push_back("train.micro_batch_size=" + std::to_string(kRows));
    return sets;
  }
  Config config_;
  std::unique_ptr<Runtime> runtime_;
  TrainStep step_;
  int64_t number_ = 0;
};

void check_changing_bounds(Device device, int64_t T, const std::vector<std::string>& sets,
                           const std::vector<std::string>& more = {}) {
  std::vector<std::string> with_more = sets;
  with_more.insert(with_more.end(), more.begin(), more.end());
  Steps all(device, T, with_more);
  std::vector<std::vector<double>> before;
  for (const Bounds& bounds : changing_bounds(static_cast<int32_t>(T))) {
    Steps alone(device, T, sets);
    const auto got = all.run(bounds), want = alone.run(bounds);
    INFO(bounds.size() - 1 << " documents");
    CHECK(got == want);
    if (!before.empty() &&
        bounds != Bounds{0, 3, static_cast<int32_t>(T), static_cast<int32_t>(2 * T - 1), static_cast<int32_t>(2 * T)})
      CHECK(got != before);
    before = got;
  }
}

}  // namespace

TEST_CASE("documents: steps with other documents each give the bits of a first step", "[train][documents]") {
  for (const std::string attention : {"nsa", "dense"})
    for (const std::string recompute : {"none", "block"})
      check_changing_bounds(Device::cpu(), 48, {"model.attention=" + attention, "runtime.recompute=" + recompute});
}

TEST_CASE("documents: a recorded graph replays with other documents (GPU)", "[train][documents][gpu]") {
  if (!require_gpu()) return;
  for (const std::string attention : {"nsa", "dense"})
    for (const std::string precision : {"fp32", "bf16"}) {
      const std::vector<std::string> sets = {"model.attention=" + attention, "runtime.precision=" + precision};
      check_changing_bounds(Device::cuda(), 48, sets, {"runtime.cuda_graph=true"});
      // The shapes that Hopper's kernels take.
      std::vector<std::string> large = sets;
      large.insert(large.end(), {"model.dim=128", "model.n_heads=12", "model.n_kv_groups=2", "model.d_k=64",
                                 "model.d_v=64", "nsa.l=32", "nsa.d=16", "nsa.l_sel=64", "nsa.n_sel=4", "nsa.w=100"});
      check_changing_bounds(Device::cuda(), 700, large, {"runtime.cuda_graph=true"});
    }
}
