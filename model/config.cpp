#include "model/config.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/check.h"
#include "engine/process/counted.h"
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

// Whether each layer is in the ranges; empty if there are none. key: what the text is the value of.
std::vector<bool> named_layers(const std::string& ranges, int64_t n_layers, std::string_view key) {
  if (ranges.empty()) return {};
  constexpr std::string_view kAllowed = "ranges of layers such as 0:2,30:32";
  std::vector<bool> named(static_cast<size_t>(n_layers));
  for (const LayerRange& range : parse_layer_ranges(ranges, n_layers, key, kAllowed)) {
    if (!range.word.empty()) fail_usage("{} is \"{}\": {} is allowed", key, ranges, kAllowed);
    std::fill(named.begin() + range.begin, named.begin() + range.end, true);
  }
  return named;
}

// The numbers, separated by commas. (If fmt::join formats doubles, gcc 13 warns about overflows in fmt that don't
// exist.)
std::string joined(const std::vector<double>& numbers) {
  std::string text;
  for (const double x : numbers) text += fmt::format("{}{}", text.empty() ? "" : ", ", x);
  return text;
}

// Throws for a key of the gates that says what a model without gates cannot do.
void check_without_gates(const NsaConfig& c) {
  const GateOptions none;
  const std::string why = c.branches == Branches::all
                              ? "which no layer has"
                              : fmt::format("and that is {}, without gates", word_of(c.branches));
  const auto refuse = [&](bool set, const char* key, const auto& value) {
    if (set) fail_usage("nsa.{} is {}: it needs nsa.branches cmp,sel,win, {}", key, value, why);
  };
  refuse(c.gate.kind != none.kind, "gate", word_of(c.gate.kind));
  refuse(c.gate.temperature != none.temperature, "gate_temperature", c.gate.temperature);
  refuse(!c.gate_init.empty(), "gate_init", fmt::format("[{}]", joined(c.gate_init)));
  refuse(c.gate.force != none.force, "force_branch", word_of(c.gate.force));
  refuse(c.gate.uniform, "uniform_gate", c.gate.uniform);
  refuse(c.gate.stop_gradient, "stopgrad_gates", c.gate.stop_gradient);
}

void check_gates(const NsaConfig& c) {
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

// The options of a layer, gates aside. A group's keys that its own branches do not need were not checked when it was
// read, and other branches in nsa.layers may need them.
void check_layer(const NsaConfig& c) {
  const auto check = [](const char* key, int64_t value, const Rule& rule) {
    if (!rule.allows(static_cast<double>(value))) fail_usage("nsa.{} is {}: {} is needed", key, value, rule.str());
  };
  if (c.branches != Branches::selected) check("w", c.w, kWindowTokens);
  if (c.branches == Branches::window) return;
  check("l_sel", c.l_sel, kBlockTokens);
  check("n_sel", c.n_sel, kBlockTokens);
  if (c.n_sel < c.init_blocks + c.local_blocks)
    fail_usage("nsa.n_sel is {}: at least init_blocks + local_blocks = {} are needed", c.n_sel,
               c.init_blocks + c.local_blocks);
  if (c.l_sel % c.every != 0)
    fail_usage("nsa.select_every is {}, which does not divide nsa.l_sel {}", c.every, c.l_sel);
  if (c.selector == Selector::index && c.d_index % 2 != 0)
    fail_usage("nsa.d_index is {}: it must be even, for the rotation turns pairs", c.d_index);
  if (c.branches == Branches::selected) {
    if (c.selector != Selector::index)
      fail_usage("nsa.branches is sel: it needs nsa.selector index, and that is {}", word_of(c.selector));
    return;
  }
  check("l", c.l, kBlockTokens);
  check("d", c.d, kBlockTokens);
  if (c.l % c.d != 0) fail_usage("nsa.d is {}, which does not divide nsa.l {}", c.d, c.l);
  if (c.l_sel % c.d != 0) fail_usage("nsa.d is {}, which does not divide nsa.l_sel {}", c.d, c.l_sel);
}

}  // namespace

NsaConfig NsaLayers::over(NsaConfig group) const {
  const auto replace = [](auto& value, const auto& by) { value = by.value_or(value); };
  replace(group.branches, branches);
  replace(group.l, l);
  replace(group.d, d);
  replace(group.l_sel, l_sel);
  replace(group.n_sel, n_sel);
  replace(group.w, w);
  replace(group.init_blocks, init_blocks);
  replace(group.local_blocks, local_blocks);
  replace(group.selector, selector);
  replace(group.d_index, d_index);
  replace(group.every, select_every);
  return group;
}

