// For CPU references: a parallel loop over rows, and dot products that vectorise.
#pragma once
#include <cstdint>
#include <type_traits>

#include "engine/context.h"
#include "engine/dtype_dispatch.h"
#include "engine/process/thread_pool.h"
#include "kernels/common/integer.h"

namespace triad {

// Calls body(i) for all i in [0, n), split over ctx.threads threads. body(i) may write only data that belongs to i, so
// results do not depend on the thread count. Does nothing on a planning context.
template <class Body>
void parallel_for(const Context& ctx, int64_t n, Body&& body) {
  if (ctx.planning) return;
  static LoopCost cost;  // one per call site, since each body's type is unique
  const auto piece = [](const void* of, int64_t begin, int64_t end) {
    const auto& run = *static_cast<const std::remove_cvref_t<Body>*>(of);
    for (int64_t i = begin; i < end; ++i) run(i);
  };
  run_loop(n, ctx.threads, cost, piece, &body);
}

// Prefetches a row that a later iteration reads. For rows a kilobyte or more apart (one head's rows for successive
// tokens), which hardware prefetchers do not load ahead.
inline constexpr int64_t kPrefetchTokens = 4;  // prefetch distance in tokens
template <class T>
inline void prefetch_row(const T* row, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(row + i);
}

// The sum of a[i] * b[i] over i in [0, n), in the accumulator type A, in 16 independent partial sums and a fixed order.
template <class A, class TA, class TB>
inline A dot(const TA* a, const TB* b, int64_t n) {
  constexpr int kLanes = 16;
  A lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) lanes[j] += static_cast<A>(a[i + j]) * static_cast<A>(b[i + j]);
  A rest = 0;
  for (; i < n; ++i) rest += static_cast<A>(a[i]) * static_cast<A>(b[i]);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0] + rest;
}

// y[i] += s * x[i] for i in [0, n).
template <class A, class TX>
inline void axpy(A* y, A s, const TX* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += s * static_cast<A>(x[i]);
}

}  // namespace triad
