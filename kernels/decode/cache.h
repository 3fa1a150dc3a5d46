// A layer's decoding caches: the keys and values that later tokens can attend. A cache is filled from a forward pass,
// then extended by one token at a time. Keys are stored rotated (RoPE).
#pragma once
#include <span>

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

// A text in a forward pass, with which sequence b begins: the tokens [begin, begin + n) of the pass's only row.
struct CachedText {
  int64_t b, begin, n;
};

// Fills the caches of these texts' sequences. A forward pass over the texts, documents of a row if there are several,
// has computed the inputs: `in` [1,T,..] with rotated keys, and k_cmp, v_cmp [1,Tc',..].
void nsa_cache_fill(Context&, const NsaCache&, std::span<const CachedText>, const NsaIn& in, ConstTensor k_cmp,
                    ConstTensor v_cmp, const NsaConfig&);
// Appends to each sequence b the token at position[b]. Rotates q in place, rotates the new keys, stores keys and values
// for the three branches, and compresses l tokens to a block if one ends here.
// q [B,1,Hq,dk] T overwritten  <-  k, v [B,1,..] as in NsaIn; position [B] i32 in [0, S); cos, sin [>= S, dk/2] acc
void nsa_cache_append(Context&, const NsaCache&, Tensor q, const NsaIn& rows, ConstTensor position, ConstTensor cos,
                      ConstTensor sin, const NsaWeights&, const NsaConfig&);

// The same for dense attention and for a window alone: k, v [1,T,Hkv,..] from the pass, and [B,1,Hkv,..] for the new
// tokens.
void dense_cache_fill(Context&, const DenseCache&, std::span<const CachedText>, ConstTensor k, ConstTensor v);
void dense_cache_append(Context&, const DenseCache&, Tensor q, ConstTensor k, ConstTensor v, ConstTensor position,
                        ConstTensor cos, ConstTensor sin);

// The same for the keys of a taught index, one head for all groups: cache [B,S,1,di] T, token s in row s; k
// [1,T,1,di] of the pass, already rotated, and q [B,1,Hkv,di], k [B,1,1,di] of the new tokens.
void index_cache_fill(Context&, Tensor cache, std::span<const CachedText>, ConstTensor k);
void index_cache_append(Context&, Tensor cache, Tensor q, ConstTensor k, ConstTensor position, ConstTensor cos,
                        ConstTensor sin);

// What a fill copies: a text's rows in a pass, one for each token, or for each complete block of `of.l` tokens, of
// which one begins every `of.d` tokens. `to` is a ring with a sequence's last R rows, row i of the text in row i % R.
struct CacheRows {
  Tensor to;         // [B,R,H,D]
  ConstTensor from;  // [1,rows,H,D]: a text's rows begin with number begin / of.d
  CompressionBlocks of = {.l = 1, .d = 1};
};

namespace cuda {
inline constexpr int kFewSequences = 8;  // most for which small work is spread over more CTAs than it needs

void index_cache_append(Context&, Tensor cache, Tensor q, ConstTensor k, ConstTensor position, ConstTensor cos,
                        ConstTensor sin);
// Copies each text's last R rows of each tensor, all texts and tensors by one launch.
void cache_fill(Context&, std::span<const CacheRows>, std::span<const CachedText>);
void nsa_cache_append(Context&, const NsaCache&, Tensor q, const NsaIn& rows, ConstTensor position, ConstTensor cos,
                      ConstTensor sin, const NsaWeights&, const NsaConfig&);
void dense_cache_append(Context&, const DenseCache&, Tensor q, ConstTensor k, ConstTensor v, ConstTensor position,
                        ConstTensor cos, ConstTensor sin);
}  // namespace cuda
}  // namespace triad
