// Layer range lists in config values: "0:2,30:32" (model.dense_layers, nope_layers), "0:6=block,6:12=mlp"
// (runtime.recompute).
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

namespace triad {

struct LayerRange {
  int64_t begin = 0, end = 0;  // the end is exclusive
  std::string_view word;       // text after '=', within the parsed text; empty if there is none
};

// Parses a list of ranges that aren't empty, don't overlap and name layers below n_layers. For other text throws a
// UsageError that begins with `key` and the text; `allowed` says in it what is allowed.
std::vector<LayerRange> parse_layer_ranges(std::string_view text, int64_t n_layers, std::string_view key,
                                           std::string_view allowed);

}  // namespace triad
