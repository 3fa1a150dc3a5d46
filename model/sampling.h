// Chooses the next token from logits: greedy, or drawn from the softmax at a temperature, limited to the top k and top
// p.
#pragma once
#include <cstdint>
#include <span>

namespace triad {

struct SamplingOptions {
  double temperature = 1.0;  // 0: greedy; the lowest index wins a tie
  int64_t top_k = 0;         // keep the k likeliest tokens; 0: all
  double top_p = 1.0;        // then keep the fewest likeliest tokens whose probabilities sum to at least p
};

// uniform: a random number in [0, 1), which determines the draw.
int32_t sample_token(std::span<const float> logits, const SamplingOptions&, double uniform);

}  // namespace triad
