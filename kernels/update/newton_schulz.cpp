// Newton-Schulz iterations as batched products, on any device, and the normalization on the CPU.
//
// matmul_batched() computes factor * product + matrix, so the added matrix has no factor. The polynomial's three
// factors a, b, c (NewtonSchulz) are therefore moved into the products': instead of X_k, the matrix after iteration k
// of 5, the code has Z = a^(5-k) X_k, and an iteration is
//   A = a^(-2(5-k)) Z Z^T = X_k X_k^T,  P = A + (c/b) A A,  next Z = Z + (b/a) P Z.
// The last Z is X_5. The first is a^5 = 485 times as large as X_0, which changes no relative rounding error.
// A and P are symmetric (A A = A A^T). symmetric_product() computes them with half the work that other products take.
#include "kernels/update/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/parallel.h"
#include "kernels/ops/matmul.h"
#include "kernels/update/symmetric_product.h"

namespace triad {

namespace {

constexpr int64_t kPiece = 1 << 14;  // elements per partial sum for the norm

template <class T>
void normalize_cpu(Context& ctx, Tensor y, ConstTensor x, double factor) {
  const int64_t n = x.size(0), size = x.size(1) * x.size(2), pieces = ceil_div(size, kPiece);
  Scratch::Scope scope(ctx.scratch);
  const Tensor partials = scope.alloc(DType::f64, {n, pieces});
  const auto for_piece = [&](int64_t i, auto&& f) {
    const int64_t begin = i % pieces * kPiece, at = i / pieces * size;
    f(at + begin, at + std::min(begin + kPiece, size));
  };
  parallel_for(ctx, n * pieces, [&](int64_t i) {
    double sum = 0;
    for_piece(i, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) sum += std::pow(static_cast<double>(x.ptr<T>()[at]), 2);
    });
    partials.ptr<double>()[i] = sum;
  });
  parallel_for(ctx, n * pieces, [&](int64_t i) {
    double squares = 0;
    for (int64_t p = 0; p < pieces; ++p) squares += partials.ptr<double>()[i / pieces * pieces + p];
    using A = acc_t<T>;
    const A scale = static_cast<A>(factor / (std::sqrt(squares) + NewtonSchulz::kEps));
    for_piece(i, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) y.ptr<T>()[at] = static_cast<T>(static_cast<A>(x.ptr<T>()[at]) * scale);
    });
  });
}

void normalize(Context& ctx, Tensor y, ConstTensor x, double factor) {
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::normalize_matrices(ctx, y, x, factor);
  }
  dispatch_float(x.dtype, [&]<class T>() { normalize_cpu<T>(ctx, y, x, factor); });
}

}  // namespace

void newton_schulz(Context& ctx, Tensor x) {
  const OpScope op_scope(ctx, "newton_schulz");
  TRIAD_CHECK(x.rank == 3, "newton_schulz: {} are not [n,R,C]", x.str());
  check_tensor("newton_schulz: x", x, x.shape(), x.dtype);
  if (x.numel() == 0) return;
  using N = NewtonSchulz;
  const bool tall = x.size(1) > x.size(2);
  const int64_t n = x.size(0), side = tall ? x.size(2) : x.size(1);
  Scratch::Scope scope(ctx.scratch);
  const Tensor other = scope.alloc(x.dtype, x.shape());
  const Tensor square = scope.alloc(x.dtype, {n, side, side}), polynomial = scope.alloc(x.dtype, {n, side, side});
  // An odd number of iterations ends in x if the first one reads the other buffer.
  static_assert(N::kIterations % 2 == 1);
  Tensor from = other, to = x;
  normalize(ctx, from, x, std::pow(N::kA, N::kIterations));
  for (int left = N::kIterations; left > 0; --left) {
    symmetric_product(ctx, square, from, {.trans = tall, .alpha = std::pow(N::kA, -2 * left)});
    symmetric_product(ctx, polynomial, square, {.alpha = N::kC / N::kB}, square);
    if (tall)
      matmul_batched(ctx, to, from, polynomial, {.alpha = N::kB / N::kA}, from);
    else
      matmul_batched(ctx, to, polynomial, from, {.alpha = N::kB / N::kA}, from);
    std::swap(from, to);
  }
}

}  // namespace triad
