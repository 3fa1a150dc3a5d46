// Gate and block list statistics on the GPU (nsa/stats.h, config key log.stats). A CTA reads one piece of the rows, a
// row being one token and group; each thread reads every 256th row: three gates, the row's list, and the previous
// token's list. The threads' sums are merged in a fixed order into the CTA's entry of `pieces`, which accumulates over
// a step's micro-steps. Once per step a second kernel merges each layer's pieces.
#include "kernels/common/documents.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/nsa/stats.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
static_assert(kStatsPieces == kThreads);  // nsa_stats_merge_kernel: one thread per piece

// Adds one row's gates to s. Branch b's gate is gate[b * plane].
__device__ void add_gates(NsaStats& s, const float* gate, int64_t plane) {
  float p[3] = {gate[0], gate[plane], gate[2 * plane]}, entropy = 0;
  const float sum = p[0] + p[1] + p[2];
  if (sum == 0) return s.add_dead_gates();
#pragma unroll
  for (float& x : p) {
    x /= sum;
    if (x != 0) entropy -= x * logf(x);
  }
  s.add_gates(p[0], p[1], p[2], entropy);
}

// Merges the statistics of all the CTA's threads into thread 0's, in a fixed order.
__device__ void merge_threads(NsaStats& s) {
  __shared__ NsaStats warps[kWarps];
  for (int o = 16; o > 0; o >>= 1) {
    NsaStats other;
#pragma unroll
    for (int i = 0; i < NsaStats::count; ++i) other.at[i] = __shfl_down_sync(kFullWarp, s.at[i], o);
    s.merge(other);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kWarps; ++i) s.merge(warps[i]);
}

__global__ void __launch_bounds__(kThreads)
    nsa_stats_kernel(NsaStats* pieces, const float* __restrict__ gate, const int32_t* __restrict__ lists, int64_t rows,
                     int64_t tokens, RowPart part, int64_t groups, int64_t n, SelectOptions o, DocumentView documents) {
  NsaStats mine;
  const int64_t end = rows * (blockIdx.x + 1) / gridDim.x;
  for (int64_t r = rows * blockIdx.x / gridDim.x + threadIdx.x; r < end; r += kThreads) {
    const int64_t i = r / groups % tokens, t = part.token(i);
    if (gate == nullptr)
      mine.add_dead_gates();
    else
      add_gates(mine, gate + r, rows);
    const DocumentRow<int> row = documents.row(static_cast<int>(r / groups / tokens));
    const int64_t at = t - row.begin(static_cast<int>(t));
    mine.add_list(lists + r * n, at == 0 || part.begins(i) ? nullptr : lists + (r - groups) * n, at, n, o,
                  row.first_block(static_cast<int>(t)));
  }
  merge_threads(mine);
  if (threadIdx.x != 0) return;
  NsaStats all = pieces[blockIdx.x];
  all.merge(mine);
  pieces[blockIdx.x] = all;
}

__global__ void __launch_bounds__(kThreads) nsa_stats_merge_kernel(NsaStats* out, const NsaStats* __restrict__ pieces) {
  NsaStats mine = pieces[int64_t{blockIdx.x} * kThreads + threadIdx.x];
  merge_threads(mine);
  if (threadIdx.x == 0) out[blockIdx.x] = mine;
}

NsaStats* stats_of(const Tensor& t) { return reinterpret_cast<NsaStats*>(t.ptr<double>()); }

}  // namespace

void nsa_stats(Context& ctx, Tensor pieces, ConstTensor gate, ConstTensor block_index, const SelectOptions& o,
               const Documents& documents) {
  const int64_t T = block_index.size(1), groups = block_index.size(2);
  launch(ctx, "nsa_stats", nsa_stats_kernel, dim3(kStatsPieces), dim3(kThreads), 0, stats_of(pieces),
         gate.empty() ? nullptr : gate.ptr<float>(), block_index.ptr<int32_t>(), block_index.size(0) * T * groups, T,
         documents.part, groups, block_index.size(3), o, document_view(documents, documents.part.tokens_or(T)));
}

void nsa_stats_merge(Context& ctx, Tensor out, ConstTensor pieces) {
  launch(ctx, "nsa_stats_merge", nsa_stats_merge_kernel, dim3(out.size(0)), dim3(kThreads), 0, stats_of(out),
         reinterpret_cast<const NsaStats*>(pieces.ptr<double>()));
}

}  // namespace triad::cuda
