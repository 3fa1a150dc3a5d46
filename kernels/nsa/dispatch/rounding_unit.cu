// The rounding unit of dq on the GPU, where choose_rounding_unit has one.
#include "kernels/nsa/dispatch/choose.h"
#include "kernels/nsa/sm90/launch_backward.h"

namespace triad::cuda {

void attend_key_norms(Context& ctx, Tensor norms, const Tensor& dq, ConstTensor dout, ConstTensor q,
                      const std::vector<RoundingUnitBranch>& branches) {
  if (choose_rounding_unit(ctx, dq, dout, q, branches)) key_norms_sm90(ctx, norms, q.size(3), branches);
}

Tensor attend_rounding_unit(Context& ctx, Scratch::Scope& scope, const Tensor& dq, ConstTensor dout, ConstTensor q,
                            const std::vector<RoundingUnitBranch>& branches, ConstTensor dout_norm,
                            ConstTensor key_norms) {
  if (!choose_rounding_unit(ctx, dq, dout, q, branches)) return {};
  return rounding_unit_sm90(ctx, scope, dout, q, branches, dout_norm, key_norms);
}

}  // namespace triad::cuda
