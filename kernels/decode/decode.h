// NSA for one new token a sequence, over what the cache keeps of its past: the compressed branch, the selection, the
// selected and the window branch and the gated sum, the same functions as nsa_forward's last row. Dense attention is
// the window branch alone, over all that the cache holds.
#pragma once
#include "kernels/decode/cache.h"

namespace triad {

struct DecodeIn {
  ConstTensor q;         // [B,1,Hq,dk] T, rotated
  NsaCache cache;        // with the new token in it
  ConstTensor position;  // [B] i32: of the new token
};
// For measuring: the keys that each branch read are counted, and branches may be left out.
struct DecodeProbe {
  Tensor reads;  // [3] i64, added to: keys read by all sequences and groups; absent: uncounted
  std::array<bool, 3> run = {true, true, true};  // what a branch that does not run would have written is anything
};

// out [B,1,Hq,dv] T overwritten
void nsa_decode(Context&, Tensor out, const DecodeIn&, const GateWeights&, const NsaConfig&, const DecodeProbe& = {});

namespace cuda {
void nsa_decode(Context&, Tensor out, const DecodeIn&, const GateWeights&, const NsaConfig&, const DecodeProbe&);
}  // namespace cuda
}  // namespace triad
