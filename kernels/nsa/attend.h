// The contract of NSA's three attention branches and of dense attention: shapes, softmax, gradient. For row (t, h),
// that is token t and query head h, over the keys s that token t sees:
//   lse = log sum_s exp(q.k_s / sqrt(dk)),  p[s] = exp(q.k_s / sqrt(dk) - lse),  o = sum_s p[s] v_s
// A row without keys gives o = 0 and lse = -inf. Head h reads the keys of group h / G, G = Hq / Hkv. All axes but the
// innermost may be strided.
#pragma once
#include <vector>

#include "engine/context.h"
#include "kernels/common/documents.h"

namespace triad {

struct AttendIn {
  ConstTensor q;             // [B,T,Hq,dk] T
  ConstTensor k, v;          // [B,S,Hkv,dk], [B,S,Hkv,dv] T; S = T, or Tc for the compressed branch
  Documents documents = {};  // tables of packed rows (common/documents.h): a token sees only keys of its document
  // With documents.part, T is the number of queries, and S covers at least every key that they see.
};
struct AttendOut {
  Tensor o;    // [B,T,Hq,dv] T, overwritten
  Tensor lse;  // [B,T,Hq] acc, overwritten
};
// Inputs of backward, apart from those of forward. dout is the gradient of the gated sum of the branches, so that the
// gradient of one branch's o is gate[b,t,g] * dout[b,t,h].
struct AttendGradIn {
  ConstTensor dout;   // [B,T,Hq,dv] T
  ConstTensor gate;   // [B,T,Hkv] acc, >= 0 in bf16; absent: 1
  ConstTensor delta;  // [B,T,Hq] acc: D = gate * rowsum(dout o), from nsa_combine_backward (nsa/gate.h)
  ConstTensor lse;    // [B,T,Hq] acc, from forward
  // [B,T,Hq] acc, from attend_rounding_unit. If present, several CTAs may add to a row of dq, in any order, and dq must
  // be zero before the first branch. If absent, a branch adds to each row of dq once, and dq need not be zero before.
  ConstTensor rounding_unit = {};
};
struct AttendGradOut {
  Tensor dq;      // [B,T,Hq,dk] acc, added to; shared by the branches
  Tensor dk, dv;  // shapes of k and v, overwritten; T, or acc (the compressed branch: phi's backward reads acc)
};
// With ds[s] = p[s] * (gate * dout.v_s - delta):
//   dq += sum_s ds[s] k_s / sqrt(dk);  dk_s = sum_(t,h) ds[s] q / sqrt(dk);  dv_s = sum_(t,h) p[s] * gate * dout

// The inputs of one branch from which attend_rounding_unit bounds the terms that the branch adds to dq.
struct RoundingUnitBranch {
  ConstTensor k, v, gate, delta;
  int64_t d = 1;  // tokens from one key to the next: the stride of compressed keys
};
// Returns a rounding unit for each row of dq, [B,T,Hq] acc, if the backward kernels add to dq from several CTAs with
// atomics (nsa/gpu/rounding_unit.cu); otherwise an absent tensor. The kernels round every term to a multiple of the
// unit, a power of two so large that every partial sum of the row fits the 24 bits of an fp32 mantissa. All additions
// are then exact, and the bits of dq do not depend on their order. dq must be zero before the first branch's backward,
// and other terms may be added only after the last one's.
//   dout_norm [B,T,Hq] acc: |dout| from nsa_combine_backward; if absent, one more pass over dout computes it
//   key_norms: from attend_key_norms; if absent, computed here
//   documents: tables of packed rows; the unit of a row then depends only on the keys of its document
Tensor attend_rounding_unit(Context&, Scratch::Scope&, const Tensor& dq, ConstTensor dout, ConstTensor q,
                            const std::vector<RoundingUnitBranch>& branches, ConstTensor dout_norm = {},
                            ConstTensor key_norms = {}, const Documents& documents = {});
// Computes the part of the rounding unit that depends on keys and values alone, and can therefore run before dout and
// delta are computed: norms [key_norms_shape] acc, overwritten with bounds on each chunk of kKeyNormsChunk keys and
// values; of packed rows, on the keys and values of each document, at the id of its first selection block. Does nothing
// if attend_rounding_unit would return an absent tensor.
inline constexpr int64_t kKeyNormsChunk = 256;  // keys per chunk
Shape key_norms_shape(const std::vector<RoundingUnitBranch>& branches, const Documents& documents = {});
void attend_key_norms(Context&, Tensor norms, const Tensor& dq, ConstTensor dout, ConstTensor q,
                      const std::vector<RoundingUnitBranch>& branches, const Documents& documents = {});

// Throws an Error that names `op` unless shapes and dtypes are consistent.
void check_attend(const char* op, const AttendIn&, const AttendOut&);
// Throws an Error that names `op` unless k holds the tokens [first, T') of the row or more, where T' is the end of the
// queries. Without documents.part, k has to hold exactly the tokens of q.
void check_keys_held(const char* op, const AttendIn&, int64_t first);
void check_attend_grad(const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&);

namespace cuda {
Tensor attend_rounding_unit(Context&, Scratch::Scope&, const Tensor& dq, ConstTensor dout, ConstTensor q,
                            const std::vector<RoundingUnitBranch>& branches, ConstTensor dout_norm,
                            ConstTensor key_norms, const Documents& documents);
void attend_key_norms(Context&, Tensor norms, const Tensor& dq, ConstTensor dout, ConstTensor q,
                      const std::vector<RoundingUnitBranch>& branches, const Documents& documents);
}  // namespace cuda
}  // namespace triad
