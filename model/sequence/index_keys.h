// A taught index whose sequences several ranks share (dist.context): its keys are gathered like the selected branch's,
// and their gradients return to the ranks that own them. Without an index, everything here does nothing.
#pragma once
#include <array>
#include <optional>

#include "model/layer_context.h"
#include "model/qkv_views.h"
#include "model/sequence/group.h"

namespace triad {

class IndexKeys {
 public:
  // Begins to gather the keys of the tokens up to this rank's last one. views: this rank's tokens. Memory is allocated
  // in `scope`.
  IndexKeys(Context&, SequenceGroup&, const LayerContext&, Scratch::Scope& scope, const QkvViews& views);
  void finish(Context&) const;      // The context waits for the keys.
  IndexIn in(int64_t chunk) const;  // A chunk's queries, and the keys that they may see.
  // A chunk's part of what forward computes; absent if `lse`, for this rank's tokens, is absent.
  std::optional<IndexForward> forward(int64_t chunk, const Tensor& lse) const;

 private:
  const SequenceLayout& layout_;
  ConstTensor q_;
  Tensor keys_;
  SequenceGroup::Transfer transfer_;
};

class IndexGradients {
 public:
  // all: for this rank's tokens; null: nothing is taught.
  IndexGradients(Context&, const LayerContext&, Scratch::Scope& scope, const IndexKeys&, const IndexBackward* all);
  const IndexBackward* chunk(int64_t i) const { return all_ == nullptr ? nullptr : &*chunks_[static_cast<size_t>(i)]; }
  // Call after all chunks' backward: overwrites all.dk with the sums over the ranks, and adds to all.loss.
  void reduce(Context&, SequenceGroup&) const;

 private:
  const LayerContext& lc_;
  Scratch::Scope& scope_;
  const IndexBackward* all_;
  Tensor losses_;  // [chunks] f64: chunks may be computed at the same time
  std::array<std::optional<IndexBackward>, 2> chunks_;
};

}  // namespace triad
