// What selection lists hold of dense attention, in sampled rows (nsa/list_recall.h). A CTA computes one row of q: its
// largest logit first; then, by distance classes, the sums of exp(logit - largest) over all keys and over those in
// listed blocks. A thread has every 256th key of a class and reads it whole: simple rather than fast, for few rows per
// evaluation. All sums have a fixed order.
#include <cmath>

#include "kernels/common/bthd.cuh"
#include "kernels/common/documents.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/nsa/list_recall.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class T>
struct ListRecallArgs {
  Bthd<const T> q, k;
  const int32_t *rows, *lists;
  int tokens, heads, groups, dk, l_sel, n;
  float scale;
  DocumentView documents;
  float *mass, *max_logit;
};

// The warps' values, combined in a fixed order, in every thread.
template <class Combine>
__device__ float over_warps(float warp_value, Combine combine) {
  __shared__ float values[kWarps];
  __syncthreads();  // all threads have read the last call's values
  if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = warp_value;
  __syncthreads();
  float all = values[0];
  for (int i = 1; i < kWarps; ++i) all = combine(all, values[i]);
  return all;
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads) nsa_list_recall_kernel(const __grid_constant__ ListRecallArgs<T> a) {
  __shared__ float mass[2][kDistanceClasses];
  float* const q = reinterpret_cast<float*>(dynamic_shared());  // [dk]
  const int64_t row = a.rows[blockIdx.x / a.heads];
  const int b = static_cast<int>(row / a.tokens), t = static_cast<int>(row % a.tokens);
  const int h = static_cast<int>(blockIdx.x % a.heads), g = h / (a.heads / a.groups);
  for (int i = threadIdx.x; i < a.dk; i += kThreads) q[i] = to_float(a.q.row(b, t, h)[i]);
  __syncthreads();
  const auto logit = [&](int64_t key) {
    const T* const k = a.k.row(b, key, g);
    float s = 0.0f;
    for (int i = 0; i < a.dk; i += V) {
      float x[V];
      load_vector<V>(x, k + i);
#pragma unroll
      for (int j = 0; j < V; ++j) s = fmaf(q[i + j], x[j], s);
    }
    return s * a.scale;
  };
  const DocumentRow<int> document = a.documents.row(b);
  const int32_t* const list = a.lists + (row * a.groups + g) * a.n;
  const int keys = t - document.begin(t) + 1;
  float most = -INFINITY, sum = 0.0f;
  for (int distance = threadIdx.x; distance < keys; distance += kThreads) most = fmaxf(most, logit(t - distance));
  most = over_warps(warp_max(most), [](float x, float y) { return fmaxf(x, y); });
  const auto add = [](float x, float y) { return x + y; };
  for (int c = 0; c < kDistanceClasses; ++c) {
    const int64_t end = min(distance_begin(c + 1), int64_t{keys});
    float all = 0.0f, listed = 0.0f;
    for (int64_t distance = distance_begin(c) + threadIdx.x; distance < end; distance += kThreads) {
      const int key = t - static_cast<int>(distance);
      const float e = expf(logit(key) - most);
      all += e;
      if (lists_block(list, a.n, document.block_of(key, a.l_sel))) listed += e;
    }
    all = over_warps(warp_sum(all), add), listed = over_warps(warp_sum(listed), add);
    if (threadIdx.x == 0) mass[0][c] = all, mass[1][c] = listed;
    sum += all;
  }
  __syncthreads();
  if (threadIdx.x < 2 * kDistanceClasses)
    a.mass[int64_t{blockIdx.x} * 2 * kDistanceClasses + threadIdx.x] = (&mass[0][0])[threadIdx.x] / sum;
  if (threadIdx.x == 0) a.max_logit[blockIdx.x] = most;
}

}  // namespace

void nsa_list_recall(Context& ctx, const ListRecall& out, ConstTensor rows, ConstTensor q, ConstTensor k,
                     ConstTensor block_index, int64_t l_sel, const Documents& documents) {
  const auto integer = [](int64_t x) { return static_cast<int>(x); };
  dispatch_gpu_float(q.dtype, [&]<class T>() {
    const ListRecallArgs<T> a{.q = bthd<T>(q),
                              .k = bthd<T>(k),
                              .rows = rows.ptr<int32_t>(),
                              .lists = block_index.ptr<int32_t>(),
                              .tokens = integer(q.size(1)),
                              .heads = integer(q.size(2)),
                              .groups = integer(k.size(2)),
                              .dk = integer(q.size(3)),
                              .l_sel = integer(l_sel),
                              .n = integer(block_index.size(3)),
                              .scale = 1.0f / std::sqrt(static_cast<float>(q.size(3))),
                              .documents = document_view(documents, q.size(1)),
                              .mass = out.mass.ptr<float>(),
                              .max_logit = out.max_logit.ptr<float>()};
    dispatch_vector<T>(has_vectors(k, kVector<T>), [&]<int V>() {
      launch(ctx, "nsa_list_recall", nsa_list_recall_kernel<T, V>, dim3(rows.size(0) * a.heads), dim3(kThreads),
             a.dk * sizeof(float), a);
    });
  });
}

}  // namespace triad::cuda
