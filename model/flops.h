// FLOPs of a model, in closed form: the (query, key) pairs of attention, and FLOPs per step.
#pragma once
#include <string_view>

#include "model/config.h"
#include "model/recompute.h"

namespace triad {

// Attended (query, key) pairs of one head over one sequence of T tokens, by branch.
struct AttendedPairs {
  double cmp = 0, sel = 0, win = 0;
};
AttendedPairs attended_pairs(const ModelConfig&, int64_t T);

// FLOPs of forward and backward over B sequences of T tokens, as executed. Matrix products: 6 per weight and token
// (embedding lookups are free). Attention: 2 products per pair in forward, 5 in backward, 1 for the selection scores.
// Recomputation is added. Not counted: the products of gates and phi, less than 1%, and two products per pair where
// backward uses two kernels (fp32, other cards and head widths; kernels/README.md).
double training_flops(const ModelConfig&, int64_t B, int64_t T, const RecomputePlan& = {});
// FLOPs that one layer's recomputation adds.
double replay_flops(const ModelConfig&, int64_t B, int64_t T, Recompute);

// FLOPs of matrix products with weights, forward and backward: 6 per weight and token.
struct ProductFlops {
  double layers = 0, head = 0;
};
ProductFlops product_flops(const ModelConfig&, int64_t B, int64_t T);

// FLOPs for comparing models with different attention: this model's weights with plain causal attention, two products
// per pair in forward and four in backward, none executed twice.
double dense_equivalent_flops(const ModelConfig&, int64_t B, int64_t T);

// The vendor's dense bf16 peak of a card, by its name, in FLOP/s; 0 if unknown.
double peak_bf16_flops(std::string_view device_name);

}  // namespace triad
