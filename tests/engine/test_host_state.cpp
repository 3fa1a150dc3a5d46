// State in host memory that passes through the device: an optimizer with state there computes the same bits as with
// state on the device, for any piece size.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "engine/host_state.h"
#include "engine/rng.h"
#include "engine/with_cuda.h"
#include "kernels/update/adamw.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

constexpr int64_t kElements = 5000 + 77;

std::vector<float> draw(uint64_t stream) {
  std::vector<float> values(kElements);
  for (int64_t i = 0; i < kElements; ++i)
    values[static_cast<size_t>(i)] = static_cast<float>(Philox(3, stream).uniform(static_cast<uint64_t>(i)));
  return values;
}

// The tensors param, m and v, each with its dtype.
std::vector<std::vector<std::byte>> initial_state(const std::vector<DType>& dtypes) {
  std::vector<std::vector<std::byte>> state;
  for (size_t k = 0; k < dtypes.size(); ++k) {
    const std::vector<float> values = draw(k);
    state.emplace_back(static_cast<size_t>(kElements * size_of(dtypes[k])));
    for (size_t i = 0; i < values.size(); ++i) {
      const bf16 narrow(values[i]);
      if (dtypes[k] == DType::f32)
        std::memcpy(state[k].data() + i * sizeof(float), &values[i], sizeof(float));
      else
        std::memcpy(state[k].data() + i * sizeof(bf16), &narrow, sizeof(bf16));
    }
  }
  return state;
}

// One pass's ranges, in update order.
using Ranges = std::vector<std::pair<int64_t, int64_t>>;

class Lab {
 public:
  Lab(Device device, const std::vector<DType>& dtypes)
      : rt_({.device = device, .arena_bytes = int64_t{16} << 20, .scratch_bytes = 1 << 20}), dtypes_(dtypes) {
    grad_ = rt_.arena().alloc(MemTag::grads, "gradients", DType::f32, {kElements});
    write(rt_.ctx(), grad_, draw(9).data());
    norm_ = rt_.arena().alloc(MemTag::io, "norm", DType::f64, {1});
    const double norm_squared = 1;
    write(rt_.ctx(), norm_, &norm_squared);
  }

  // The state after `steps` steps, kept on the device.
  std::vector<std::vector<std::byte>> resident(int64_t steps) {
    std::vector<std::vector<std::byte>> state = initial_state(dtypes_);
    std::vector<Tensor> tensors;
    for (size_t k = 0; k < dtypes_.size(); ++k) {
      tensors.push_back(rt_.arena().alloc(MemTag::optimizer, "state", dtypes_[k], {kElements}));
      write(rt_.ctx(), tensors[k], state[k].data());
    }
    for (int64_t step = 1; step <= steps; ++step) update(tensors, 0, kElements, step);
    for (size_t k = 0; k < tensors.size(); ++k) read(rt_.ctx(), state[k].data(), tensors[k]);
    return state;
  }
  // The same, kept in host memory.
  std::vector<std::vector<std::byte>> offloaded(int64_t steps, int64_t piece, int slots, const Ranges& ranges) {
    HostState host(rt_.ctx(), rt_.arena(),
                   {.kinds = {dtypes_.begin(), dtypes_.end()}, .elements = kElements, .piece = piece, .slots = slots});
    std::vector<std::vector<std::byte>> state = initial_state(dtypes_);
    for (size_t k = 0; k < state.size(); ++k) {  // written by queued work
      const Tensor on_device = rt_.arena().alloc(MemTag::io, "initial state", dtypes_[k], {kElements});
      write(rt_.ctx(), on_device, state[k].data());
      copy(rt_.ctx(), host.whole(k), on_device);
    }
    host.follow(rt_.ctx().stream);
    int64_t most = 0;
    for (int64_t step = 1; step <= steps; ++step)
      for (const auto& [begin, end] : ranges)
        host.update(rt_.ctx(), begin, end, [&, step](std::span<const Tensor> at, int64_t from, int64_t to) {
          most = std::max(most, to - from);
          update(at, from, to, step);
        });
    CHECK(most <= piece);
    // Read by queued work, then by the host.
    std::vector<std::vector<std::byte>> queued = state;
    host.arrive(rt_.ctx().stream);
    for (size_t k = 0; k < state.size(); ++k) {
      const Tensor on_device = rt_.arena().alloc(MemTag::io, "state that was read", dtypes_[k], {kElements});
      copy(rt_.ctx(), on_device, host.whole(k));
      read(rt_.ctx(), queued[k].data(), on_device);
    }
    host.synchronize();
    for (size_t k = 0; k < state.size(); ++k) std::memcpy(state[k].data(), host.whole(k).data, state[k].size());
    CHECK(queued == state);
    return state;
  }

 private:
  void update(std::span<const Tensor> t, int64_t begin, int64_t end, int64_t step) {
    adamw(rt_.ctx(), t[0], {}, t[1], t[2], grad_.slice(0, begin, end), norm_,
          {.lr = 1e-2, .weight_decay = 0.1, .step = step, .seed = 8, .first_element = begin});
  }
  Runtime rt_;
  std::vector<DType> dtypes_;
  Tensor grad_, norm_;
};

void check_offload(Device device) {
  constexpr int64_t kSteps = 4;
  const Ranges whole = {{0, kElements}}, backwards = {{3000, kElements}, {1024, 3000}, {0, 1024}};
  for (const auto& dtypes : {std::vector<DType>{DType::f32, DType::f32, DType::f32},
                             std::vector<DType>{DType::f32, DType::bf16, DType::bf16},
                             std::vector<DType>{DType::bf16, DType::bf16, DType::bf16}}) {
    INFO(device.str() << ", parameters " << name_of(dtypes[0]) << ", moments " << name_of(dtypes[1]));
    const auto expected = Lab(device, dtypes).resident(kSteps);
    CHECK(expected != initial_state(dtypes));
    for (const int64_t piece : {128, 640, 8192})
      for (const int slots : {1, 2, 3})
        for (const Ranges& ranges : {whole, backwards}) {
          INFO("pieces of " << piece << ", " << slots << " slots, " << ranges.size() << " ranges");
          CHECK(Lab(device, dtypes).offloaded(kSteps, piece, slots, ranges) == expected);
        }
  }
}

}  // namespace

TEST_CASE("host state: an optimizer in host memory gives the bits of a resident one", "[engine]") {
  check_offload(Device::cpu());
}

TEST_CASE("host state: an optimizer in host memory gives the bits of a resident one on the GPU", "[engine][gpu]") {
  if (!require_gpu()) return;
  check_offload(Device::cuda());
}

TEST_CASE("host state: a plan counts the slots on a GPU and the whole state on the CPU", "[engine][build]") {
  const HostState::Options options = {.kinds = {DType::f32, DType::bf16}, .elements = 1 << 20, .piece = 1 << 10};
  const auto planned = [&](Device device) {
    Runtime rt({.device = device, .planning = true});
    HostState state(rt.ctx(), rt.arena(), options);
    int64_t elements = 0;
    state.update(rt.ctx(), 128, 1 << 20, [&](std::span<const Tensor> piece, int64_t begin, int64_t end) {
      CHECK(piece[1].numel() == end - begin);
      elements += end - begin;
    });
    CHECK(elements == (1 << 20) - 128);
    return rt.arena().used_bytes();
  };
  CHECK(planned(Device::cpu()) == 6 << 20);
  if (backend::built_with_cuda()) CHECK(planned(Device::cuda()) == 3 * 6 << 10);
}
