// NSA's selection on the GPU: checks the GPU kernels' limits, chooses one (choose.h) and queues it.
#include "kernels/nsa/select.h"

#include "kernels/common/launch.cuh"
#include "kernels/nsa/dispatch/choose.h"
#include "kernels/nsa/gpu/select.h"
#include "kernels/nsa/sm90/launch_select.h"

namespace triad::cuda {

void nsa_select(Context& ctx, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
                const SelectOptions& o, const Documents& documents) {
  for (int64_t length : {q.size(1), o.l, o.d, o.l_sel})
    TRIAD_CHECK(length < kMaxSelectLength, "nsa_select: a length of {} is past the {} that the GPU counts to", length,
                kMaxSelectLength);
  TRIAD_CHECK(o.l % o.d == 0 && o.l_sel % o.d == 0, "nsa_select: d {} does not divide l {} and l_sel {}", o.d, o.l,
              o.l_sel);
  const Select kernel = choose_select(ctx, q, k_cmp, o, documents);
  record_route(ctx, "nsa_select", q.dtype, fused_name(kernel), "a shape that the fused selection lacks");
  switch (kernel) {
    case Select::sm90:
      return select_sm90(ctx, block_index, q, k_cmp, lse_cmp, o, documents);
    case Select::portable:
      return select_portable(ctx, block_index, q, k_cmp, lse_cmp, o, documents);
  }
}

}  // namespace triad::cuda
