// dq's rounding unit on the GPU (contract: nsa/attend.h). It is computed if choose_rounding_unit returns true;
// otherwise attend_key_norms does nothing and attend_rounding_unit returns an absent tensor.
#include "kernels/nsa/dispatch/choose.h"
#include "kernels/nsa/gpu/rounding_unit.h"

namespace triad::cuda {

void attend_key_norms(Context& ctx, Tensor norms, const Tensor& dq, ConstTensor dout, ConstTensor q,
                      const std::vector<RoundingUnitBranch>& branches, const Documents& documents) {
  if (choose_rounding_unit(dq, dout, q, branches))
    compute_key_norms(ctx, norms, q.size(1), q.size(3), branches, documents);
}

Tensor attend_rounding_unit(Context& ctx, Scratch::Scope& scope, const Tensor& dq, ConstTensor dout, ConstTensor q,
                            const std::vector<RoundingUnitBranch>& branches, ConstTensor dout_norm,
                            ConstTensor key_norms, const Documents& documents) {
  if (!choose_rounding_unit(dq, dout, q, branches)) return {};
  return compute_rounding_unit(ctx, scope, dout, q, branches, dout_norm, key_norms, documents);
}

}  // namespace triad::cuda
