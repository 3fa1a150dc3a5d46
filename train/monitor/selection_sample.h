// selection_sample.json: which blocks some queries of one validation sequence have selected, by layer and group, as the
// last evaluation found them. Bounded in size, however long sequences are.
#pragma once
#include <cstdint>
#include <vector>

#include "io/json_config.h"
#include "model/activations.h"

namespace triad {

inline constexpr const char* kSelectionSample = "selection_sample.json";

// The queries that a sample of seq_len tokens holds: at most `most`, evenly spread, ascending, the last one among them.
// Their distance is odd: a distance that is a multiple of the blocks' length would show one place of a block only.
std::vector<int64_t> sampled_queries(int64_t seq_len, int64_t most);

// After a forward whose layers keep their activations: the lists of the batch's first sequence.
// {schema, step, seq_len, l_sel, init_blocks, local_blocks, queries: [t, ..], lists: [layer][group][query] = [block,
// ..]}
Json selection_sample(Context&, Activations&, const ModelConfig&, int64_t step);

}  // namespace triad
