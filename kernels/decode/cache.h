// What decoding keeps of a layer's past: for each branch the keys and values that a later token can still attend, and
// the raw rows that the next compressed block is made of. Filled from a forward pass, then one token at a time.
#pragma once
#include "kernels/nsa/nsa.h"

namespace triad {

// Of B sequences with room for S tokens, keys rotated. Dense attention has k_win and v_win alone, with W = S.
struct NsaCache {
  Tensor k_sel, v_sel;  // [B,S,Hkv,dk], [B,S,Hkv,dv] T: token s in row s
  Tensor k_win, v_win;  // [B,W,..], W = min(w, S): a ring, token s in row s % W, the last W of them
  Tensor k_cmp, v_cmp;  // [B,Tc,..]: the complete blocks of up to S tokens
  Tensor k_raw, v_raw;  // [B,l,..]: a ring, token s of the compressed branch's keys and values in row s % l
  bool dense() const { return k_sel.empty(); }
};

// Sequence b gets its first n tokens from a forward pass of one sequence: in [1,>=n,..], rotated, and its k_cmp, v_cmp
// [1,Tc',..] (absent where dense).
void nsa_cache_fill(Context&, const NsaCache&, int64_t b, int64_t n, const NsaIn& in, ConstTensor k_cmp,
                    ConstTensor v_cmp);
// Each sequence b gets the token at position[b]: q is rotated in place, k and v, [B,1,..] of the three branches, are
// rotated likewise and stored, and where a block of l tokens ends here it is compressed.
// q [B,1,Hq,dk] T overwritten  <-  k, v as NsaIn's; position [B] i32 in [0, S); cos, sin [>= S, dk/2] acc
void nsa_cache_append(Context&, const NsaCache&, Tensor q, const NsaIn& rows, ConstTensor position, ConstTensor cos,
                      ConstTensor sin, const NsaWeights&, const NsaConfig&);

namespace cuda {
// The last min(n, R) of the n first rows of `from` [T,H,D], row s to row s % R of `to` [R,H,D].
void cache_rows(Context&, Tensor to, ConstTensor from, int64_t n);
void nsa_cache_append(Context&, const NsaCache&, Tensor q, const NsaIn& rows, ConstTensor position, ConstTensor cos,
                      ConstTensor sin, const NsaWeights&, const NsaConfig&);
}  // namespace cuda
}  // namespace triad
