// The contract of the three attention branches: shapes, softmax, gradient. For row (t, h), over the keys s that token t
// sees in this branch:
//   lse = log sum_s exp(q.k_s / sqrt(dk)),  p[s] = exp(q.k_s / sqrt(dk) - lse),  o = sum_s p[s] v_s
// A row without keys gives o = 0 and lse = -inf. Head h reads the keys of group h / G, G = Hq / Hkv. All axes but the
// innermost may be strided.
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
// The gradient of this branch's o is gate[b,t,g] * dout[b,t,h]; the three branches share dout.
struct AttendGradIn {
  ConstTensor dout;   // [B,T,Hq,dv] T
  ConstTensor gate;   // [B,T,Hkv] acc; absent: 1
  ConstTensor delta;  // [B,T,Hq] acc: D = gate * rowsum(dout o), from nsa_combine_backward (nsa/gate.h)
  ConstTensor lse;    // [B,T,Hq] acc, from forward
  // [B,T,Hq] acc from attend_rounding_unit: the kernel may add to dq in any order. Absent: dq may hold any values, and
  // the kernel adds to each row of dq once.
  ConstTensor rounding_unit = {};
};
struct AttendGradOut {
  Tensor dq;      // [B,T,Hq,dk] acc, added to; shared by the branches
  Tensor dk, dv;  // shapes of k and v, overwritten; T, or acc (the compressed branch: phi's backward reads acc)
};
// With ds[s] = p[s] * (gate * dout.v_s - delta):
//   dq += sum_s ds[s] k_s / sqrt(dk);  dk_s = sum_(t,h) ds[s] q / sqrt(dk);  dv_s = sum_(t,h) p[s] * gate * dout

// The inputs that bound the terms which one branch adds to dq.
struct RoundingUnitBranch {
  ConstTensor k, v, gate, delta;
};
// Returns a rounding unit for each row of dq, [B,T,Hq] acc, where the backward kernels add to dq from several CTAs with
// atomics (nsa/sm90/rounding_unit.cu); elsewhere an absent tensor. The kernels round every term to a multiple of the
// unit, a power of two so large that every partial sum of the row fits the 24 bits of an fp32 mantissa. All additions
// are then exact, and the bits of dq do not depend on their order. dq must be zero before the first branch, and other
// terms may be added only after the last one.
//   dout_norm [B,T,Hq] acc: |dout| from nsa_combine_backward; if absent, one more pass over dout computes it
//   key_norms: from attend_key_norms; if absent, computed here
Tensor attend_rounding_unit(Context&, Scratch::Scope&, const Tensor& dq, ConstTensor dout, ConstTensor q,
                            const std::vector<RoundingUnitBranch>& branches, ConstTensor dout_norm = {},
                            ConstTensor key_norms = {});
// Fills norms (key_norms_shape, acc) with bounds on the keys and values, which do not depend on dout and delta, so that
// it can run before they are computed. Does nothing where attend_rounding_unit returns an absent tensor.
inline constexpr int64_t kKeyNormsChunk = 256;  // keys
Shape key_norms_shape(const std::vector<RoundingUnitBranch>& branches);
void attend_key_norms(Context&, Tensor norms, const Tensor& dq, ConstTensor dout, ConstTensor q,
                      const std::vector<RoundingUnitBranch>& branches);

// Throws an Error that names `op` unless shapes and dtypes are consistent.
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
