// Attention in a layer whose sequences several ranks share (dist.context). Each rank has its tokens' queries, keys and
// values. Forward gathers the keys and values that these queries see from other ranks: for the window branch the w - 1
// tokens before, for the selected branch and dense attention all earlier ones. Each compressed block is made by the
// rank that has the block's first token, and then gathered. Backward gathers again, since no rank keeps what it
// gathered, and returns the gathered keys' and values' gradients to the ranks that own them, which add them in rank
// order.
#pragma once
#include <memory>

#include "model/attention_exec.h"
#include "model/sequence/group.h"

namespace triad {

// group: outlives the result. Compressed keys and values in NsaSaved are those of the whole sequence, on every rank;
// the gradients of k and v are those of this rank's tokens, over all ranks' queries.
std::unique_ptr<const AttentionExec> shared_sequences(SequenceGroup& group);

}  // namespace triad
