// The decoding cache of a layer: for each branch the keys and values that later tokens can attend, and the raw rows
// that the next compressed block is made of. Filled from a forward pass, then extended one token at a time.
#pragma once
#include "kernels/nsa/nsa.h"

namespace triad {

// The cache of B sequences of up to S tokens; keys are rotated. Dense attention has only k_win and v_win, with W = S.
struct NsaCache {
  Tensor k_sel, v_sel;  // [B,S,Hkv,dk], [B,S,Hkv,dv] T: token s in row s
  Tensor k_win, v_win;  // [B,W,..], W = min(w, S): a ring of the last W tokens, token s in row s % W
  Tensor k_cmp, v_cmp;  // [B,Tc,..]: the complete compressed blocks of up to S tokens
  Tensor k_raw, v_raw;  // [B,l,..]: a ring of the compressed branch's raw keys and values, token s in row s % l
  bool dense() const { return k_sel.empty(); }
};

// Fills sequence b with its first n tokens from a forward pass of one sequence: in [1,>=n,..], rotated, and its k_cmp,
// v_cmp [1,Tc',..] (absent if dense).
void nsa_cache_fill(Context&, const NsaCache&, int64_t b, int64_t n, const NsaIn& in, ConstTensor k_cmp,
                    ConstTensor v_cmp);
// Appends to each sequence b the token at position[b]. Rotates q in place, rotates the new keys, stores keys and values
// of the three branches, and compresses a block if one of l tokens ends at this token.
// q [B,1,Hq,dk] T overwritten  <-  k, v [B,1,..] as in NsaIn; position [B] i32 in [0, S); cos, sin [>= S, dk/2] acc
void nsa_cache_append(Context&, const NsaCache&, Tensor q, const NsaIn& rows, ConstTensor position, ConstTensor cos,
                      ConstTensor sin, const NsaWeights&, const NsaConfig&);

namespace cuda {
// Copies the last min(n, R) of the first n rows of `from` [T,H,D] to the ring `to` [R,H,D], row s to row s % R.
void cache_rows(Context&, Tensor to, ConstTensor from, int64_t n);
void nsa_cache_append(Context&, const NsaCache&, Tensor q, const NsaIn& rows, ConstTensor position, ConstTensor cos,
                      ConstTensor sin, const NsaWeights&, const NsaConfig&);
}  // namespace cuda
}  // namespace triad
