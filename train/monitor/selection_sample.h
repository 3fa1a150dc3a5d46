// selection_sample.json: the blocks that sampled queries in one validation sequence selected in the last evaluation, by
// layer and KV group. The file's size is bounded for any sequence length.
#pragma once
#include <cstdint>
#include <vector>

#include "io/json_config.h"
#include "model/activations.h"

namespace triad {

inline constexpr const char* kSelectionSample = "selection_sample.json";

// Positions of the sampled queries in a sequence with seq_len tokens: at most `most`, evenly spaced, ascending, the
// last position included. The distance between them is odd, so that they fall on different positions within a block.
std::vector<int64_t> sampled_queries(int64_t seq_len, int64_t most);

// Call after a forward that keeps activations, of a model that has lists. Returns the selection lists for the batch's
// first row as {schema, step, seq_len, bounds: [0, .., seq_len], queries: [t, ..], layers: [layer, ..], l_sel: [i],
// init_blocks: [i], local_blocks: [i], lists: [i][group][query] = [block, ..]}; entry i belongs to layers[i], the
// layers with lists. bounds: document bounds in the row; one document if the row is one sequence. t: a position in the
// row. Blocks are counted from the first token in the query's document. (Up to schema 2 l_sel, init_blocks and
// local_blocks were one number for all layers. Schema 1 had no bounds, and blocks counted from the row's first token.)
Json selection_sample(Context&, Activations&, const ModelConfig&, int64_t step);

}  // namespace triad
