// Reads `triad grads --lists`'s file.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "train/inference.h"

namespace triad {

// Makes later forward passes attend to a file's lists instead of selecting: one tensor block_index/LAYER [B,T,groups,n]
// i32 for each layer with lists, as `triad grads` writes them, with blocks counted from the document's first token.
// bounds: the document bounds of a model with one row; empty: rows are whole documents. Throws a UsageError that names
// the file and the tensor if one is missing, has another shape, or holds a list that no token can have.
void give_lists(LoadedModel&, const std::string& path, std::span<const int32_t> bounds);

}  // namespace triad
