// A model's FLOPs in closed form: attended (query, key) pairs, and a step's FLOPs.
#pragma once
#include <cstdint>
#include <map>
#include <string_view>

#include "model/config.h"
#include "model/lora.h"
#include "model/recompute.h"

namespace triad {

// Attended (query, key) pairs per head over one T-token sequence: in each NSA branch, or in dense attention.
struct AttendedPairs {
  double cmp = 0, sel = 0, win = 0, dense = 0;
  // Pairs of one group that a taught index scores to select; no attention.
  double index = 0;
  double all() const { return cmp + sel + win + dense; }
};

// Which documents token rows hold where attention stays within documents: how many there are by length, in `rows` rows
// together. Padding, which the model computes like a document, is one. rows = 0: each row is one document.
struct DocumentMix {
  int64_t rows = 0;
  std::map<int64_t, int64_t> documents;  // length in tokens -> number

  void add(int64_t length, int64_t number = 1) { documents[length] += number; }
  int64_t longest() const { return documents.empty() ? 0 : documents.rbegin()->first; }  // 0: no documents
};
// The pairs in a T-token row, the mean over the mix's rows: with the group's options, or in a layer of the model.
AttendedPairs attended_pairs(const ModelConfig&, AttentionKind, int64_t T, const DocumentMix& = {});
AttendedPairs attended_pairs(const ModelConfig&, int64_t layer, int64_t T, const DocumentMix& = {});

// Forward and backward FLOPs over B sequences with T tokens, as executed. Products with weights: 6 FLOPs per weight and
// token (embedding lookups are free). Attention: per pair, 2 products in forward, 5 in backward and 1 for the selection
// scores. Recomputation is added. Not counted are the products in gates and phi, less than 1%, and two more products
// per pair where backward uses two kernels (fp32, heads other than (64, 64) and (128, 128); kernels/README.md). The mix
// tells which documents the sequences hold, on average.
double training_flops(const ModelConfig&, int64_t B, int64_t T, const RecomputePlan& = {}, const DocumentMix& = {});
// How many FLOPs a run with adapters has less (model/lora.h): no gradients of frozen weights, but the adapters'
// products.
double lora_flops_less(const ModelConfig&, const std::optional<LoraConfig>&, int64_t B, int64_t T);
// A taught index's FLOPs in a dense pass (Model::attend_densely), which the dense model's training_flops() lacks.
double dense_index_flops(const ModelConfig&, int64_t B, int64_t T, const DocumentMix& = {});
// FLOPs for what backward computes again.
double replay_flops(const ModelConfig&, int64_t B, int64_t T, const RecomputePlan&, const DocumentMix& = {});

// FLOPs for matrix products with weights in forward and backward: 6 per weight and token.
struct ProductFlops {
  double layers = 0, head = 0;
};
ProductFlops product_flops(const ModelConfig&, int64_t B, int64_t T);

// training_flops() by what computes them, recomputation included.
struct PartFlops {
  ProductFlops products;
  double cmp = 0, sel = 0, win = 0, dense = 0;   // attention; cmp: with the selection's scores
  double index_scores = 0, index_gradients = 0;  // a taught index: it scores all keys, and is taught by some
  double attention() const { return cmp + sel + win + dense; }
  double all() const { return products.layers + products.head + attention() + index_scores + index_gradients; }
};
PartFlops flops_by_part(const ModelConfig&, int64_t B, int64_t T, const RecomputePlan& = {}, const DocumentMix& = {});

// FLOPs by which models with different attention are compared: as for a model with the same weights and plain causal
// attention, with two products per pair in forward and four in backward, and without recomputation.
double dense_equivalent_flops(const ModelConfig&, int64_t B, int64_t T);

// A card's dense bf16 peak in FLOP/s, as its vendor states it; found by the card's name; 0 if unknown.
double peak_bf16_flops(std::string_view device_name);

}  // namespace triad
