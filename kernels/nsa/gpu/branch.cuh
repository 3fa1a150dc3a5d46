// Kernel parameters that describe a call to a branch or dense attention, and the portable kernels' launchers. The
// parameters are the keys that a query row sees (KeyRange), the selected branch's block lists (SelectedKeys), and the
// pieces of work for the kernels that compute dk and dv (KeyWorkList). A query row is one token and one query head.
#pragma once
#include <cstdint>

#include "engine/check.h"
#include "kernels/common/documents.cuh"
#include "kernels/nsa/attend.h"
#include "kernels/nsa/gpu/key_work_bounds.h"

namespace triad::cuda {

// A call may hold only a part of a sequence's queries (RowPart in common/documents.h). Tokens are numbered from the
// first key that the call holds. The call's queries are then the tokens first_token(in) to end_token(in) - 1. If the
// call holds whole sequences of T tokens, these functions return 0 and T.
inline int64_t first_token(const AttendIn& in) { return in.documents.part.first_query - in.documents.part.first_key; }
inline int64_t end_token(const AttendIn& in) { return first_token(in) + in.q.size(1); }

// An integer divisor d > 0, constructed on the host. quotient(n) is n / d for 0 <= n < 2^31. It takes a multiplication,
// an addition and a shift, no division (Granlund and Montgomery 1994).
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

// Says which keys a token sees: token t sees the keys [low(t), high(t)). Neither bound decreases with t. The members:
//   window     if the keys are tokens (l = d = 1), token t sees the last `window` tokens up to t; T means all of them
//   l, d       key c summarizes the tokens c * d to c * d + l - 1 (if the sequence is one document). Token t sees key c
//              if c * d + l - 1 <= t. In the compressed branch `window` is T
//   keys       keys per sequence
//   documents  the documents that a sequence packs (common/documents.h); default: a sequence is one document
// In the selected branch the range is all tokens up to t; the kernels skip blocks that t doesn't list. low() and high()
// are valid if a sequence is one document. DocumentRange is also valid if a sequence packs several documents.
struct KeyRange {
  int window, l, d, keys;
  DocumentView documents = {};
  __device__ __forceinline__ int low(int t) const { return max(0, t + 1 - window); }
  __device__ __forceinline__ int high(int t) const {
    if (d == 1) return max(0, min(keys, t + 2 - l));
    return blocks_within(t + 1, l, d, keys);
  }
  // Exactly the tokens [first_row(a), end_row(b)) see at least one key in a .. b.
  __device__ __forceinline__ int first_row(int key) const { return key * d + l - 1; }
  __device__ __forceinline__ int end_row(int key, int tokens) const { return min(tokens, key + window); }
};

// Says which keys a token in sequence b sees if the sequence may pack several documents: the keys in `range` that
// belong to the token's document. As in KeyRange, neither bound decreases with t.
class DocumentRange {
 public:
  __device__ __forceinline__ DocumentRange(const KeyRange& range, int b)
      : range_(range), row_(range.documents.row(b)) {}
  __device__ __forceinline__ int low(int t) const {
    return row_.packed() ? max(row_.first_key(t, range_.d), t + 1 - range_.window) : range_.low(t);
  }
  __device__ __forceinline__ int high(int t) const {
    return row_.packed() ? row_.first_key(t, range_.d) + row_.visible_keys(t, range_.l, range_.d) : range_.high(t);
  }
  // The same as high(t), without a division if the row is one document. d: the range's d.
  __device__ __forceinline__ int high(int t, const Divisor& d) const {
    if (row_.packed()) return high(t);
    const int last = t + 1 - range_.l;
    return last < 0 ? 0 : min(range_.keys, d.quotient(last) + 1);
  }
  // Every token that sees a key in a .. b is in [first_row(a), end_row(b)). With several documents, some tokens in this
  // range may see none.
  __device__ __forceinline__ int first_row(int key) const { return range_.first_row(key); }
  __device__ __forceinline__ int end_row(int key, int tokens) const {
    return row_.packed() ? min(row_.end(row_.owner(key, range_.d)), key + range_.window) : range_.end_row(key, tokens);
  }
  __device__ __forceinline__ int keys() const { return range_.keys; }
  __device__ __forceinline__ const DocumentRow<int>& row() const { return row_; }

