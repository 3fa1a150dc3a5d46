// The contract of NSA's three attention branches and dense attention: shapes, softmax, gradient. For row (t, h), that
// is token t and query head h, over the keys s that token t sees:
//   lse = log sum_s exp(q.k_s / sqrt(dk)),  p[s] = exp(q.k_s / sqrt(dk) - lse),  o = sum_s p[s] v_s
// A row without keys gives o = 0 and lse = -inf. Head h reads group h / G's keys, G = Hq / Hkv. All axes but the
// innermost may be strided.
#pragma once
#include <vector>

#include "engine/context.h"
#include "kernels/common/documents.h"

namespace triad {

struct AttendIn {
  ConstTensor q;             // [B,T,Hq,dk] T
  ConstTensor k, v;          // [B,S,Hkv,dk], [B,S,Hkv,dv] T; S = T, or Tc for the compressed branch
  Documents documents = {};  // packed rows' tables (common/documents.h): a token sees only its own document's keys
  // With documents.part (queries that are a part of a row), T counts the queries, and S covers at least every key that
  // they see.
};
struct AttendOut {
  Tensor o;    // [B,T,Hq,dv] T, overwritten
  Tensor lse;  // [B,T,Hq] acc, overwritten
};
// Backward's inputs besides forward's. dout is the gradient of the gated sum, so branch o's gradient is gate[b,t,g] *
// dout[b,t,h].
struct AttendGradIn {
  ConstTensor dout;   // [B,T,Hq,dv] T
  ConstTensor gate;   // [B,T,Hkv] acc, >= 0 in bf16; absent: 1
  ConstTensor delta;  // [B,T,Hq] acc: D = gate * rowsum(dout o), from nsa_combine_backward (nsa/gate.h)
  ConstTensor lse;    // [B,T,Hq] acc, from forward
  // [B,T,Hq] acc, from attend_rounding_unit. If present, several CTAs may add to a dq row, in any order, and dq must be
  // zero before the first branch. If absent, a branch adds to each dq row once, and dq need not be zero before.
  ConstTensor rounding_unit = {};
  // delta has lse's gradient subtracted, so that a row with a single key has a ds, which is otherwise 0 (kernels in f32
  // and f64 do not compute it, since it would be rounding errors).
  bool through_lse = false;
};
struct AttendGradOut {
  Tensor dq;      // [B,T,Hq,dk] acc, added to; shared by the branches
  Tensor dk, dv;  // shaped like k and v, overwritten; T, or acc (the compressed branch: phi's backward reads acc)
};
// With ds[s] = p[s] * (gate * dout.v_s - delta):
//   dq += sum_s ds[s] k_s / sqrt(dk);  dk_s = sum_(t,h) ds[s] q / sqrt(dk);  dv_s = sum_(t,h) p[s] * gate * dout

// One branch's inputs, from which attend_rounding_unit bounds the terms that the branch adds to dq.
struct RoundingUnitBranch {
  ConstTensor k, v, gate, delta;
  int64_t d = 1;  // tokens from one key to the next: the stride of compressed keys
};
// Returns a rounding unit for each dq row, [B,T,Hq] acc, if the backward kernels add to dq from several CTAs with
// atomics (nsa/gpu/rounding_unit.cu); otherwise an absent tensor. The kernels round every term to a multiple of the
// unit, a power of two so large that each of the row's partial sums fits the 24 bits of an fp32 mantissa. All additions
// are then exact, and dq's bits don't depend on their order. dq must be zero before the first branch's backward, and
// other terms may be added only after the last one's.
//   dout_norm [B,T,Hq] acc: |dout| from nsa_combine_backward; if absent, one more pass over dout computes it
//   key_norms: from attend_key_norms; if absent, computed here
//   documents: packed rows' tables; a row's unit then depends only on its document's keys
Tensor attend_rounding_unit(Context&, Scratch::Scope&, const Tensor& dq, ConstTensor dout, ConstTensor q,
                            const std::vector<RoundingUnitBranch>& branches, ConstTensor dout_norm = {},
                            ConstTensor key_norms = {}, const Documents& documents = {});
// Computes what the rounding unit needs from keys and values alone, before dout and delta are known: norms
// [key_norms_shape] acc, overwritten with bounds on each chunk of kKeyNormsChunk keys and values; for packed rows, on
// each document's keys and values, at the id of the document's first selection block. Does nothing if
// attend_rounding_unit would return an absent tensor.
inline constexpr int64_t kKeyNormsChunk = 256;  // keys per chunk
Shape key_norms_shape(const std::vector<RoundingUnitBranch>& branches, const Documents& documents = {});
void attend_key_norms(Context&, Tensor norms, const Tensor& dq, ConstTensor dout, ConstTensor q,
                      const std::vector<RoundingUnitBranch>& branches, const Documents& documents = {});

// Throws an Error that names `op` unless shapes and dtypes are consistent.
void check_attend(const char* op, const AttendIn&, const AttendOut&);
// Throws an Error that names `op` unless k holds at least the row's tokens [first, T'), where T' is the queries' end.
// Without documents.part, k has to hold exactly q's tokens.
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
