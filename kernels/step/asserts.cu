// Tensor checks on the GPU. Each element is read once, floats 16 bytes at a time. A thread writes only if it finds a
// violation, by an integer atomic minimum, whose result does not depend on thread order.
#include "kernels/step/asserts.h"

#include <algorithm>

#include "kernels/common/bthd.cuh"
#include "kernels/common/documents.cuh"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kCtasPerSm = 8;

__device__ void lower(int64_t* first, int64_t key) {
  atomicMin(reinterpret_cast<long long*>(first), static_cast<long long>(key));
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    assert_finite_kernel(int64_t* first, int64_t check, const T* __restrict__ x, int64_t n) {
  const int64_t step = int64_t{gridDim.x} * kThreads * V;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * V; i < n; i += step) {
    float values[V];
    if (i + V <= n) {
      load_vector<V>(values, x + i);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) values[j] = i + j < n ? to_float(x[i + j]) : 0.0f;
    }
    float sum = 0;  // stays 0 unless a value is NaN or infinite, since x * 0 is then NaN
#pragma unroll
    for (int j = 0; j < V; ++j) sum += values[j] * 0.0f;
    if (sum == 0.0f) continue;
    for (int j = 0; j < V; ++j)
      if (!isfinite(values[j])) {
        const auto what = isnan(values[j])   ? Violation::nan
                          : values[j] > 0.0f ? Violation::plus_infinity
                                             : Violation::minus_infinity;
        return lower(first, Violation::key(check, i + j, what));
      }
  }
}

__global__ void __launch_bounds__(kThreads)
    assert_lists_kernel(int64_t* first, int64_t check, const int32_t* __restrict__ entries, int64_t count,
                        int64_t tokens, RowPart part, int groups, int n, int l_sel, DocumentView documents) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t block = entries[i], t = part.token(i / (int64_t{n} * groups) % tokens);
  const bool leads = i % n == 0;
  const int64_t before = leads ? -1 : entries[i - 1];
  const DocumentRow<int> row = documents.row(static_cast<int>(i / (int64_t{n} * groups) / tokens));
  const int at = static_cast<int>(t), document_tokens = row.end(at) - row.begin(at), first_block = row.first_block(at);
  if (block < -1 || block >= first_block + ceil_div(document_tokens, l_sel) || (block >= 0 && block < first_block))
    return lower(first, Violation::key(check, i, Violation::out_of_range));
  if (block < 0) return;
  if ((!leads && before < 0) || block <= before)
    return lower(first, Violation::key(check, i, Violation::not_ascending));
  if (block > row.block_of(at, l_sel)) lower(first, Violation::key(check, i, Violation::future));
}

__global__ void __launch_bounds__(kThreads)
    assert_range_kernel(int64_t* first, int64_t check, int32_t* ids, int64_t n, int64_t least, int64_t end) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n || (least <= ids[i] && ids[i] < end)) return;
  lower(first, Violation::key(check, i, Violation::out_of_range));
  ids[i] = static_cast<int32_t>(least);
}

}  // namespace

void assert_finite(Context& ctx, Tensor first, int64_t check, ConstTensor x) {
  dispatch_gpu_float(x.dtype, [&]<class T>() {
    dispatch_vector<T>(is_aligned(x), [&]<int V>() {
      const int64_t ctas = std::min(ceil_div(x.numel(), kThreads * V), int64_t{kCtasPerSm} * ctx.num_sms);
      launch(ctx, "assert_finite", assert_finite_kernel<T, V>, dim3(ctas), dim3(kThreads), 0, first.ptr<int64_t>(),
             check, x.ptr<T>(), x.numel());
    });
  });
}

void assert_lists(Context& ctx, Tensor first, int64_t check, ConstTensor lists, int64_t l_sel,
                  const Documents& documents) {
  const int64_t T = lists.size(1), tokens = documents.part.tokens_or(T);
  launch(ctx, "assert_lists", assert_lists_kernel, dim3(ceil_div(lists.numel(), kThreads)), dim3(kThreads), 0,
         first.ptr<int64_t>(), check, lists.ptr<int32_t>(), lists.numel(), T, documents.part,
         static_cast<int>(lists.size(2)), static_cast<int>(lists.size(3)), static_cast<int>(std::min(l_sel, tokens)),
         document_view(documents, tokens));
}

void assert_range(Context& ctx, Tensor first, int64_t check, Tensor ids, int64_t least, int64_t end) {
  launch(ctx, "assert_range", assert_range_kernel, dim3(ceil_div(ids.numel(), kThreads)), dim3(kThreads), 0,
         first.ptr<int64_t>(), check, ids.ptr<int32_t>(), ids.numel(), least, end);
}

}  // namespace triad::cuda
