// What ranks that share sequences exchange in a layer: keys and values of tokens and of compressed blocks, and sums of
// their gradients.
#pragma once
#include <string>

#include "model/layer_context.h"
#include "model/sequence/group.h"

namespace triad {

// Keys k [B,rows,Hkv,dk] and values v [B,rows,Hkv,dv], or their gradients. A row is a token or a compressed block.
struct KvRows {
  Tensor k, v;
  KvRows rows(int64_t begin, int64_t end) const { return {k.slice(1, begin, end), v.slice(1, begin, end)}; }
};

void copy_kv(Context&, const KvRows& to, const KvRows& from);

// Rows from other ranks, in transfer into `pair`.
struct PendingRows {
  KvRows pair;
  SequenceGroup::Transfer transfer;
  const KvRows& finish(Context&) const;
};

// Exchanges in one layer's forward or backward. Memory is allocated in `scope`.
class Exchange {
 public:
  Exchange(SequenceGroup& group, const LayerContext& lc, Scratch::Scope& scope);
  // The same exchanges with memory in another scope.
  Exchange in(Scratch::Scope& scope) const { return {group_, lc_, scope}; }

  const RowList& local(const RowLists& lists) const { return lists[static_cast<size_t>(layout_.rank)]; }
  // Contiguous tensors for this rank's rows. All ranks allocate the most that any rank needs, because memory is planned
  // for one rank and the plan must fit all.
  KvRows alloc(DType dtype, const RowLists& lists) const;
  // Gathers the tokens that this rank needs (its list in `needs`) from all ranks.
  PendingRows gather(Context&, const KvRows& to, ConstTensor k, ConstTensor v, const RowLists& needs,
                     const char* branch) const;
  PendingRows gather(Context&, ConstTensor k, ConstTensor v, const RowLists& needs, const char* branch) const;
  // Gathers all ranks' compressed blocks. from: this rank's blocks.
  PendingRows gather_blocks(Context&, const KvRows& to, const KvRows& from, const RowLists& blocks,
                            const RowLists& all) const;
  // Gradient sums over the ranks, in the accumulator type, for this rank's rows in `has`. addends: what this rank's
  // queries contribute, for its rows in `needs`.
  PendingRows reduce(Context&, const KvRows& addends, const RowLists& has, const RowLists& needs,
                     const char* branch) const;
  // The same, with this rank's tokens as its rows in `has`.
  PendingRows reduce(Context&, const KvRows& addends, const RowLists& needs, const char* branch) const;

 private:
  std::string what(const char* rows, const char* branch) const;

  const LayerContext& lc_;
  const SequenceLayout& layout_;
  SequenceGroup& group_;
  Scratch::Scope& scope_;
  const RowLists tokens_;
};

// Ends a reduction: overwrites dk and dv with the sums, rounded to the dtype of dk and dv.
void store(Context&, Tensor dk, Tensor dv, const PendingRows& sums);

}  // namespace triad
