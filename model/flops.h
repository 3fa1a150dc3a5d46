// How much arithmetic a model does: closed forms of the (query, key) pairs that attention attends, and FLOPs per step.
#pragma once
#include <string_view>

#include "model/config.h"
#include "model/recompute.h"

namespace triad {

// Pairs of one sequence of T tokens, a head.
struct AttendedPairs {
  double cmp = 0, sel = 0, win = 0;
};
AttendedPairs attended_pairs(const ModelConfig&, int64_t T);

// FLOPs of forward and backward over B sequences of T tokens, as this engine executes them: 6 a weight and token in
// matrix products (lookups of the embedding are free); attention forward 2 products a pair, backward 5, and the score
// pass of the selection 1; and what layers run again. Left out: the gates' and phi's own products, under a hundredth,
// and two more a pair where backward takes two kernels (fp32, other cards and heads; kernels/README.md).
double training_flops(const ModelConfig&, int64_t B, int64_t T, const RecomputePlan& = {});
// What one layer's recomputation adds.
double replay_flops(const ModelConfig&, int64_t B, int64_t T, Recompute);

// Matrix products with weights, forward and backward: 6 a weight and token.
struct ProductFlops {
  double layers = 0, head = 0;
};
ProductFlops product_flops(const ModelConfig&, int64_t B, int64_t T);

// What two models are compared by, whatever their attention: the FLOPs of this one's weights with plain causal
// attention, two products a pair forward and four backward, none done twice.
double dense_equivalent_flops(const ModelConfig&, int64_t B, int64_t T);

// The dense bf16 peak its vendor states for a card, by its name, in FLOP/s; 0 if unknown.
double peak_bf16_flops(std::string_view device_name);

}  // namespace triad
