// The parameters of an attention branch as kernels take them: the keys that a row sees, the block lists of the selected
// branch, the pieces of work of dk and dv. And the portable kernels' launchers. No kernel is defined here.
#pragma once
#include <cstdint>

#include "engine/check.h"
#include "kernels/nsa/attend.h"

namespace triad::cuda {

// n / d for 0 <= n < 2^31, by a multiplication (Granlund and Montgomery 1994).
class Divisor {
 public:
  explicit Divisor(int d) : d_(d) {
    while ((int64_t{1} << shift_) < d) ++shift_;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift_) - d)) / d + 1);
  }
  __device__ __forceinline__ int value() const { return d_; }
  __device__ __forceinline__ int quotient(int n) const {
    return static_cast<int>((__umulhi(static_cast<uint32_t>(n), multiplier_) + static_cast<uint32_t>(n)) >> shift_);
  }

 private:
  int d_, shift_ = 0;
  uint32_t multiplier_;
};

// The visible range of a row: token t sees the keys [low(t), high(t)), and both bounds grow with t. Key c covers the
// tokens [c*d, c*d + l), all of which must be at or before t; of those keys the last `window` are visible (window = T:
// all). If keys are tokens, l = d = 1. The selected branch uses such a range too and masks blocks that are not listed.
struct KeyRange {
  int window, l, d, keys;
  __device__ __forceinline__ int low(int t) const { return max(0, t + 1 - window); }
  __device__ __forceinline__ int high(int t) const {
    if (d == 1) return max(0, min(keys, t + 2 - l));
    return t + 1 < l ? 0 : min(keys, (t + 1 - l) / d + 1);
  }
  // The rows [first_row(a), end_row(b)) see at least one of the keys a .. b.
  __device__ __forceinline__ int first_row(int key) const { return key * d + l - 1; }
  __device__ __forceinline__ int end_row(int key, int tokens) const { return min(tokens, key + window); }
};

// block_index [B,T,Hkv,n] i32: n blocks per token and group, ascending, -1 at the end.
struct BlockLists {
  const int* data;
  int64_t batch, row, head;
  int tokens, groups, blocks, n;  // T, Hkv, ceil(T / l'), n
  __device__ __forceinline__ const int* at(int b, int t, int g) const {
    return data + b * batch + static_cast<int64_t>(t) * row + g * head;
  }
};

// The selected branch: the keys of `range` that are in the blocks listed for a token.
struct SelectedKeys {
  KeyRange range;
  BlockLists lists;
  int block_keys;
  class Walk;  // nsa/gpu/selected_walk.cuh
};
SelectedKeys make_selected_keys(const char* op, const AttendIn&, const ConstTensor& block_index, int64_t l_sel);

// A piece of the work of dk and dv: the rows of some tokens times one block of keys.
struct KeyWork {
  int block;         // a block of keys: [block * block_keys, ...)
  int first, count;  // tokens first, first + 1, ...; or entries of KeyWorkList::tokens; count < 0: no work
  int slot;          // index into KeyWorkList::partial; -1: the block's only piece, stored to dk and dv directly
};
inline constexpr int kWorkTokens = 2048;  // most tokens per piece of listed tokens

// All pieces: work[i * B*Hkv + b*Hkv + g] is piece i of that sequence and group. If a block has several pieces, each
// stores its sums to its slot of `partial`, and a second kernel adds them in order.
struct KeyWorkList {
  int block_keys, blocks;
  int pieces;           // an upper bound of the pieces per (b, g)
  const KeyWork* work;  // nullptr: every block's rows are contiguous and cut into pieces / blocks equal parts
  const int* tokens;    // [B*Hkv, tokens_stride]
  int64_t tokens_stride;
  const int2* block_slots;  // [B*Hkv, blocks] (first slot, pieces)
  float* partial;           // [slots, block_keys, dk + dv]
};
// How the selected branch's work for dk and dv is cut into pieces. The inverse index is built from `parts` equal parts
// of the sequence concurrently. `cut` consecutive parts form a run; a piece has at most most_tokens tokens, all of one
// run.
struct PiecePlan {
  int64_t parts, cut, most_tokens;
};
// Builds the inverse index on the GPU: for each block the tokens that list it, cut into pieces. Tables and partial sums
// are allocated from `scope`.
KeyWorkList build_inverse_index(Context&, Scratch::Scope&, const char* op, const AttendIn&, const SelectedKeys&,
                                const PiecePlan&);
// The work of a branch whose rows see one range of keys; no blocks where there are no keys.
KeyWorkList contiguous_work(Scratch::Scope&, const AttendIn&, const KeyRange&);

// ---- portable launchers: any card, any head width, f32 and bf16 ----

// o and lse overwritten.
void forward_range_portable(Context&, const char* op, const AttendOut&, const AttendIn&, const KeyRange&);
void forward_selected_portable(Context&, const char* op, const AttendOut&, const AttendIn&, const SelectedKeys&);
// dq alone, added to.
void dq_range_portable(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                       const KeyRange&);
void dq_selected_portable(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                          const SelectedKeys&);
// dk and dv overwritten for the keys of every block.
void dkdv_portable(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                   const KeyRange&, const KeyWorkList&);

}  // namespace triad::cuda
