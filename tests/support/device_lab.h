// Lab: tensors on one device, from and to values on the host, for tests that call ops.
#pragma once
#include <vector>

#include "engine/backend.h"
#include "engine/context.h"
#include "engine/rng.h"
#include "kernels/ops/cast.h"

namespace triad::test {

using Floats = std::vector<float>;

class Lab {
 public:
  explicit Lab(Device device, int64_t arena_bytes = int64_t{64} << 20, int64_t scratch_bytes = 1 << 20)
      : rt_({.device = device, .arena_bytes = arena_bytes, .scratch_bytes = scratch_bytes}) {}
  Context& ctx() { return rt_.ctx(); }
  Tensor from(const Floats& values, DType dtype) {
    const Shape shape = {static_cast<int64_t>(values.size())};
    const Tensor wide = rt_.arena().alloc(MemTag::io, "values", DType::f32, shape);
    write(ctx(), wide, values.data());
    if (dtype == DType::f32) return wide;
    const Tensor narrow = rt_.arena().alloc(MemTag::io, "values", dtype, shape);
    cast(ctx(), narrow, wide);
    return narrow;
  }
  Tensor alloc(DType dtype, const Shape& shape) {
    const Tensor t = rt_.arena().alloc(MemTag::io, "values", dtype, shape);
    zero(ctx(), t);
    return t;
  }
  Tensor doubles(const std::vector<double>& values) {
    const Tensor t = rt_.arena().alloc(MemTag::io, "doubles", DType::f64, {static_cast<int64_t>(values.size())});
    write(ctx(), t, values.data());
    return t;
  }
  Tensor integers(const std::vector<int64_t>& values, const Shape& shape) {
    const Tensor t = rt_.arena().alloc(MemTag::io, "integers", DType::i64, shape);
    write(ctx(), t, values.data());
    return t;
  }
  template <class T>
  std::vector<T> values(const Tensor& t) {
    std::vector<T> host(static_cast<size_t>(t.numel()));
    read(ctx(), host.data(), t);
    return host;
  }
  // A tensor's values, in either dtype.
  Floats floats(const Tensor& t) {
    if (t.dtype == DType::f32) return values<float>(t);
    const std::vector<bf16> narrow = values<bf16>(t);
    return Floats(narrow.begin(), narrow.end());
  }

 private:
  Runtime rt_;
};

inline std::vector<Device> devices() {
  std::vector<Device> all = {Device::cpu()};
  if (backend::cuda_device_count() > 0) all.push_back(Device::cuda());
  return all;
}

inline Floats normal(int64_t n, uint64_t stream, double std = 1, double mean = 0) {
  Floats out(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i)
    out[static_cast<size_t>(i)] = static_cast<float>(mean + std * Philox(9, stream).normal(static_cast<uint64_t>(i)));
  return out;
}

}  // namespace triad::test
