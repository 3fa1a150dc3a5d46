// The attention of one new token per sequence over the cache. NSA: compressed branch, selection, selected and window
// branches and the gated sum, equal to the last row of nsa_forward. Dense: equal to the last row of
// dense_attention_forward.
#pragma once
#include "kernels/decode/cache.h"

namespace triad {

struct DecodeIn {
  ConstTensor q;         // [B,1,Hq,dk] T, rotated
  NsaCache cache;        // including the new token
  ConstTensor position;  // [B] i32: position of the new token
};
struct DenseDecodeIn {
  ConstTensor q;         // [B,1,Hq,dk] T, rotated
  DenseCache cache;      // including the new token
  ConstTensor position;  // [B] i32: position of the new token
};
// For measurements: counts the keys that each branch reads, and can skip branches. Dense attention counts as the window
// branch.
struct DecodeProbe {
  Tensor reads;  // [3] i64, added to: keys read by all sequences and groups; absent: not counted
  std::array<bool, 3> run = {true, true, true};  // output of skipped branches is undefined
};

// out [B,1,Hq,dv] T overwritten
void nsa_decode(Context&, Tensor out, const DecodeIn&, const GateWeights&, const NsaConfig&, const DecodeProbe& = {});
void dense_decode(Context&, Tensor out, const DenseDecodeIn&, const DecodeProbe& = {});

namespace cuda {
void nsa_decode(Context&, Tensor out, const DecodeIn&, const GateWeights&, const NsaConfig&, const DecodeProbe&);
void dense_decode(Context&, Tensor out, const DenseDecodeIn&, const DecodeProbe&);
}  // namespace cuda
}  // namespace triad
