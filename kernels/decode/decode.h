// Attention for one new token per sequence over the cache. NSA: compressed branch, selection, selected and window
// branches and the gated sum, equal to nsa_forward's last row. Dense: equal to dense_attention_forward's last row.
#pragma once
#include "kernels/decode/cache.h"

namespace triad {

struct DecodeIn {
  ConstTensor q;         // [B,1,Hq,dk] T, rotated
  NsaCache cache;        // includes the new token
  ConstTensor position;  // [B] i32: the new token's position
  ConstTensor lists =
      {};  // [B,1,Hkv,n] i32: from index_decode, with a taught index; absent: the compressed branch selects
  Tensor shared_lists = {};  // [B,1,Hkv,n] i32, if tokens share lists (SelectOptions::every) that the compressed branch
                             // makes: those of the last step, which this one replaces or uses
};
struct DenseDecodeIn {
  ConstTensor q;         // [B,1,Hq,dk] T, rotated
  DenseCache cache;      // includes the new token; attention is to the tokens that it holds
  ConstTensor position;  // [B] i32: the new token's position
};
// For measurements: counts the keys that each branch reads, and can skip branches. Dense attention counts as the window
// branch.
struct DecodeProbe {
  Tensor reads;  // [3] i64, added to: keys read by all sequences and groups; absent: uncounted
  std::array<bool, 3> run = {true, true, true};  // a skipped branch's output is undefined
};

// out [B,1,Hq,dv] T overwritten
void nsa_decode(Context&, Tensor out, const DecodeIn&, const GateWeights&, const NsaConfig&, const DecodeProbe& = {});
void dense_decode(Context&, Tensor out, const DenseDecodeIn&, const DecodeProbe& = {});
// Attention with one softmax over the listed blocks (nsa.branches sel): the last row of selected_attention_forward.
void selected_decode(Context&, Tensor out, const DenseDecodeIn&, ConstTensor lists, int64_t l_sel,
                     const DecodeProbe& = {});
// The new token's lists by a taught index, the last row of nsa_select_index: lists [B,1,Hkv,n] i32 overwritten, but
// where the token shares those of the last step (SelectOptions::every)  <-  iq [B,1,Hkv,di] T, ik [B,S,1,di] T:
// rotated, the cache with the new token; position [B] i32
void index_decode(Context&, Tensor lists, ConstTensor iq, ConstTensor ik, ConstTensor position, const SelectOptions&);

namespace cuda {
void selected_decode(Context&, Tensor out, const DenseDecodeIn&, ConstTensor lists, int64_t l_sel, const DecodeProbe&);
void index_decode(Context&, Tensor lists, ConstTensor iq, ConstTensor ik, ConstTensor position, const SelectOptions&);
void nsa_decode(Context&, Tensor out, const DecodeIn&, const GateWeights&, const NsaConfig&, const DecodeProbe&);
void dense_decode(Context&, Tensor out, const DenseDecodeIn&, const DecodeProbe&);
}  // namespace cuda
}  // namespace triad
