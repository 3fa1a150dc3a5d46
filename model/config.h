// A model's hyperparameters: the groups `model` and `nsa` in a config file.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "engine/fields.h"
#include "kernels/nsa/nsa.h"
#include "kernels/ops/rope.h"

namespace triad {

enum class MlpKind { silu, swiglu };
// selected, window: NSA with nsa.branches sel or win. A config says nsa for them.
enum class AttentionKind { nsa, dense, selected, window };

// An entry of nsa.layers: options in which some layers differ from the group nsa.
struct NsaLayers {
  std::string layers;  // ranges "0:4,8:12"
  std::optional<Branches> branches = {};
  std::optional<int64_t> l = {}, d = {}, l_sel = {}, n_sel = {}, w = {}, init_blocks = {}, local_blocks = {};
  std::optional<Selector> selector = {};
  std::optional<int64_t> d_index = {};
  std::optional<int64_t> select_every = {};

  NsaConfig over(NsaConfig group) const;  // the group with these values
};
// The group nsa: options of all layers, and in which some layers differ.
struct NsaGroup : NsaConfig {
  NsaGroup() = default;
  NsaGroup(NsaConfig all) : NsaConfig(std::move(all)) {}
  std::vector<NsaLayers> layers;
};

struct ModelConfig {
  int64_t dim = 0, n_layers = 0, n_heads = 0, n_kv_groups = 0, d_k = 0, d_v = 0, vocab_size = 0;
  MlpKind mlp = MlpKind::silu;
  int64_t mlp_hidden = 0;  // if 0, resolve() sets 4 * dim, or for swiglu 8/3 * dim rounded up to a multiple of 64
  AttentionKind attention = AttentionKind::nsa;
  std::string dense_layers;  // an NSA model's layers with dense attention, as ranges "0:2,30:32"
  bool tie_embeddings = false;
  bool qkv_bias = false, qk_norm = false;
  double rope_theta = 10000, rope_scale = 1, init_std = 0.02, norm_eps = 1e-6;
  RopeScaling rope_scaling = RopeScaling::none;
  int64_t rope_original_len = 8192;
  double rope_factor = 8, rope_low_freq = 1, rope_high_freq = 4, rope_beta_fast = 32, rope_beta_slow = 1;
  std::string nope_layers;  // layers whose queries and keys are not rotated, as ranges "0:2,30:32"
  NsaGroup nsa;

  int64_t group_size() const { return n_heads / n_kv_groups; }  // G: query heads per key/value group
  // A layer's options: those of the group, and of the entry of nsa.layers that names it. Layer -1: the group's.
  const NsaConfig& nsa_at(int64_t layer) const {
    const auto i = static_cast<size_t>(layer);
    return i < nsa_.size() ? nsa_[i] : nsa;
  }
  AttentionKind attention_of(int64_t layer) const {
    const auto i = static_cast<size_t>(layer);
    return i < dense_.size() && dense_[i] ? AttentionKind::dense : kind_with(nsa_at(layer));
  }
  bool has_nsa() const { return attention == AttentionKind::nsa; }  // whether any layer has another kind than dense
  // Whether a layer has gates; has selection lists; selects by a taught index. Then the same for any layer.
  bool has_gates(int64_t layer) const { return attention_of(layer) == AttentionKind::nsa; }
  bool has_lists(int64_t layer) const { return has_gates(layer) || attention_of(layer) == AttentionKind::selected; }
  bool has_index(int64_t layer) const { return has_lists(layer) && nsa_at(layer).selector == Selector::index; }
  // The least number of tokens that is a multiple of every layer's nsa.select_every.
  int64_t tokens_per_list() const {
    int64_t tokens = 1;
    for (int64_t i = 0; i < n_layers; ++i)
      if (has_lists(i)) tokens = std::lcm(tokens, nsa_at(i).every);
    return tokens;
  }
  bool has_gates() const {
    return any_layer([&](int64_t i) { return has_gates(i); });
  }
  bool has_lists() const {
    return any_layer([&](int64_t i) { return has_lists(i); });
  }
  bool has_index() const {
    return any_layer([&](int64_t i) { return has_index(i); });
  }
  int64_t count_layers(AttentionKind) const;
  int64_t count_nsa_layers() const;  // the layers with selection lists
  // The layers' attention: "28 layers with NSA, 2 with a sliding window and 2 with dense attention", and
  // rotation_text().
  std::string layers_text() const;
  // ", no rotation in layers 3:4,7:8", or nothing if all layers rotate.
  std::string rotation_text() const;
  // Whether a layer's queries and keys, and its index's, are rotated.
  bool rotates(int64_t layer) const {
    const auto i = static_cast<size_t>(layer);
    return i >= nope_.size() || !nope_[i];
  }
  RopeOptions rope() const;
  // Stored rows in embedding and head: the vocabulary size rounded up to a multiple of 128, which makes matrix products
  // faster.
  int64_t padded_vocab() const { return (vocab_size + 127) / 128 * 128; }
  // Fills in the defaults that depend on other fields. Then throws a UsageError with key, value and rule if the values
  // can't be combined (n_kv_groups must divide n_heads, d must divide l, ...).
  void resolve();

