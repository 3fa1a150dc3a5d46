// Token shards as a token source, checked against what their manifests say.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/data/dataset.h"

namespace triad {

// Several shards as one sequence, in this order. accept_changed: as in SplitOptions.
std::shared_ptr<const TokenSource> shard_tokens(const std::vector<std::string>& files, int64_t vocab,
                                                bool accept_changed = false);

}  // namespace triad
