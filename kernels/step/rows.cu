// Copies and adds strided tensors on the GPU. Bound by memory. A thread moves 16 bytes in the narrower dtype, or one
// element if an address or a stride is no multiple of that; consecutive threads have consecutive places in a row. One
// launch moves up to kPairs tensors, since many are so small that a launch takes longer than the copy.
#include <algorithm>

#include "kernels/common/bthd.cuh"
#include "kernels/step/rows.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;

// A rank-4 tensor: [size0, size1, size2, width].
struct Strided {
  int64_t size1, size2, width, stride0, stride1, stride2;
  // The offset of element `column` in row i.
  __device__ int64_t at(int64_t i, int64_t column) const {
    return i / size2 / size1 * stride0 + i / size2 % size1 * stride1 + i % size2 * stride2 + column;
  }
};
Strided strided(const ConstTensor& t) {
  if (t.rank == 2) return {1, t.size(0), t.size(1), 0, 0, t.stride[0]};
  if (t.rank == 3) return {t.size(0), t.size(1), t.size(2), 0, t.stride[0], t.stride[1]};
  return {t.size(1), t.size(2), t.size(3), t.stride[0], t.stride[1], t.stride[2]};
}

// One launch's pairs, as kernel arguments. A CTA works on one.
constexpr int kPairs = 16;
template <class Y, class X>
struct Pairs {
  struct {
    Y* y;
    const X* x;
    Strided to, from;
    int64_t vectors;
    int first_cta;
  } of[kPairs];
  int count, ctas;
};

template <class Y, class X, int V, bool kAdd>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ Pairs<Y, X> pairs) {
  int which = 0;
  while (which + 1 < pairs.count && static_cast<int>(blockIdx.x) >= pairs.of[which + 1].first_cta) ++which;
  const auto& pair = pairs.of[which];
  const int64_t i = int64_t{static_cast<int>(blockIdx.x) - pair.first_cta} * kThreads + threadIdx.x;
  if (i >= pair.vectors) return;
  const int64_t per_row = pair.to.width / V, row = i / per_row, column = i % per_row * V;
  Y* const out = pair.y + pair.to.at(row, column);
  float value[V], before[V];
  load_vector<V>(value, pair.x + pair.from.at(row, column));
  if constexpr (kAdd) {
    load_vector<V>(before, out);
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] += before[j];
  }
  store_vector<V>(out, value);
}

template <bool kAdd>
void run(Context& ctx, const char* op, std::span<const RowPair> all) {
  if (all.empty()) return;
  dispatch_gpu_float(all[0].y.dtype, [&]<class Y>() {
    dispatch_gpu_float(all[0].x.dtype, [&]<class X>() {
      using Narrow = std::conditional_t<sizeof(Y) < sizeof(X), Y, X>;
      const bool vectors = std::all_of(all.begin(), all.end(), [](const RowPair& p) {
        return p.y.numel() == 0 || all_have_vectors(kVector<Narrow>, ConstTensor(p.y), p.x);
      });
      dispatch_vector<Narrow>(vectors, [&]<int V>() {
        Pairs<Y, X> pairs{};
        const auto flush = [&] {
          if (pairs.ctas > 0) launch(ctx, op, rows_kernel<Y, X, V, kAdd>, dim3(pairs.ctas), dim3(kThreads), 0, pairs);
          pairs = {};
        };
        for (const auto& [y, x] : all) {
          if (y.numel() == 0) continue;
          if (pairs.count == kPairs) flush();
          const int64_t n = y.numel() / V;
          pairs.of[pairs.count++] = {y.ptr<Y>(), x.ptr<X>(), strided(y), strided(x), n, pairs.ctas};
          pairs.ctas += static_cast<int>(ceil_div(n, int64_t{kThreads}));
        }
        flush();
      });
    });
  });
}

}  // namespace

void copy_rows(Context& ctx, std::span<const RowPair> pairs) { run<false>(ctx, "copy_rows", pairs); }
void add_rows(Context& ctx, std::span<const RowPair> pairs) { run<true>(ctx, "add_rows", pairs); }

}  // namespace triad::cuda
