// Enumerates a CTA's key tiles in the selected branch (Keys::Walk in nsa/gpu/fwd_dq.cuh): the blocks that any of the
// CTA's tokens lists, in ascending order.
//
// Every warp merges these tokens' sorted lists, at most 64 lists: a lane reads two tokens' lists, the next block is the
// minimum over the warp, and ballots yield the mask of tokens that list it. The CTA loads every enumerated block, but a
// warp multiplies only the blocks that its own 16 rows list.
#pragma once
#include <climits>

#include "kernels/nsa/gpu/fwd_dq.cuh"

namespace triad::cuda {

class SelectedKeys::Walk {
 public:
  __device__ __forceinline__ Walk(const SelectedKeys& keys, const RowTile& rows)
      : documents_(keys.range.documents.row(rows.b)),
        block_keys_(keys.block_keys),
        n_(keys.lists.n),
        visible_end_(rows.last_token + 1) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = rows.first_token + static_cast<int>(threadIdx.x % 32) + 32 * i;
      const bool exists = t <= rows.last_token;
      list_[i] = exists ? keys.lists.at(rows.b, t, rows.g) : nullptr;
      at_[i] = exists ? -1 : n_;
      advance(i);
    }
  }
  __device__ __forceinline__ bool next(KeyTile& tile, int most) {
    while (first_ >= end_) {  // no keys are left: moves to the next block that any token lists
      const int block = __reduce_min_sync(kFullWarp, min(block_[0], block_[1]));
      if (block == INT_MAX) return false;
      const uint64_t low = __ballot_sync(kFullWarp, block_[0] == block);
      const uint64_t high = __ballot_sync(kFullWarp, block_[1] == block);
      token_mask_ = high << 32 | low;
      for (int i = 0; i < 2; ++i)
        if (block_[i] == block) advance(i);
      first_ = documents_.block_begin(block, block_keys_);
      end_ = min(first_ + block_keys_, visible_end_);
    }
    tile = {first_, min(first_ + most, end_), token_mask_};
    first_ += most;
    return true;
  }

 private:
  // Moves to the next entry in this lane's list i (0 or 1).
  __device__ __forceinline__ void advance(int i) {
    const int block = ++at_[i] < n_ ? list_[i][at_[i]] : -1;
    block_[i] = block < 0 ? INT_MAX : block;  // -1 ends a list
  }
  DocumentRow<int> documents_;
  int block_keys_, n_, visible_end_;
  const int* list_[2];       // lists for the CTA's tokens `lane` and lane + 32
  int at_[2], block_[2];     // the current entry's index in each list; its block, INT_MAX after the last one
  int first_ = 0, end_ = 0;  // next() has yet to return the current block's keys [first_, end_)
  uint64_t token_mask_ = 0;  // the tokens that list the current block
};

}  // namespace triad::cuda
