// Chooses the next token from logits: the likeliest one, or one drawn from the softmax at a temperature, limited to the
// top k and top p.
#pragma once
#include <cstdint>
#include <span>

namespace triad {

struct SamplingOptions {
  double temperature = 1.0;  // 0: the likeliest token; among equal ones the lowest index
  int64_t top_k = 0;         // keep only the k likeliest tokens; 0: all
  double top_p = 1.0;        // keeps the fewest likeliest of those whose probabilities sum to at least p
};

// uniform: a random number in [0, 1), which determines the result.
int32_t sample_token(std::span<const float> logits, const SamplingOptions&, double uniform);

}  // namespace triad
