// The decoding caches of a layer: the keys and values that later tokens can attend. A cache is filled from a forward
// pass, then extended by one token at a time. Keys are stored rotated (RoPE).
#pragma once
#include "kernels/nsa/nsa.h"

namespace triad {

// NSA's cache for B sequences of up to S tokens: the keys and values of each branch, and the raw rows from which the
// next compressed block is computed.
struct NsaCache {
  Tensor k_sel, v_sel;  // [B,S,Hkv,dk], [B,S,Hkv,dv] T: token s in row s
  Tensor k_win, v_win;  // [B,W,..], W = min(w, S): a ring of the last W tokens, token s in row s % W
  Tensor k_cmp, v_cmp;  // [B,Tc,..]: the complete compressed blocks of up to S tokens
  Tensor k_raw, v_raw;  // [B,l,..]: a ring of the compressed branch's raw keys and values, token s in row s % l
};
// The cache of dense attention.
struct DenseCache {
  Tensor k, v;  // [B,S,Hkv,dk], [B,S,Hkv,dv] T: token s in row s
};

// Fills the cache of sequence b with its first n tokens. A forward pass over this sequence has computed the inputs:
// `in` [1,>=n,..] with rotated keys, and k_cmp, v_cmp [1,Tc',..].
void nsa_cache_fill(Context&, const NsaCache&, int64_t b, int64_t n, const NsaIn& in, ConstTensor k_cmp,
                    ConstTensor v_cmp);
// Appends to each sequence b the token at position[b]. Rotates q in place, rotates the new keys, stores keys and values
// of the three branches, and compresses a block if one of l tokens ends at this token.
// q [B,1,Hq,dk] T overwritten  <-  k, v [B,1,..] as in NsaIn; position [B] i32 in [0, S); cos, sin [>= S, dk/2] acc
void nsa_cache_append(Context&, const NsaCache&, Tensor q, const NsaIn& rows, ConstTensor position, ConstTensor cos,
                      ConstTensor sin, const NsaWeights&, const NsaConfig&);

// The same for dense attention: k, v [1,>=n,Hkv,..] of the pass, and [B,1,Hkv,..] of the new tokens.
void dense_cache_fill(Context&, const DenseCache&, int64_t b, int64_t n, ConstTensor k, ConstTensor v);
void dense_cache_append(Context&, const DenseCache&, Tensor q, ConstTensor k, ConstTensor v, ConstTensor position,
                        ConstTensor cos, ConstTensor sin);

namespace cuda {
// Copies the last min(n, R) of the first n rows of `from` [T,H,D] to the ring `to` [R,H,D], row s to row s % R.
void cache_rows(Context&, Tensor to, ConstTensor from, int64_t n);
void nsa_cache_append(Context&, const NsaCache&, Tensor q, const NsaIn& rows, ConstTensor position, ConstTensor cos,
                      ConstTensor sin, const NsaWeights&, const NsaConfig&);
void dense_cache_append(Context&, const DenseCache&, Tensor q, ConstTensor k, ConstTensor v, ConstTensor position,
                        ConstTensor cos, ConstTensor sin);
}  // namespace cuda
}  // namespace triad
