#include "model/flops.h"

#include <algorithm>

#include "model/activations.h"
#include "model/params.h"

namespace triad {

AttendedPairs attended_pairs(const ModelConfig& c, int64_t T) {
  AttendedPairs pairs;
  const auto triangle = [](double n) { return n * (n + 1) / 2; };
  const double t = static_cast<double>(T);
  if (c.dense()) {
    pairs.win = triangle(t);
    return pairs;
  }
  const NsaConfig& n = c.nsa;
  // Compressed block k (0-based) is visible to the rows from k*d + l - 1 on.
  const int64_t Tc = compressed_length(T, n.l, n.d);
  pairs.cmp = static_cast<double>(Tc) * static_cast<double>(T - n.l + 1) -
              static_cast<double>(n.d) * triangle(static_cast<double>(Tc) - 1);
  if (Tc == 0) pairs.cmp = 0;
  // A row lists min(n, its blocks) blocks; all are full except its own.
  for (int64_t begin = 0; begin < T; begin += n.l_sel) {
    const double rows = static_cast<double>(std::min(n.l_sel, T - begin));
    const double full = static_cast<double>(std::min(n.n_sel, begin / n.l_sel + 1) - 1);
    pairs.sel += rows * full * static_cast<double>(n.l_sel) + triangle(rows);
  }
  const double w = static_cast<double>(std::min(n.w, T));
  pairs.win = t * w - w * (w - 1) / 2;
  return pairs;
}

ProductFlops product_flops(const ModelConfig& c, int64_t B, int64_t T) {
  const double tokens = static_cast<double>(B * T);
  ProductFlops flops;
  flops.head = 6 * tokens * static_cast<double>(c.vocab_size * c.dim);  // the embedding is a lookup
  for (const ParamSpec& p : param_specs(c))
    if (p.is_layer_product()) flops.layers += 6 * tokens * static_cast<double>(p.shape.numel());
  return flops;
}

double replay_flops(const ModelConfig& c, int64_t B, int64_t T, Recompute recompute) {
  const double tokens = static_cast<double>(B * T), dim = static_cast<double>(c.dim);
  double flops = 0;
  if (covers(recompute, LayerPart::attention)) {
    const AttendedPairs p = attended_pairs(c, T);
    flops += 2 * tokens * dim * static_cast<double>(qkv_width(c)) +
             2 * (p.cmp + p.sel + p.win) * static_cast<double>(B * c.n_heads * (c.d_k + c.d_v));
  }
  if (covers(recompute, LayerPart::out_proj)) flops += 2 * tokens * dim * static_cast<double>(c.n_heads * c.d_v);
  if (covers(recompute, LayerPart::mlp_in))
    flops += 2 * tokens * dim * static_cast<double>(c.mlp == MlpKind::silu ? c.mlp_hidden : 2 * c.mlp_hidden);
  return flops;
}

double training_flops(const ModelConfig& c, int64_t B, int64_t T, const RecomputePlan& recompute) {
  const ProductFlops products = product_flops(c, B, T);
  const AttendedPairs p = attended_pairs(c, T);
  const double dk = static_cast<double>(c.d_k), dv = static_cast<double>(c.d_v);
  const double attention = 2 * (p.cmp + p.sel + p.win) * (dk + dv + 3 * dk + 2 * dv) + 2 * p.cmp * dk;
  double replayed = 0;
  for (int64_t i = 0; i < c.n_layers; ++i) replayed += replay_flops(c, B, T, recompute.of(i));
  return products.layers + products.head + static_cast<double>(B * c.n_layers * c.n_heads) * attention + replayed;
}

double dense_equivalent_flops(const ModelConfig& c, int64_t B, int64_t T) {
  const ProductFlops products = product_flops(c, B, T);
  const double pairs = static_cast<double>(T) * static_cast<double>(T + 1) / 2;
  const double attention = 6 * pairs * static_cast<double>(c.d_k + c.d_v);
  return products.layers + products.head + static_cast<double>(B * c.n_layers * c.n_heads) * attention;
}

double peak_bf16_flops(std::string_view name) {
  constexpr std::pair<std::string_view, double> kPeaks[] = {
      {"H200", 989.5e12}, {"H100", 989.5e12}, {"A100", 312e12}, {"L40S", 362e12}, {"RTX 4090", 165.2e12}};
  for (const auto& [part, peak] : kPeaks)
    if (name.find(part) != std::string_view::npos) return peak;
  return 0;
}

}  // namespace triad
