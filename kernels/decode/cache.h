// A layer's decoding caches: the keys and values that later tokens can attend. A cache is filled from a forward pass,
// then extended by one token at a time. Keys are stored rotated (RoPE).
#pragma once
#include "kernels/nsa/nsa.h"

namespace triad {

// NSA's cache for B sequences with up to S tokens: each branch's keys and values, and the raw rows from which the next
// compressed block is computed.
struct NsaCache {
  Tensor k_sel, v_sel;  // [B,S,Hkv,dk], [B,S,Hkv,dv] T: token s in row s
  Tensor k_win, v_win;  // [B,W,..], W = min(w, S): a ring with the last W tokens, token s in row s % W
  Tensor k_cmp, v_cmp;  // [B,Tc,..]: complete compressed blocks for up to S tokens
  Tensor k_raw, v_raw;  // [B,l,..]: a ring with the compressed branch's raw keys and values, token s in row s % l
};
// The cache of dense attention, S rows, or of a sliding window alone, W = min(w, S) rows.
struct DenseCache {
  Tensor k, v;  // [B,rows,Hkv,dk], [B,rows,Hkv,dv] T: a ring with the last tokens, token s in row s % rows
};

// Fills sequence b's cache with the first n tokens. A forward pass over this sequence has computed the inputs: `in`
// [1,>=n,..] with rotated keys, and k_cmp, v_cmp [1,Tc',..].
void nsa_cache_fill(Context&, const NsaCache&, int64_t b, int64_t n, const NsaIn& in, ConstTensor k_cmp,
                    ConstTensor v_cmp);
// Appends to each sequence b the token at position[b]. Rotates q in place, rotates the new keys, stores keys and values
// for the three branches, and compresses l tokens to a block if one ends here.
// q [B,1,Hq,dk] T overwritten  <-  k, v [B,1,..] as in NsaIn; position [B] i32 in [0, S); cos, sin [>= S, dk/2] acc
void nsa_cache_append(Context&, const NsaCache&, Tensor q, const NsaIn& rows, ConstTensor position, ConstTensor cos,
                      ConstTensor sin, const NsaWeights&, const NsaConfig&);

// The same for dense attention and for a window alone: k, v [1,>=n,Hkv,..] from the pass, and [B,1,Hkv,..] for the new
// tokens.
void dense_cache_fill(Context&, const DenseCache&, int64_t b, int64_t n, ConstTensor k, ConstTensor v);
void dense_cache_append(Context&, const DenseCache&, Tensor q, ConstTensor k, ConstTensor v, ConstTensor position,
                        ConstTensor cos, ConstTensor sin);

// The same for the keys of a taught index, one head for all groups: cache [B,S,1,di] T, token s in row s; k
// [1,>=n,1,di] of the pass, already rotated, and q [B,1,Hkv,di], k [B,1,1,di] of the new tokens.
void index_cache_fill(Context&, Tensor cache, int64_t b, int64_t n, ConstTensor k);
void index_cache_append(Context&, Tensor cache, Tensor q, ConstTensor k, ConstTensor position, ConstTensor cos,
                        ConstTensor sin);

namespace cuda {
inline constexpr int kFewSequences = 8;  // most sequences whose work is spread over many CTAs

void index_cache_append(Context&, Tensor cache, Tensor q, ConstTensor k, ConstTensor position, ConstTensor cos,
                        ConstTensor sin);
// Copies rows [n - min(n, R), n) of `from` [T,H,D] to the ring `to` [R,H,D], row s to row s % R.
void cache_rows(Context&, Tensor to, ConstTensor from, int64_t n);
void nsa_cache_append(Context&, const NsaCache&, Tensor q, const NsaIn& rows, ConstTensor position, ConstTensor cos,
                      ConstTensor sin, const NsaWeights&, const NsaConfig&);
void dense_cache_append(Context&, const DenseCache&, Tensor q, ConstTensor k, ConstTensor v, ConstTensor position,
                        ConstTensor cos, ConstTensor sin);
}  // namespace cuda
}  // namespace triad
