// The walk of a row tile of the selected branch (Keys::Walk of nsa/gpu/fwd_dq.cuh) over the union of its tokens' lists.
//
// Each warp merges the (up to 64) sorted lists for itself: a lane follows two of them, the next block is the minimum
// over the warp, and a ballot says which tokens listed it.
#pragma once
#include <climits>

#include "kernels/nsa/gpu/fwd_dq.cuh"

namespace triad::cuda {

class SelectedKeys::Walk {
 public:
  __device__ __forceinline__ Walk(const SelectedKeys& keys, const RowTile& rows)
      : block_keys_(keys.block_keys), n_(keys.lists.n), end_of_sight_(rows.last_token + 1) {
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
    while (first_ >= end_) {  // the next block that any token listed
      const int block = __reduce_min_sync(kFullWarp, min(block_[0], block_[1]));
      if (block == INT_MAX) return false;
      const uint64_t low = __ballot_sync(kFullWarp, block_[0] == block);
      const uint64_t high = __ballot_sync(kFullWarp, block_[1] == block);
      members_ = high << 32 | low;
      for (int i = 0; i < 2; ++i)
        if (block_[i] == block) advance(i);
      first_ = block * block_keys_;
      end_ = min(first_ + block_keys_, end_of_sight_);
    }
    tile = {first_, min(first_ + most, end_), members_};
    first_ += most;
    return true;
  }

 private:
  __device__ __forceinline__ void advance(int i) {
    const int block = ++at_[i] < n_ ? list_[i][at_[i]] : -1;
    block_[i] = block < 0 ? INT_MAX : block;  // -1 ends a list
  }
  int block_keys_, n_, end_of_sight_;
  const int* list_[2];
  int at_[2], block_[2];
  int first_ = 0, end_ = 0;  // what is left of the current block
  uint64_t members_ = 0;
};

}  // namespace triad::cuda
