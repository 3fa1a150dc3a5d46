// Initial values on the CPU, in parallel over pieces. Philox runs number by number; log, square root and cosine for a
// whole piece are one loop, which vectorises.
#include "kernels/step/initial_values.h"

#include <algorithm>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "engine/rng.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

constexpr int64_t kPiece = 1024;

template <class T>
void draw_piece(T* out, int64_t n, uint64_t first, const NormalValues& values) {
  const Philox random(values.seed, values.stream);
  uint64_t a[kPiece], b[kPiece];
  float rounded[kPiece];
  for (int64_t i = 0; i < n; ++i) {
    const std::array<uint64_t, 2> bits = random.bit_pair(first + static_cast<uint64_t>(i));
    a[i] = bits[0], b[i] = bits[1];
  }
  for (int64_t i = 0; i < n; ++i) rounded[i] = static_cast<float>(values.std * normal_from_bits(a[i], b[i]));
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(rounded[i]);
}

void check(const char* what, const Tensor& out) {
  TRIAD_CHECK(is_float(out.dtype) && out.contiguous(), "{} go to a contiguous tensor of floats, not to {}", what,
              out.str());
}

}  // namespace

void draw_normal(Context& ctx, Tensor out, int64_t first, const NormalValues& values) {
  const OpScope op_scope(ctx, "draw_normal");
  check("normal values", out);
  TRIAD_CHECK(first >= 0, "normal values from number {} on", first);
  if constexpr (kBuiltWithCuda)
    if (ctx.device.is_cuda()) return cuda::draw_normal(ctx, out, first, values);
  const int64_t n = out.numel();
  dispatch_float(out.dtype, [&]<class T>() {
    parallel_for(ctx, ceil_div(n, kPiece), [&](int64_t piece) {
      const int64_t begin = piece * kPiece;
      draw_piece(out.ptr<T>() + begin, std::min(kPiece, n - begin), static_cast<uint64_t>(first + begin), values);
    });
  });
}

void draw_uniform(Context& ctx, Tensor out, int64_t first, const UniformValues& values) {
  const OpScope op_scope(ctx, "draw_uniform");
  check("uniform values", out);
  TRIAD_CHECK(first >= 0, "uniform values from number {} on", first);
  if constexpr (kBuiltWithCuda)
    if (ctx.device.is_cuda()) return cuda::draw_uniform(ctx, out, first, values);
  const int64_t n = out.numel();
  const Philox random(values.seed, values.stream);
  dispatch_float(out.dtype, [&]<class T>() {
    parallel_for(ctx, ceil_div(n, kPiece), [&](int64_t piece) {
      for (int64_t i = piece * kPiece; i < std::min(n, (piece + 1) * kPiece); ++i)
        out.ptr<T>()[i] = static_cast<T>(
            static_cast<float>(values.bound * (2 * random.uniform(static_cast<uint64_t>(first + i)) - 1)));
    });
  });
}

void fill_constant(Context& ctx, Tensor out, double value) {
  const OpScope op_scope(ctx, "fill_constant");
  check("constant values", out);
  if constexpr (kBuiltWithCuda)
    if (ctx.device.is_cuda()) return cuda::fill_constant(ctx, out, value);
  const int64_t n = out.numel();
  dispatch_float(out.dtype, [&]<class T>() {
    parallel_for(ctx, ceil_div(n, kPiece), [&](int64_t piece) {
      T* const begin = out.ptr<T>() + piece * kPiece;
      std::fill(begin, begin + std::min(kPiece, n - piece * kPiece), static_cast<T>(static_cast<float>(value)));
    });
  });
}

}  // namespace triad
