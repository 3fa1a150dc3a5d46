#include "model/flops.h"

#include <algorithm>

#include "model/attention.h"
#include "model/params.h"

namespace triad {

namespace {

double triangle(double n) { return n * (n + 1) / 2; }

// Products for a taught index: with its weights in forward and backward, where the layer's input gets no gradient; and
// per pair that teaches it, the student in forward and backward and two gradients.
constexpr double kIndexWeightProducts = 2, kIndexProducts = 4;

// The pairs of the selected branch, and of a taught index.
AttendedPairs selected_pairs(const NsaConfig& n, int64_t T) {
  // A query selects min(n_sel, number of blocks up to its own) blocks. All are full except its own, where it sees the
  // keys up to itself. Queries in block i see min(n_sel - 1, i) full ones; in the first `growing` blocks they see i.
  const int64_t blocks = T / n.l_sel, growing = std::min(blocks, n.n_sel);
  const double block = static_cast<double>(n.l_sel), rest = static_cast<double>(T % n.l_sel);
  const double full = triangle(static_cast<double>(growing - 1)) +
                      static_cast<double>(blocks - growing) * static_cast<double>(n.n_sel - 1);
  AttendedPairs pairs;
  pairs.sel = block * block * full + static_cast<double>(blocks) * triangle(block) +
              rest * block * static_cast<double>(std::min(n.n_sel - 1, blocks)) + triangle(rest);
  if (n.selector == Selector::index) pairs.index = triangle(static_cast<double>(T)) / static_cast<double>(n.every);
  return pairs;
}

double window_pairs(const NsaConfig& n, int64_t T) {
  const double w = static_cast<double>(std::min(n.w, T));
  return static_cast<double>(T) * w - w * (w - 1) / 2;
}

AttendedPairs nsa_pairs(const NsaConfig& n, int64_t T) {
  AttendedPairs pairs = selected_pairs(n, T);
  // Compressed block k (0-based) is visible to the queries at positions from k*d + l - 1 on.
  const int64_t Tc = compressed_length(T, n.l, n.d);
  pairs.cmp = static_cast<double>(Tc) * static_cast<double>(T - n.l + 1) -
              static_cast<double>(n.d) * triangle(static_cast<double>(Tc) - 1);
  if (Tc == 0) pairs.cmp = 0;
  pairs.win = window_pairs(n, T);
  return pairs;
}

AttendedPairs pairs_of_row(const NsaConfig& n, AttentionKind kind, int64_t T) {
  switch (kind) {
    case AttentionKind::nsa:
      return nsa_pairs(n, T);
    case AttentionKind::selected:
      return selected_pairs(n, T);
    case AttentionKind::window:
      return {.win = window_pairs(n, T)};
    case AttentionKind::dense:
      return {.dense = triangle(static_cast<double>(T))};
  }
  return {};
}

AttendedPairs pairs_of(const NsaConfig& n, AttentionKind kind, int64_t T, const DocumentMix& mix) {
  if (mix.rows == 0) return pairs_of_row(n, kind, T);
  AttendedPairs mean;
  for (const auto& [length, number] : mix.documents) {
    const AttendedPairs one = pairs_of_row(n, kind, length);
    const double per_row = static_cast<double>(number) / static_cast<double>(mix.rows);
    mean.cmp += per_row * one.cmp, mean.sel += per_row * one.sel, mean.win += per_row * one.win;
    mean.dense += per_row * one.dense, mean.index += per_row * one.index;
  }
  return mean;
}

}  // namespace

AttendedPairs attended_pairs(const ModelConfig& c, AttentionKind kind, int64_t T, const DocumentMix& mix) {
  return pairs_of(c.nsa, kind, T, mix);
}

AttendedPairs attended_pairs(const ModelConfig& c, int64_t layer, int64_t T, const DocumentMix& mix) {
  return pairs_of(c.nsa_at(layer), c.attention_of(layer), T, mix);
}

ProductFlops product_flops(const ModelConfig& c, int64_t B, int64_t T) {
  const double tokens = static_cast<double>(B * T);
  ProductFlops flops;
  // Only the head: the embedding is a lookup without FLOPs.
  flops.head = 6 * tokens * static_cast<double>(c.vocab_size * c.dim);
  for (const ParamSpec& p : param_specs(c))
    if (p.is_layer_product())
      flops.layers += 6 * tokens * static_cast<double>(p.shape.numel());
    else if (is_index(p.role) && p.decays())
      flops.layers += kIndexWeightProducts * 2 * tokens * static_cast<double>(p.shape.numel());
  return flops;
}

namespace {

// Forward FLOPs for a part of a layer: its products with weights.
double replayed_products(const ModelConfig& c, int64_t layer, int64_t B, int64_t T, LayerPart part) {
  const double product = 2 * static_cast<double>(B * T) * static_cast<double>(c.dim);  // FLOPs per matrix row
  switch (part) {
    case LayerPart::attention:
      return product * static_cast<double>(qkv_width(c, c.attention_of(layer)) +
                                           (c.has_index(layer) ? index_width(c, layer) : 0));
    case LayerPart::qk:
      return 0;  // no product
    case LayerPart::out_proj:
      return product * static_cast<double>(c.n_heads * c.d_v);
    case LayerPart::mlp_in:
      return product * static_cast<double>(c.mlp == MlpKind::silu ? c.mlp_hidden : 2 * c.mlp_hidden);
  }
  return 0;
}

}  // namespace

double replay_flops(const ModelConfig& c, int64_t B, int64_t T, const RecomputePlan& plan, const DocumentMix& mix) {
  double flops = 0;
  for (int64_t i = 0; i < c.n_layers; ++i) {
    for (const LayerPart part : kLayerParts)
      if (plan.replays(i, part)) flops += replayed_products(c, i, B, T, part);
    if (plan.replays(i, LayerPart::attention))
      flops += 2 * attended_pairs(c, i, T, mix).all() * static_cast<double>(B * c.n_heads * (c.d_k + c.d_v));
  }
  return flops;
}

double training_flops(const ModelConfig& c, int64_t B, int64_t T, const RecomputePlan& recompute,
                      const DocumentMix& mix) {
  return flops_by_part(c, B, T, recompute, mix).all();
}

PartFlops flops_by_part(const ModelConfig& c, int64_t B, int64_t T, const RecomputePlan& recompute,
                        const DocumentMix& mix) {
  PartFlops flops;
  flops.products = product_flops(c, B, T);
  const double dk = static_cast<double>(c.d_k), dv = static_cast<double>(c.d_v);
  const double heads = static_cast<double>(B * c.n_heads), groups = static_cast<double>(B * c.n_kv_groups);
  for (int64_t i = 0; i < c.n_layers; ++i) {
    const AttendedPairs p = attended_pairs(c, i, T, mix);
    const bool again = recompute.replays(i, LayerPart::attention);
    const double per_pair = 2 * heads * (dk + dv + 3 * dk + 2 * dv + (again ? dk + dv : 0));
    flops.cmp += per_pair * p.cmp;
    flops.sel += per_pair * p.sel;
    flops.win += per_pair * p.win;
    flops.dense += per_pair * p.dense;
    if (c.has_index(i)) {
      const double width = 2 * groups * static_cast<double>(c.nsa_at(i).d_index);
      flops.index_scores += width * p.index;
      flops.index_gradients += width * kIndexProducts * p.sel;
    } else {
      flops.cmp += 2 * heads * p.cmp * dk / static_cast<double>(c.nsa_at(i).every);
    }
    for (const LayerPart part : kLayerParts)
      if (recompute.replays(i, part)) flops.products.layers += replayed_products(c, i, B, T, part);
  }
  return flops;
}

double lora_flops_less(const ModelConfig& c, const std::optional<LoraConfig>& lora, int64_t B, int64_t T) {
  if (!lora) return 0;
  // Products with A: forward, again in backward, and for the gradients of x and A; with B: forward and two gradients.
  constexpr double kOfA = 4 * 2, kOfB = 3 * 2;
  double less = 2 * static_cast<double>(c.vocab_size * c.dim);
  for (const ParamSpec& spec : param_specs(c, lora)) {
    const double elements = static_cast<double>(spec.shape.numel());
    if (spec.frozen && spec.is_layer_product()) less += 2 * elements;
    if (is_adapter(spec.role)) less -= (spec.name.ends_with("lora_A.weight") ? kOfA : kOfB) * elements;
  }
  return less * static_cast<double>(B * T);
}

double dense_index_flops(const ModelConfig& c, int64_t B, int64_t T, const DocumentMix& mix) {
  double weights = 0, widths = 0;  // sums over the indices
  for (const ParamSpec& p : param_specs(c))
    if (is_index(p.role) && p.decays()) weights += static_cast<double>(p.shape.numel());
  for (int64_t i = 0; i < c.n_layers; ++i) widths += c.has_index(i) ? static_cast<double>(c.nsa_at(i).d_index) : 0;
  const double pairs = attended_pairs(c, AttentionKind::dense, T, mix).dense;
  return kIndexWeightProducts * 2 * static_cast<double>(B * T) * weights +
         kIndexProducts * 2 * pairs * widths * static_cast<double>(B * c.n_kv_groups);
}

double dense_equivalent_flops(const ModelConfig& c, int64_t B, int64_t T) {
  const ProductFlops products = product_flops(c, B, T);
  const double pairs = static_cast<double>(T) * static_cast<double>(T + 1) / 2;
  const double attention = 6 * pairs * static_cast<double>(c.d_k + c.d_v);
  return products.layers + products.head + static_cast<double>(B * c.n_layers * c.n_heads) * attention;
}

double peak_bf16_flops(std::string_view name) {
  constexpr std::pair<std::string_view, double> kPeaks[] = {{"B200", 2250e12},  {"H200", 989.5e12},
                                                            {"H100", 989.5e12}, {"A100", 312e12},
                                                            {"L40S", 362e12},   {"RTX 4090", 165.2e12}};
  for (const auto& [part, peak] : kPeaks)
    if (name.find(part) != std::string_view::npos) return peak;
  return 0;
}

}  // namespace triad