AttentionKind ModelConfig::kind_with(const NsaConfig& options) const {
  if (!has_nsa()) return attention;
  switch (options.branches) {
    case Branches::all:
      return AttentionKind::nsa;
    case Branches::selected:
      return AttentionKind::selected;
    case Branches::window:
      return AttentionKind::window;
  }
  return attention;
}

int64_t ModelConfig::count_layers(AttentionKind kind) const {
  int64_t count = 0;
  for (int64_t i = 0; i < n_layers; ++i) count += attention_of(i) == kind;
  return count;
}

int64_t ModelConfig::count_nsa_layers() const {
  return count_layers(AttentionKind::nsa) + count_layers(AttentionKind::selected);
}

std::string ModelConfig::layers_text() const {
  const std::pair<int64_t, const char*> counts[] = {{count_nsa_layers(), "NSA"},
                                                    {count_layers(AttentionKind::window), "a sliding window"},
                                                    {count_layers(AttentionKind::dense), "dense attention"}};
  std::vector<std::string> parts;
  for (const auto& [count, what] : counts)
    if (count > 0)
      parts.push_back(
          fmt::format("{} with {}", parts.empty() ? counted(count, "layer") : fmt::format("{}", count), what));
  std::string text = parts.front();
  for (size_t i = 1; i < parts.size(); ++i) text += (i + 1 == parts.size() ? " and " : ", ") + parts[i];
  return text + rotation_text();
}

std::string ModelConfig::rotation_text() const {
  return nope_layers.empty() ? "" : ", no rotation in layers " + nope_layers;
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
  constexpr std::string_view kKey = "model.dense_layers";
  std::vector<bool> dense = named_layers(dense_layers, n_layers, kKey);
  if (dense.empty() || !has_nsa()) return;  // the key may stay in the dense control run's config, as the nsa group may
  if (std::find(dense.begin(), dense.end(), false) == dense.end())
    fail_usage("{} is \"{}\", which is every layer: model.attention dense makes such a model", kKey, dense_layers);
  dense_ = std::move(dense);
}

void ModelConfig::resolve_nsa_layers() {
  nsa_.clear();
  std::vector<NsaConfig> options(nsa.layers.empty() ? 0 : static_cast<size_t>(n_layers), nsa);
  std::vector<int64_t> entry_of(options.size(), -1);
  for (size_t i = 0; i < nsa.layers.size(); ++i) {
    const NsaLayers& entry = nsa.layers[i];
    const std::string key = fmt::format("nsa.layers[{}].layers", i);
    constexpr std::string_view kAllowed = "ranges of layers such as 0:4,8:12";
    for (const LayerRange& range : parse_layer_ranges(entry.layers, n_layers, key, kAllowed)) {
      if (!range.word.empty()) fail_usage("{} is \"{}\": {} is allowed", key, entry.layers, kAllowed);
      for (int64_t layer = range.begin; layer < range.end; ++layer) {
        int64_t& named_by = entry_of[static_cast<size_t>(layer)];
        if (named_by >= 0)
          fail_usage("{} is \"{}\": layer {} is named twice, first in nsa.layers[{}]", key, entry.layers, layer,
                     named_by);
        named_by = static_cast<int64_t>(i);
        options[static_cast<size_t>(layer)] = entry.over(nsa);
      }
    }
    try {
      if (has_nsa()) check_layer(entry.over(nsa));
    } catch (const UsageError& e) { fail_usage("nsa.layers[{}], for layers {}: {}", i, entry.layers, e.what()); }
  }
  if (has_nsa()) nsa_ = std::move(options);
}

void ModelConfig::resolve() {
  if (mlp_hidden == 0) mlp_hidden = mlp == MlpKind::silu ? 4 * dim : (8 * dim / 3 + 63) / 64 * 64;
  if (n_heads % n_kv_groups != 0)
    fail_usage("model.n_kv_groups is {}, which does not divide model.n_heads {}", n_kv_groups, n_heads);
  if (d_k % 2 != 0) fail_usage("model.d_k is {}: it must be even, for the rotation turns pairs", d_k);
  check_rope(*this);
  nope_ = named_layers(nope_layers, n_layers, "model.nope_layers");
  resolve_dense_layers();
  if (has_nsa()) check_layer(nsa);
  resolve_nsa_layers();
  if (!has_nsa()) return;
  has_gates() ? check_gates(nsa) : check_without_gates(nsa);
}

}  // namespace triad