 private:
  void resolve_dense_layers();
  void resolve_nsa_layers();
  // The kind of a layer with these options that dense_layers does not name.
  AttentionKind kind_with(const NsaConfig&) const;
  template <class Holds>
  bool any_layer(Holds&& holds) const {
    if (nsa_.empty()) return holds(-1);  // layers that dense_layers does not name are alike, and there is one
    for (int64_t i = 0; i < n_layers; ++i)
      if (holds(i)) return true;
    return false;
  }

  std::vector<bool> dense_;     // whether dense_layers names the layer, by index; empty in a model without NSA
  std::vector<bool> nope_;      // whether nope_layers does; empty if all layers rotate
  std::vector<NsaConfig> nsa_;  // the layers' options; empty without nsa.layers
};

template <>
struct EnumWords<MlpKind> {
  static constexpr std::pair<std::string_view, MlpKind> words[] = {{"silu", MlpKind::silu},
                                                                   {"swiglu", MlpKind::swiglu}};
};
template <>
struct EnumWords<AttentionKind> {
  static constexpr std::pair<std::string_view, AttentionKind> words[] = {{"nsa", AttentionKind::nsa},
                                                                         {"dense", AttentionKind::dense}};
};
template <>
struct EnumWords<RopeScaling> {
  static constexpr std::pair<std::string_view, RopeScaling> words[] = {
      {"none", RopeScaling::none}, {"llama3", RopeScaling::llama3}, {"yarn", RopeScaling::yarn}};
};
template <>
struct EnumWords<Phi> {
  static constexpr std::pair<std::string_view, Phi> words[] = {
      {"avg", Phi::avg}, {"conv", Phi::conv}, {"mlp", Phi::mlp}};
};
template <>
struct EnumWords<GateKind> {
  static constexpr std::pair<std::string_view, GateKind> words[] = {{"softmax", GateKind::softmax},
                                                                    {"sigmoid", GateKind::sigmoid}};
};
template <>
struct EnumWords<Branch> {
  static constexpr std::pair<std::string_view, Branch> words[] = {
      {"none", Branch::none}, {"cmp", Branch::cmp}, {"sel", Branch::sel}, {"win", Branch::win}};
};

template <>
struct EnumWords<Selector> {
  static constexpr std::pair<std::string_view, Selector> words[] = {{"compressed", Selector::compressed},
                                                                    {"index", Selector::index}};
};
template <>
struct EnumWords<Branches> {
  static constexpr std::pair<std::string_view, Branches> words[] = {
      {"cmp,sel,win", Branches::all}, {"sel", Branches::selected}, {"win", Branches::window}};
};

template <class V>
void visit(ModelConfig& c, V&& v) {
  v("dim", c.dim, "model width C", required(at_least(1).up_to(1 << 20)));
  v("n_layers", c.n_layers, "layers", required(at_least(1).up_to(10000)));
  v("n_heads", c.n_heads, "query heads Hq", required(at_least(1).up_to(1 << 16)));
  v("n_kv_groups", c.n_kv_groups, "key/value groups Hkv; divides n_heads", required(at_least(1).up_to(1 << 16)));
  v("d_k", c.d_k, "width of a query/key head; even", required(at_least(2).up_to(256)));
  v("d_v", c.d_v, "width of a value head", required(at_least(1).up_to(256)));
  v("vocab_size", c.vocab_size, "tokens V; 0: those of the data's tokenizer, or as the shards' manifest.json says",
    at_least(0).up_to(1e8));
  v("mlp", c.mlp, "fc2(SiLU(fc1 x)), or SwiGLU", Rule{});
  v("mlp_hidden", c.mlp_hidden, "hidden units; 0: 4*dim, swiglu 8/3*dim up to a multiple of 64",
    at_least(0).up_to(1 << 22));
  v("attention", c.attention, "three-branch NSA, or plain causal attention as the control", Rule{});
  v("dense_layers", c.dense_layers,
    "layers of an NSA model that have plain causal attention: ranges with exclusive ends, such as 0:2,30:32", Rule{});
  v("tie_embeddings", c.tie_embeddings, "lm_head shares the embedding's weight", Rule{});
  v("qkv_bias", c.qkv_bias, "biases of the projections of q, k and v", Rule{});
  v("qk_norm", c.qk_norm, "RMSNorm of every head of q and k, before rotation", Rule{});
  v("rope_theta", c.rope_theta, "base of the rotation angles", above(0));
  v("rope_scale", c.rope_scale, "positions are divided by this; 1 with rope_scaling", above(0));
  v("rope_scaling", c.rope_scaling, "frequencies for texts longer than rope_original_len, as in transformers", Rule{});
  v("rope_factor", c.rope_factor, "llama3, yarn: slow pairs turn this much slower", at_least(1));
  v("rope_original_len", c.rope_original_len, "llama3, yarn: tokens of the texts before the scaling",
    at_least(1).up_to(1 << 30));
  v("rope_low_freq", c.rope_low_freq, "llama3: pairs of fewer turns in rope_original_len are slow", above(0));
  v("rope_high_freq", c.rope_high_freq, "llama3: pairs of more turns keep their frequency", above(0));
  v("rope_beta_fast", c.rope_beta_fast, "yarn: pairs of more turns keep their frequency", above(0));
  v("rope_beta_slow", c.rope_beta_slow, "yarn: pairs of fewer turns are slow", above(0));
  v("nope_layers", c.nope_layers,
    "layers without rotation (NoPE): ranges with exclusive ends, such as 3:4,7:8; beside windows that rotate they "
    "attend by content alone, however far away",
    Rule{});
  v("init_std", c.init_std, "standard deviation of fresh weights", above(0));
  v("norm_eps", c.norm_eps, "added to RMSNorm's mean square", above(0));
}

// Limits of the keys that are checked only if the branches need them.
inline constexpr Rule kBlockTokens = at_least(1).up_to(1 << 20), kWindowTokens = at_least(1).up_to(1 << 30);
inline constexpr Rule kInitBlocks = at_least(0).up_to(1 << 20), kLocalBlocks = at_least(1).up_to(1 << 20),
                      kIndexWidth = at_least(2).up_to(256), kEvery = at_least(1).up_to(1 << 20);

template <class V>
void visit(NsaLayers& c, V&& v) {
  v("layers", c.layers, "the layers that differ: ranges with exclusive ends, such as 0:4,8:12", required());
  v("branches", c.branches, "as nsa.branches, for these layers, like the keys after it; absent: the group's", Rule{});
  v("l", c.l, "compression block", kBlockTokens);
  v("d", c.d, "compression stride", kBlockTokens);
  v("l_sel", c.l_sel, "selection block", kBlockTokens);
  v("n_sel", c.n_sel, "selected blocks", kBlockTokens);
  v("w", c.w, "sliding window", kWindowTokens);
  v("init_blocks", c.init_blocks, "first blocks, always selected", kInitBlocks);
  v("local_blocks", c.local_blocks, "current and preceding blocks, always selected", kLocalBlocks);
  v("selector", c.selector, "what scores the blocks", Rule{});
  v("d_index", c.d_index, "width of the index", kIndexWidth);
  v("select_every", c.select_every, "tokens that share a list", kEvery);
}

template <class V>
void visit(NsaGroup& c, V&& v) {
  // First, because it decides which keys after it are required and checked.
  v("branches", c.branches,
    "cmp,sel,win; sel: one softmax over the selected blocks, with k_win and v_win, without gate; needs selector index, "
    "and no l, d, w or phi; or win: one softmax over the sliding window, with k_win and v_win; needs w alone",
    Rule{});
  const auto needed_by = [&](std::initializer_list<Branches> branches, const Rule& rule) {
    return std::find(branches.begin(), branches.end(), c.branches) == branches.end() ? Rule{} : required(rule);
  };
  v("l", c.l, "compression block, tokens", needed_by({Branches::all}, kBlockTokens));
  v("d", c.d, "compression stride, tokens; divides l and l_sel", needed_by({Branches::all}, kBlockTokens));
  v("l_sel", c.l_sel, "selection block l', tokens", needed_by({Branches::all, Branches::selected}, kBlockTokens));
  v("n_sel", c.n_sel, "selected blocks n a query, forced ones included",
    needed_by({Branches::all, Branches::selected}, kBlockTokens));
  v("w", c.w, "sliding window, tokens", needed_by({Branches::all, Branches::window}, kWindowTokens));
  v("phi", c.phi, "compression: mean, learned per-channel weights, or learned map", Rule{});
  v("gate", c.gate.kind, "how the branches are weighed", Rule{});
  v("gate_temperature", c.gate.temperature, "divides the gate's logits", above(0));
  v("init_blocks", c.init_blocks, "first blocks, always selected", kInitBlocks);
  v("local_blocks", c.local_blocks, "current and preceding blocks, always selected", kLocalBlocks);
  v("force_branch", c.gate.force, "gate one-hot: this branch alone", Rule{});
  v("uniform_gate", c.gate.uniform, "gate 1/3 each", Rule{});
  v("stopgrad_gates", c.gate.stop_gradient, "no gradient through the gates", Rule{});
  v("gate_init", c.gate_init, "gates of cmp, sel and win that fresh weights begin with; none: all equal", above(0));
  v("shared_kv", c.shared_kv, "one k and one v, those of the window branch, for all three branches", Rule{});
  v("selector", c.selector,
    "what scores the blocks: the compressed branch's probabilities, or an index, a small head of its own that learns "
    "by a KL loss where the selected branch looks",
    Rule{});
  v("d_index", c.d_index, "selector index: width of its queries and its key; even", kIndexWidth);
  v("index_loss", c.index_loss, "selector index: weight of its loss, summed over the layers, in the objective",
    at_least(0));
  v("select_every", c.every, "tokens that share the list of the first of them, counted in the document; divides l_sel",
    kEvery);
  v("layers", c.layers,
    "layers that differ: a list of objects, each with layers and the keys of the group that they have other values of; "
    "model.dense_layers has the last word",
    Rule{});
}

}  // namespace triad
