// Copies and sums of strided tensors on the GPU. Bound by memory. A thread moves 16 bytes of the narrower dtype, or one
// element if an address or a stride is no multiple of that; consecutive threads have consecutive places of a row.
#include "kernels/common/bthd.cuh"
#include "kernels/step/rows.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;

// A tensor of rank 4: [size0, size1, size2, width].
struct Strided {
  int64_t size1, size2, width, stride0, stride1, stride2;
  // The offset of element `column` of row i.
  __device__ int64_t at(int64_t i, int64_t column) const {
    return i / size2 / size1 * stride0 + i / size2 % size1 * stride1 + i % size2 * stride2 + column;
  }
};
Strided strided(const ConstTensor& t) {
  if (t.rank == 2) return {1, t.size(0), t.size(1), 0, 0, t.stride[0]};
  if (t.rank == 3) return {t.size(0), t.size(1), t.size(2), 0, t.stride[0], t.stride[1]};
  return {t.size(1), t.size(2), t.size(3), t.stride[0], t.stride[1], t.stride[2]};
}

template <class Y, class X, int V, bool kAdd>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(Y* __restrict__ y, const Strided to, const X* __restrict__ x, const Strided from, int64_t vectors) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= vectors) return;
  const int64_t per_row = to.width / V, row = i / per_row, column = i % per_row * V;
  Y* const out = y + to.at(row, column);
  float value[V], before[V];
  load_vector<V>(value, x + from.at(row, column));
  if constexpr (kAdd) {
    load_vector<V>(before, out);
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] += before[j];
  }
  store_vector<V>(out, value);
}

template <bool kAdd>
void run(Context& ctx, const char* op, const Tensor& y, const ConstTensor& x) {
  dispatch_gpu_float(y.dtype, [&]<class Y>() {
    dispatch_gpu_float(x.dtype, [&]<class X>() {
      using Narrow = std::conditional_t<sizeof(Y) < sizeof(X), Y, X>;
      const bool vectors = all_have_vectors(kVector<Narrow>, ConstTensor(y), x);
      dispatch_vector<Narrow>(vectors, [&]<int V>() {
        const int64_t n = y.numel() / V;
        launch(ctx, op, rows_kernel<Y, X, V, kAdd>, dim3(ceil_div(n, kThreads)), dim3(kThreads), 0, y.ptr<Y>(),
               strided(y), x.ptr<X>(), strided(x), n);
      });
    });
  });
}

}  // namespace

void copy_rows(Context& ctx, Tensor y, ConstTensor x) { run<false>(ctx, "copy_rows", y, x); }
void add_rows(Context& ctx, Tensor y, ConstTensor x) { run<true>(ctx, "add_rows", y, x); }

}  // namespace triad::cuda
