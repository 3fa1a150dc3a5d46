// The rounding unit of dq on the GPU (contract: nsa/attend.h). It is computed if choose_rounding_unit returns true;
// otherwise attend_key_norms does nothing and attend_rounding_unit returns an absent tensor.
#include "kernels/nsa/dispatch/choose.h"
#include "kernels/nsa/sm90/launch_backward.h"

namespace triad::cuda {

void attend_key_norms(Context& ctx, Tensor norms, const Tensor& dq, ConstTensor dout, ConstTensor q,
                      const std::vector<RoundingUnitBranch>& branches, const Documents& documents) {
  if (choose_rounding_unit(ctx, dq, dout, q, branches))
    key_norms_sm90(ctx, norms, q.size(1), q.size(3), branches, documents);
}

Tensor attend_rounding_unit(Context& ctx, Scratch::Scope& scope, const Tensor& dq, ConstTensor dout, ConstTensor q,
                            const std::vector<RoundingUnitBranch>& branches, ConstTensor dout_norm,
                            ConstTensor key_norms, const Documents& documents) {
  if (!choose_rounding_unit(ctx, dq, dout, q, branches)) return {};
  return rounding_unit_sm90(ctx, scope, dout, q, branches, dout_norm, key_norms, documents);
}

}  // namespace triad::cuda
