#include "model/config.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/check.h"
#include "model/layer_ranges.h"

namespace triad {

namespace {

void check_rope(const ModelConfig& c) {
  if (c.rope_scaling == RopeScaling::none) return;
  const std::string_view word = word_of(c.rope_scaling);
  if (c.rope_scale != 1)
    fail_usage("model.rope_scale is {}, and model.rope_scaling is {}: with it rope_scale must be 1", c.rope_scale,
               word);
  if (c.rope_scaling == RopeScaling::llama3 && c.rope_high_freq <= c.rope_low_freq)
    fail_usage("model.rope_high_freq is {}: it must be above model.rope_low_freq, which is {}", c.rope_high_freq,
               c.rope_low_freq);
  if (c.rope_scaling != RopeScaling::yarn) return;
  if (c.rope_beta_fast <= c.rope_beta_slow)
    fail_usage("model.rope_beta_fast is {}: it must be above model.rope_beta_slow, which is {}", c.rope_beta_fast,
               c.rope_beta_slow);
  if (c.rope_theta <= 1)
    fail_usage("model.rope_theta is {}: with model.rope_scaling yarn it must be above 1", c.rope_theta);
}

// The numbers, separated by commas. (If fmt::join formats doubles, gcc 13 warns about overflows in fmt that don't
// exist.)
std::string joined(const std::vector<double>& numbers) {
  std::string text;
  for (const double x : numbers) text += fmt::format("{}{}", text.empty() ? "" : ", ", x);
  return text;
}

// Throws for a key of the gates that says what one softmax, without gates, cannot do.
void check_one_softmax(const NsaConfig& c) {
  const GateOptions none;
  const auto refuse = [](bool set, const char* key, const auto& value) {
    if (set) fail_usage("nsa.{} is {}: it needs nsa.branches cmp,sel,win, and that is sel, without gates", key, value);
  };
  refuse(c.gate.kind != none.kind, "gate", word_of(c.gate.kind));
  refuse(c.gate.temperature != none.temperature, "gate_temperature", c.gate.temperature);
  refuse(!c.gate_init.empty(), "gate_init", fmt::format("[{}]", joined(c.gate_init)));
  refuse(c.gate.force != none.force, "force_branch", word_of(c.gate.force));
  refuse(c.gate.uniform, "uniform_gate", c.gate.uniform);
  refuse(c.gate.stop_gradient, "stopgrad_gates", c.gate.stop_gradient);
  if (c.selector != Selector::index)
    fail_usage("nsa.branches is sel: it needs nsa.selector index, and that is {}", word_of(c.selector));
}

void check_nsa(const NsaConfig& c) {
  if (c.n_sel < c.init_blocks + c.local_blocks)
    fail_usage("nsa.n_sel is {}: at least init_blocks + local_blocks = {} are needed", c.n_sel,
               c.init_blocks + c.local_blocks);
  if (c.selector == Selector::index && c.d_index % 2 != 0)
    fail_usage("nsa.d_index is {}: it must be even, for the rotation turns pairs", c.d_index);
  if (c.branches == Branches::selected) return check_one_softmax(c);
  if (c.l % c.d != 0) fail_usage("nsa.d is {}, which does not divide nsa.l {}", c.d, c.l);
  if (c.l_sel % c.d != 0) fail_usage("nsa.d is {}, which does not divide nsa.l_sel {}", c.d, c.l_sel);
  if (c.gate.uniform && c.gate.force != Branch::none)
    fail_usage("nsa.uniform_gate is true and nsa.force_branch is {}: only one of them can hold", word_of(c.gate.force));
  if (c.gate_init.empty()) return;
  if (c.gate_init.size() != 3)
    fail_usage("nsa.gate_init is [{}]: three numbers are needed, for cmp, sel and win", joined(c.gate_init));
  for (const double g : c.gate_init)
    if (c.gate.kind == GateKind::sigmoid && g >= 1)
      fail_usage("nsa.gate_init is [{}]: with nsa.gate sigmoid each number must be below 1, and {} is not",
                 joined(c.gate_init), g);
}

}  // namespace

int64_t ModelConfig::count_nsa_layers() const {
  int64_t count = 0;
  for (int64_t i = 0; i < n_layers; ++i) count += attention_of(i) != AttentionKind::dense;
  return count;
}

RopeOptions ModelConfig::rope() const {
  return {.theta = rope_theta,
          .scale = rope_scale,
          .scaling = rope_scaling,
          .factor = rope_factor,
          .original_len = rope_original_len,
          .low_freq = rope_low_freq,
          .high_freq = rope_high_freq,
          .beta_fast = rope_beta_fast,
          .beta_slow = rope_beta_slow};
}

void ModelConfig::resolve_dense_layers() {
  dense_.clear();
  if (dense_layers.empty()) return;
  constexpr std::string_view kKey = "model.dense_layers", kAllowed = "ranges of layers such as 0:2,30:32";
  std::vector<bool> dense(static_cast<size_t>(n_layers));
  for (const LayerRange& range : parse_layer_ranges(dense_layers, n_layers, kKey, kAllowed)) {
    if (!range.word.empty()) fail_usage("{} is \"{}\": {} is allowed", kKey, dense_layers, kAllowed);
    std::fill(dense.begin() + range.begin, dense.begin() + range.end, true);
  }
  if (!has_nsa()) return;  // the key may stay in the dense control run's config, as the nsa group may
  if (std::find(dense.begin(), dense.end(), false) == dense.end())
    fail_usage("{} is \"{}\", which is every layer: model.attention dense makes such a model", kKey, dense_layers);
  dense_ = std::move(dense);
}

void ModelConfig::resolve() {
  if (mlp_hidden == 0) mlp_hidden = mlp == MlpKind::silu ? 4 * dim : (8 * dim / 3 + 63) / 64 * 64;
  if (n_heads % n_kv_groups != 0)
    fail_usage("model.n_kv_groups is {}, which does not divide model.n_heads {}", n_kv_groups, n_heads);
  if (d_k % 2 != 0) fail_usage("model.d_k is {}: it must be even, for the rotation turns pairs", d_k);
  check_rope(*this);
  resolve_dense_layers();
  if (has_nsa()) check_nsa(nsa);
}

}  // namespace triad
