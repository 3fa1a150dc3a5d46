// One call of an attention branch, as its kernels take it: which keys a row sees, the lists of the selected branch, the
// work of dk and dv; and the portable kernels' launchers. Declarations and small structs alone, no kernel.
#pragma once
#include <cstdint>

#include "engine/check.h"
#include "kernels/nsa/attend.h"

namespace triad::cuda {

// n / d for 0 <= n < 2^31 by a multiplication (Granlund and Montgomery 1994).
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

// Row t sees the keys [low(t), high(t)), both growing with t: key c stands for the tokens [c*d, c*d + l), which must be
// past, and must be one of the last `window` (a window of T: no limit). Tokens themselves are keys with l = d = 1. The
// selected branch sees such a range too, and of it the keys in listed blocks.
struct KeyRange {
  int window, l, d, keys;
  __device__ __forceinline__ int low(int t) const { return max(0, t + 1 - window); }
  __device__ __forceinline__ int high(int t) const {
    if (d == 1) return max(0, min(keys, t + 2 - l));
    return t + 1 < l ? 0 : min(keys, (t + 1 - l) / d + 1);
  }
  // The rows [first_row(a), end_row(b)) are those that see any of the keys a .. b; T is the window's upper limit.
  __device__ __forceinline__ int first_row(int key) const { return key * d + l - 1; }
  __device__ __forceinline__ int end_row(int key, int tokens) const { return min(tokens, key + window); }
};

// block_index [B,T,Hkv,n]
struct BlockLists {
  const int* data;
  int64_t batch, row, head;
  int n, tokens, groups, blocks;  // blocks: of T tokens, ceil(T / l')
  __device__ __forceinline__ const int* at(int b, int t, int g) const {
    return data + b * batch + static_cast<int64_t>(t) * row + g * head;
  }
};

// The selected branch: the keys of `range` that lie in the blocks listed for a token.
struct SelectedKeys {
  KeyRange range;
  BlockLists lists;
  int block_keys;
  class Walk;  // nsa/gpu/selected_walk.cuh
};
SelectedKeys make_selected_keys(const char* op, const AttendIn&, const ConstTensor& block_index, int64_t l_sel);

// A piece of dk and dv's work: the rows of a run of tokens against one block of keys.
struct KeyWork {
  int block;         // keys [block * block_keys, ...)
  int first, count;  // tokens first, first + 1, ..., or entries first .. of KeyWorkList::tokens; count < 0: no work
  int slot;  // where in KeyWorkList::partial the sums go; -1: the work is the block's only, straight to dk and dv
};
inline constexpr int kWorkTokens = 2048;  // most tokens of a piece whose tokens are listed

// Work made on the GPU, item i * B*Hkv + (b*Hkv + g) being piece i of that sequence and group. The sums of a block with
// several pieces meet in `partial`, where the block's pieces are added in order.
struct KeyWorkList {
  int block_keys, blocks;
  int pieces;           // grid size for each (b, g), an upper bound
  const KeyWork* work;  // nullptr: every block's rows are contiguous and cut into pieces / blocks equal runs
  const int* tokens;    // [B*Hkv, tokens_stride]
  int64_t tokens_stride;
  const int2* block_slots;  // [B*Hkv, blocks] first slot and number of pieces
  float* partial;           // [slots, block_keys, dk + dv]
};
// The pieces of the selected branch's dk and dv: the sequence is indexed in `parts` parts concurrently; a piece has at
// most most_tokens tokens, all of the same run of `cut` consecutive parts.
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
