// Copies lists to the tokens that share them (nsa/gpu/share_lists.h), one warp per token.
#include "kernels/nsa/gpu/share_lists.h"

#include "kernels/common/bthd.cuh"
#include "kernels/common/documents.cuh"

namespace triad::cuda {
namespace {

constexpr int kWarps = 8;

__global__ void __launch_bounds__(32 * kWarps)
    share_lists_kernel(Bthd<int32_t> lists, int tokens, int groups, int n, int every, DocumentView documents) {
  const int t = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32, b = blockIdx.y;
  if (t >= tokens) return;
  const int after_first = (t - documents.row(b).begin(t)) % every;
  if (after_first == 0) return;
  for (int g = 0; g < groups; ++g) {
    const int32_t* const from = lists.row(b, t - after_first, g);
    int32_t* const to = lists.row(b, t, g);
    for (int i = threadIdx.x % 32; i < n; i += 32) to[i] = from[i];
  }
}

}  // namespace

void share_lists(Context& ctx, Tensor block_index, int64_t every, const Documents& documents) {
  const int64_t B = block_index.size(0), T = block_index.size(1);
  launch(ctx, "share_lists", share_lists_kernel,
         dim3(static_cast<unsigned>(ceil_div(T, kWarps)), static_cast<unsigned>(B)), dim3(32 * kWarps), 0,
         bthd<int32_t>(block_index), static_cast<int>(T), static_cast<int>(block_index.size(2)),
         static_cast<int>(block_index.size(3)), static_cast<int>(every), document_view(documents, T));
}

}  // namespace triad::cuda
