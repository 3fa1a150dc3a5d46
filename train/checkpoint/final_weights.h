// A run's final weight files: one file, or several with an index, in the dtype train.final_dtype.
#pragma once
#include <functional>
#include <string>

#include "engine/comm/comm.h"
#include "train/checkpoint/state_part.h"

namespace triad {

// Into how many files the weights go, and how many ranks, from the first one on, write them.
struct FinalFiles {
  int64_t files = 1, writers = 1;
};
// bytes: all weights together, in their dtype. One file unless they exceed 5 GB, or no rank has them whole (dist.zero
// 3). writers: how many ranks can write.
FinalFiles final_files(int64_t bytes, bool sharded_weights, int64_t writers);

// Writes the weights to the folder, in a dtype. Files in another layout, which readers would find first, are removed.
// gather passes the parameters, in the dtype `held`, to its visitor (Optimizer::gather); it is called once for every
// `writers` files. check() is called before each change of the folder, and throws Error if the folder is lost. An error
// of any rank is thrown as by run_on_ranks() (train/checkpoint/rank_work.h). Collective: all ranks call it.
void write_weight_files(
    Context&, const Params&, Comm&, const FinalFiles&, DType held, DType, const std::string& folder,
    const std::function<void(const BucketVisitor&)>& gather, const std::function<void()>& check = [] {});

// Paths of the weight files in a folder, in any layout, whole or not; the one that makes readers see the weights comes
// first, so removing or moving them in this order never leaves a model that looks whole.
std::vector<std::string> weight_files_in(const std::string& folder);

}  // namespace triad
