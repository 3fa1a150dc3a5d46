// How CPU references run: dispatch over the float type, rows split over threads, dot products the compiler vectorises.
#pragma once
#include <cstdint>

#include "engine/check.h"
#include "engine/context.h"

namespace triad {

// Calls f.template operator()<T>() with T = double, float or bf16 for a float dtype:
//   dispatch_float(x.dtype, [&]<class T>() { ... });
template <class F>
decltype(auto) dispatch_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64: return f.template operator()<double>();
    case DType::f32: return f.template operator()<float>();
    case DType::bf16: return f.template operator()<bf16>();
    default: fail("an op for floats was given {}", name_of(dtype));
  }
}

// body(i) for i in [0, n), split over threads. Results must not depend on which thread takes which i: an iteration
// writes only what belongs to i. Does nothing on a planning context.
template <class Body>
void parallel_for(const Context& ctx, int64_t n, Body&& body) {
  if (ctx.planning || n <= 0) return;
#pragma omp parallel for schedule(dynamic, 1 + n / 512) num_threads(ctx.threads) if (n > 1 && ctx.threads > 1)
  for (int64_t i = 0; i < n; ++i) body(i);
}

// Sum of a[i] * b[i] in the accumulator type A, over 16 independent lanes in a fixed order.
template <class A, class TA, class TB>
inline A dot(const TA* a, const TB* b, int64_t n) {
  constexpr int kLanes = 16;
  A lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lanes[j] += static_cast<A>(a[i + j]) * static_cast<A>(b[i + j]);
  A sum = 0;
  for (; i < n; ++i) sum += static_cast<A>(a[i]) * static_cast<A>(b[i]);
  for (int j = 0; j < kLanes; ++j) sum += lanes[j];
  return sum;
}

// y[i] += s * x[i]
template <class A, class TX>
inline void axpy(A* y, A s, const TX* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += s * static_cast<A>(x[i]);
}

}  // namespace triad
