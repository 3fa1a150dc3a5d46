// What the three attention branches share: shapes, the softmax they compute and how its gradient is asked for.
//   p[s] = exp(q.k_s / sqrt(dk) - lse),  o = sum_s p[s] v_s,  over the keys s that the branch shows to row (t, h);
//   lse = log sum_s exp(q.k_s / sqrt(dk)).  No key: o = 0, lse = -inf.
// Head h reads group h / G, G = Hq / Hkv. Every row and head axis may be strided; the innermost axis is contiguous.
#pragma once
#include <vector>

#include "engine/context.h"

namespace triad {

struct AttendIn {
  ConstTensor q;     // [B,T,Hq,dk] T
  ConstTensor k, v;  // [B,S,Hkv,dk], [B,S,Hkv,dv] T; S = T, or Tc for the compressed branch
};
struct AttendOut {
  Tensor o;    // [B,T,Hq,dv] T, overwritten
  Tensor lse;  // [B,T,Hq] acc, overwritten
};
// The upstream gradient of this branch's o is gate[b,t,g] * dout[b,t,h]: dout is shared by the branches.
struct AttendGradIn {
  ConstTensor dout;   // [B,T,Hq,dv] T
  ConstTensor gate;   // [B,T,Hkv] acc; absent: 1
  ConstTensor delta;  // [B,T,Hq] acc: gate * sum_j dout[j] o[j]  (nsa/gate.h computes it)
  ConstTensor lse;    // [B,T,Hq] acc, from forward
  // [B,T,Hq] acc from attend_rounding_unit, which allows adding to dq in any order; absent: dq may hold anything.
  ConstTensor rounding_unit = {};
};
struct AttendGradOut {
  Tensor dq;      // [B,T,Hq,dk] acc, added to: the branches share it
  Tensor dk, dv;  // as k and v, overwritten; T, or acc (the compressed branch hands them on to phi's backward)
};
// With ds[s] = p[s] * (gate * dout.v_s - delta):
//   dq += sum_s ds[s] k_s / sqrt(dk);  dk_s = sum_(t,h) ds[s] q / sqrt(dk);  dv_s = sum_(t,h) p[s] * gate * dout

// What one of the branches that share dq adds to it depends on.
struct RoundingUnitBranch {
  ConstTensor k, v, gate, delta;
};
// On GPUs whose kernels add to dq from many CTAs at once: for each row a quantum so large that sums of its multiples up
// to what the branches can add are exact in fp32, whatever their order (nsa/sm90/backward_d64.cu). dq has to be zero
// before the branches, and what else is added to it comes after them. Elsewhere an absent tensor.
// dout_norm [B,T,Hq] acc: |dout|, as nsa_combine_backward gives it; absent: one more pass over dout. key_norms: as
// attend_key_norms gave it; absent: it is called here.
Tensor attend_rounding_unit(Context&, Scratch::Scope&, const Tensor& dq, ConstTensor dout, ConstTensor q,
                            const std::vector<RoundingUnitBranch>& branches, ConstTensor dout_norm = {},
                            ConstTensor key_norms = {});
// norms, of key_norms_shape, acc: of the keys and values alone (dout and the branches' deltas need not be there yet).
// Nothing where there is no quantum.
inline constexpr int64_t kKeyNormsChunk = 256;  // keys
Shape key_norms_shape(const std::vector<RoundingUnitBranch>& branches);
void attend_key_norms(Context&, Tensor norms, const Tensor& dq, ConstTensor dout, ConstTensor q,
                      const std::vector<RoundingUnitBranch>& branches);

// Throws, naming `op`, unless the shapes and dtypes fit together.
void check_attend(const char* op, const AttendIn&, const AttendOut&);
void check_attend_grad(const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&);

namespace cuda {
Tensor attend_rounding_unit(Context&, Scratch::Scope&, const Tensor& dq, ConstTensor dout, ConstTensor q,
                            const std::vector<RoundingUnitBranch>& branches, ConstTensor dout_norm,
                            ConstTensor key_norms);
void attend_key_norms(Context&, Tensor norms, const Tensor& dq, ConstTensor dout, ConstTensor q,
                      const std::vector<RoundingUnitBranch>& branches);
}  // namespace cuda
}  // namespace triad
