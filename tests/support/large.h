// Helpers for testing large tensors on a GPU: memory sized by a dry run, inputs that repeat a short random sequence,
// and sampled results' errors against double arithmetic on the host.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/rng.h"
#include "kernels/common/parallel.h"
#include "tests/support/test.h"

namespace triad::test {

// Length of the random sequence: a prime that divides no test's strides, so a tensor's rows differ.
inline constexpr int64_t kPieceLength = (int64_t{1} << 22) - 3;

// Returns n uniformly distributed numbers with the given mean and standard deviation.
inline std::vector<float> draw(int64_t n, uint64_t stream, double std = 1, double mean = 0) {
  std::vector<float> x(static_cast<size_t>(n));
  const Philox random(20251121, stream);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i)
    x[static_cast<size_t>(i)] =
        static_cast<float>(mean + std * std::sqrt(12.0) * (random.uniform(static_cast<uint64_t>(i)) - 0.5));
  return x;
}

// Sets element i in the contiguous tensor t to piece[i mod piece.size()], rounded to t's dtype.
inline void repeat(Context& ctx, Tensor t, const std::vector<float>& piece) {
  if (ctx.planning || t.numel() == 0) return;
  const int64_t n = t.numel();
  const Tensor flat = t.view({n});
  int64_t done = std::min(n, static_cast<int64_t>(piece.size()));
  dispatch_float(t.dtype, [&]<class T>() {
    std::vector<T> rounded(static_cast<size_t>(done));
    for (size_t i = 0; i < rounded.size(); ++i) rounded[i] = static_cast<T>(piece[i]);
    write(ctx, flat.slice(0, 0, done), rounded.data());
  });
  for (int64_t count; done < n; done += count) {  // each turn doubles the part that is filled
    count = std::min(done, n - done);
    copy(ctx, flat.slice(0, done, done + count), flat.slice(0, 0, count));
  }
}

// Copies a contiguous tensor to the host as floats: any float dtype, or int32 indices below 2^24.
inline std::vector<float> fetch(Context& ctx, ConstTensor t) {
  std::vector<float> out(static_cast<size_t>(t.numel()));
  auto as = [&]<class T>(T) {
    std::vector<T> raw(out.size());
    read(ctx, raw.data(), t);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < raw.size(); ++i) out[i] = static_cast<float>(raw[i]);
  };
  if (out.empty()) return out;
  if (t.dtype == DType::i32) {
    as(int32_t{});
  } else {
    dispatch_float(t.dtype, [&]<class T>() { as(T{}); });
  }
  return out;
}

inline double product(const float* x, const float* y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * y[i];
  return sum;
}

// A row's expected value, computed in double, and its error scale: the row's norm, or, if terms cancel, the root sum
// square of the terms (rounding errors are independent).
struct Expected {
  std::vector<double> value;
  double terms_squared = 0;

  explicit Expected(int64_t n) : value(static_cast<size_t>(n)) {}
  // value += x * row. size: the magnitude of the terms that x sums; |x| is used if it is larger.
  template <class T>
  void add(double x, const T* row, double size = 0) {
    double norm = 0;
    for (size_t j = 0; j < value.size(); ++j) {
      value[j] += x * row[j];
      norm += static_cast<double>(row[j]) * row[j];
    }
    const double factor = std::max(std::abs(x), size);
    terms_squared += factor * factor * norm;
  }
  template <class T>
  double error_of(const T* got) const {
    constexpr double kVanishing = 1e-40;  // 1e-20 squared; floats below 1e-20 need not be accurate
    double difference = 0, norm = 0;
    for (size_t j = 0; j < value.size(); ++j) {
      difference += (got[j] - value[j]) * (got[j] - value[j]);
      norm += value[j] * value[j];
    }
    if (difference == 0) return 0;
    const double error = std::sqrt(difference / std::max({norm, terms_squared, kVanishing}));
    return std::isfinite(error) ? error : INFINITY;
  }
};

// The maximum error_of(i) over i in [0, n), computed on all threads.
template <class F>
double worst_of(int64_t n, F&& error_of) {
  double worst = 0;
#pragma omp parallel for schedule(dynamic) reduction(max : worst)
  for (int64_t i = 0; i < n; ++i) worst = std::max(worst, static_cast<double>(error_of(i)));
  return worst;
}

// Returns false and marks the test as skipped if the GPU has less free memory than this.
inline bool require_gpu_memory(int64_t bytes) {
  const DeviceInfo gpu = backend::info(Device::cuda());
  if (gpu.free_bytes >= bytes) return true;
  return skip(fmt::format("{:.1f} GiB of GPU memory are needed, {:.1f} of {} are free",
                          static_cast<double>(bytes) * 0x1p-30, static_cast<double>(gpu.free_bytes) * 0x1p-30,
                          gpu.name));
}

// Finds, by a dry run, the arena and scratch sizes that build(Runtime&) needs, which allocates tensors and runs ops.
template <class F>
Runtime::Options memory_for(F&& build) {
  Runtime plan({.device = Device::cuda(), .planning = true});
  build(plan);
  const int64_t scratch = align_up(plan.scratch().peak_bytes());
  return {.device = Device::cuda(), .arena_bytes = plan.arena().used_bytes() + scratch, .scratch_bytes = scratch};
}

inline Tensor allocate(Runtime& rt, DType dtype, const Shape& shape) {
  return rt.arena().alloc(MemTag::io, "test", dtype, shape);
}
// Allocates memory that an op must overwrite: every float is NaN, every i32 is far outside the index range.
inline Tensor poisoned(Runtime& rt, DType dtype, const Shape& shape) {
  const Tensor t = allocate(rt, dtype, shape);
  if (!rt.ctx().planning && t.numel() > 0)
    backend::fill(t.data, t.device, dtype == DType::i32 ? 0x7f : 0xff, t.bytes(), rt.stream().handle());
  return t;
}

}  // namespace triad::test
