// The selected branch's forward on Hopper for long sequences whose neighbouring tokens list different blocks: the
// gather route of nsa_attend_selected_sm90.cu, and when to take it.
#pragma once
#include "kernels/nsa_attend.cuh"

namespace triad::cuda {

// block_index [B,T,Hkv,n]
struct BlockLists {
  const int* data;
  int64_t batch, row, head;
  int n, tokens, groups, blocks;  // blocks: of T tokens, ceil(T / l')
  __device__ __forceinline__ const int* at(int b, int t, int g) const {
    return data + b * batch + static_cast<int64_t>(t) * row + g * head;
  }
};

// A token's near blocks are the first one and the two that end with its own: by the selection's rule every token lists
// them, so neighbouring tokens share them whatever else they list. The others are complete and past.
__device__ __forceinline__ bool is_far(int block, int current) { return block > 0 && block + 1 < current; }

// Adds the listed far blocks to o and lse, which hold the attention over the near ones.
void attend_far_blocks_sm90(Context&, const char* op, const AttendOut&, const AttendIn&, const BlockLists&,
                            int block_keys);
// Whether those kernels can: a pure function of card and problem.
bool attend_far_blocks_sm90_applies(const Context&, const AttendOut&, const AttendIn&, const ConstTensor& block_index,
                                    int64_t l_sel);

}  // namespace triad::cuda
