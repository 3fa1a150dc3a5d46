// `triad bench attention --context N`: a layer's attention, forward and backward, on sequences that N ranks share.
#pragma once
#include <string>

#include "engine/comm/comm.h"
#include "io/json_config.h"
#include "tools/bench/attention_input.h"
#include "tools/bench/measure.h"

namespace triad {

struct SharedAttention {
  // A row for forward and one for backward, without their case: the longest time of a rank, and the ideal, the time of
  // rank 0 alone for whole sequences divided by the number of ranks. Backward's row has the exchanges of both.
  Json rows = Json::array();
  double shared_gb = 0;       // memory that each rank needs, 10^9 bytes
  std::string skipped = "";   // why nothing was measured
  std::string no_ideal = "";  // why the ideal is missing
};

// Times the problem on all ranks; then, on rank 0, whole sequences. drift: of random_qkv(). Collective.
SharedAttention time_shared_attention(Comm&, const AttentionProblem&, double drift, Device, DType, bool deterministic);

// links: bytes/s of measure_links().
void print_shared_attention(const std::string& name, const SharedAttention&, int64_t ranks, double links);

}  // namespace triad
