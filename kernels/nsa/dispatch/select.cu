// NSA's selection on the GPU: checks the GPU kernels' limits, chooses one (choose.h) and queues it.
#include "kernels/nsa/select.h"

#include "kernels/common/launch.cuh"
#include "kernels/nsa/dispatch/choose.h"
#include "kernels/nsa/gpu/select.h"
#include "kernels/nsa/gpu/share_lists.h"
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
  // A fused tile's tokens are in one block, which strided rows seldom are, so that theirs are meant to be portable.
  record_route(ctx, "nsa_select", q.dtype, fused_name(kernel),
               selects_strided_rows(o, documents) ? "" : "a shape that the fused selection lacks");
  const auto select = [&](Tensor lists, ConstTensor q_rows, ConstTensor lse_rows, const SelectOptions& of_rows,
                          const Documents& held) {
    switch (kernel) {
      case Select::sm90:
        return select_sm90(ctx, lists, q_rows, k_cmp, lse_rows, of_rows, held);
      case Select::portable:
        return select_portable(ctx, lists, q_rows, k_cmp, lse_rows, of_rows, held);
    }
  };
  select_shared(ctx, block_index, o, documents, select, q, lse_cmp);
}

}  // namespace triad::cuda