 private:
  const KeyRange& range_;
  DocumentRow<int> row_;
};

// The selected branch's block lists, tensor block_index [B,T,Hkv,n] i32. at(b, t, g) is one token and group's list: up
// to n blocks, ascending, padded with -1.
struct BlockLists {
  const int* data;
  int64_t batch, row, head;       // strides over b, t and g, in elements
  int tokens, groups, blocks, n;  // T, Hkv, blocks per sequence, entries per list
  int first_token = 0;            // the call's first query token; earlier tokens have no list
  __device__ __forceinline__ const int* at(int b, int t, int g) const {
    return data + b * batch + static_cast<int64_t>(t) * row + g * head;
  }
};

// The keys that a token sees in the selected branch: the keys in `range` whose blocks are in its list.
struct SelectedKeys {
  KeyRange range;
  BlockLists lists;
  int block_keys;  // keys per block: min(l_sel, T), with make_selected_keys()'s argument l_sel
  class Walk;      // enumerates a CTA's key tiles (nsa/gpu/selected_walk.cuh)
};
SelectedKeys make_selected_keys(const char* op, const AttendIn&, const ConstTensor& block_index, int64_t l_sel);

// A piece of work for the kernels that compute dk and dv: one key block, and some of the tokens that see it. The piece
// sums what these tokens' query rows contribute to the block's dk and dv. Its tokens are [first, first + count), or, in
// the selected branch, entries [first, first + count) of KeyWorkList::tokens.
struct KeyWork {
  int block;         // index of the key block
  int first, count;  // the piece's tokens, see above. count < 0: there is nothing to do, because the entry in the piece
                     // table is unused, or because find_part() found no tokens
  int slot;          // index into KeyWorkList::partial; negative: the only piece, stored to dk and dv directly
  // A piece that is its blocks' only one has -1 - slot further blocks after `block`. This number is positive only where
  // a sequence packs several documents: short one-block documents may share a piece. Together they have at most as many
  // keys as one block. A query row sees only its own document's keys, so a kernel that takes such a piece must clear
  // the other keys' scores.
  __host__ __device__ __forceinline__ static constexpr int slot_of_merged(int further) { return -1 - further; }
  __device__ __forceinline__ int merged() const { return max(0, -1 - slot); }
};

// A branch's pieces of work (KeyWork), for all sequences b and groups g. If a block has several pieces, each stores its
// sums to its own slot in `partial`, and a second kernel adds the block's slots in order. work, tokens and block_slots
// exist for the selected branch only. In the other branches the tokens that see a block are contiguous, and each block
// has pieces / blocks pieces, about equally large (find_work), or pieces cut at the same tokens for all blocks, where
// pieces without tokens don't exist (find_part).
struct KeyWorkList {
  int block_keys, blocks;  // keys per block; blocks per sequence
  int pieces;              // pieces per sequence and group, at most
  const KeyWork* work;     // [pieces, B*Hkv], or nullptr
  const int* tokens;       // [B*Hkv, tokens_stride]: the tokens that list block 0, then block 1, ...; or nullptr
  int64_t tokens_stride;
  // [B*Hkv, blocks], or nullptr. y > 0: the block has y pieces, and x is the first one's slot. y = 0: the block shares
  // a piece with other blocks. For the first block x is the number of the others, for the others x is -1.
  const int2* block_slots;
  float* partial;  // [slots, block_keys, dk + dv]: partial sums; nullptr if no block can have several pieces
};
// Builds the selected branch's work list on the GPU: for each block the tokens that list it (the inverse of the block
// lists), cut into pieces. Tables and partial sums are allocated from `scope`. `op` names the caller in errors.
// has_partial: false if the caller stores no partial sums.
KeyWorkList build_inverse_index(Context&, Scratch::Scope&, const char* op, const AttendIn&, const SelectedKeys&,
                                const PiecePlan&, bool has_partial = true);
// The work list for a branch whose tokens see one key range (window, compressed, dense). Without keys it has no blocks.
KeyWorkList contiguous_work(Scratch::Scope&, const AttendIn&, const KeyRange&);

// ---- portable kernel launchers ----
// They run on any card. Except for the last two, they take any head width that fits into shared memory, in f32 and
// bf16. `op` names the launch in profiles and errors.

// Forward: o and lse are overwritten.
void forward_range_portable(Context&, const char* op, const AttendOut&, const AttendIn&, const KeyRange&);
void forward_selected_portable(Context&, const char* op, const AttendOut&, const AttendIn&, const SelectedKeys&);
// Backward's first part: adds to dq. dk and dv are not written.
void dq_range_portable(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                       const KeyRange&);
void dq_selected_portable(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                          const SelectedKeys&);
// Backward's second part: overwrites dk and dv for all keys in the work list's blocks.
void dkdv_portable(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                   const KeyRange&, const KeyWorkList&);
// backward_range_portable() and backward_listed_portable() compute dq, dk and dv for a branch or dense attention. Each
// queues three kernels: one computes the query rows' statistics (RowStats), one computes dq, dk and dv, and one adds
// dk's and dv's partial sums. The result is added to dq, and overwrites dk and dv. Operands are bf16, (dk, dv) is (64,
// 64) or (128, 128), and AttendGradIn::rounding_unit must be present. With backward_range_portable(), each token sees
// one key range. With backward_listed_portable(), each token lists key blocks, and every piece in the work list has at
// most kDqWorkTokens tokens.
void backward_range_portable(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                             const KeyRange&);
void backward_listed_portable(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                              const KeyRange&, const KeyWorkList&);

}  // namespace triad::cuda
