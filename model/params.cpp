#include "model/params.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "engine/check.h"
#include "engine/random_streams.h"
#include "kernels/ops/cast.h"
#include "kernels/step/initial_values.h"
#include "kernels/step/reduce.h"

namespace triad {

Shape ParamSpec::stored() const {
  Shape s = shape;
  if (padded_rows > 0) s.dim[0] = padded_rows;
  return s;
}

namespace {

using Init = ParamSpec::Init;

// Collects ParamSpecs for one layer, or for the model outside its layers.
class SpecList {
 public:
  SpecList(std::vector<ParamSpec>& all, const ModelConfig& c, std::string prefix, int64_t layer)
      : all_(all), c_(c), prefix_(std::move(prefix)), layer_(layer) {}

  ParamSpec& constant(ParamRole role, const std::string& name, const Shape& shape, double value) {
    return add(role, name, shape, Init::constant, value);
  }
  ParamSpec& normal(ParamRole role, const std::string& name, const Shape& shape) {
    return add(role, name, shape, Init::normal, c_.init_std);
  }
  // Adds a linear layer's weight [out,in].
  ParamSpec& linear(ParamRole role, const std::string& name, int64_t out, int64_t in) {
    ParamSpec& spec = normal(role, name, {out, in});
    spec.product = true;
    return spec;
  }
  // Adds the weight for a linear layer whose output is added to the residual stream; its initial values are smaller.
  ParamSpec& residual_linear(ParamRole role, const std::string& name, int64_t out, int64_t in) {
    ParamSpec& spec = linear(role, name, out, in);
    spec.value = c_.init_std / std::sqrt(2.0 * static_cast<double>(c_.n_layers));
    return spec;
  }

 private:
  ParamSpec& add(ParamRole role, const std::string& name, const Shape& shape, Init init, double value) {
    return all_.emplace_back(
        ParamSpec{.role = role, .layer = layer_, .name = prefix_ + name, .shape = shape, .init = init, .value = value});
  }

  std::vector<ParamSpec>& all_;
  const ModelConfig& c_;
  std::string prefix_;
  int64_t layer_;
};

// Parameter roles in one phi, the MLP that compresses key or value blocks.
struct PhiRoles {
  ParamRole conv, pos, fc1, fc2;
};
constexpr PhiRoles kPhiK = {ParamRole::phi_k_conv, ParamRole::phi_k_pos, ParamRole::phi_k_fc1, ParamRole::phi_k_fc2};
constexpr PhiRoles kPhiV = {ParamRole::phi_v_conv, ParamRole::phi_v_pos, ParamRole::phi_v_fc1, ParamRole::phi_v_fc2};

void add_phi(SpecList& list, const PhiRoles& roles, const std::string& name, const NsaConfig& c, int64_t width) {
  const int64_t l = c.l;
  if (c.phi == Phi::conv)
    list.constant(roles.conv, name + ".weight", {l, width}, 1.0 / static_cast<double>(l)).branch = Branch::cmp;
  if (c.phi == Phi::mlp) {
    list.normal(roles.pos, name + ".pos", {l, width}).branch = Branch::cmp;
    list.normal(roles.fc1, name + ".fc1.weight", {2 * width, l * width}).branch = Branch::cmp;
    list.normal(roles.fc2, name + ".fc2.weight", {width, 2 * width}).branch = Branch::cmp;
  }
}

// gate.fc2 biases with which the gates are nsa.gate_init while fc2.weight is 0 (softmax gates: up to a common factor);
// empty if gate_init is not set.
std::vector<double> gate_bias(const NsaConfig& c) {
  std::vector<double> bias;
  for (const double g : c.gate_init) {
    const double z = c.gate.kind == GateKind::sigmoid ? std::log(g / (1 - g)) : std::log(g);
    bias.push_back(c.gate.temperature * z);
  }
  return bias;
}

// A key/value pair in the fused projection.
struct KvPair {
  std::string_view name;
  Branch branch;
};
std::vector<KvPair> pairs_of(const ModelConfig& c, AttentionKind kind) {
  // What dense attention has, and what all branches share, has the window branch's names.
  if (kind != AttentionKind::nsa || c.nsa.shared_kv) return {{"win", Branch::none}};
  return {{"cmp", Branch::cmp}, {"sel", Branch::sel}, {"win", Branch::win}};
}

// The fused q, k, v projection: the matrices, then their biases, then the weights of the q and k norms. Each of the
// three is stored contiguously.
void add_qkv(SpecList& list, const ModelConfig& c, const std::vector<KvPair>& pairs) {
  using enum ParamRole;
  const auto join = [](ParamSpec& spec, Branch branch) { spec.branch = branch, spec.joins_previous = true; };
  list.linear(q_proj, "attn.q_proj.weight", c.n_heads * c.d_k, c.dim);
  for (const auto& [name, branch] : pairs) {
    join(list.linear(k_proj, fmt::format("attn.k_{}_proj.weight", name), c.n_kv_groups * c.d_k, c.dim), branch);
    join(list.linear(v_proj, fmt::format("attn.v_{}_proj.weight", name), c.n_kv_groups * c.d_v, c.dim), branch);
  }
  if (c.qkv_bias) {
    list.constant(q_bias, "attn.q_proj.bias", {c.n_heads * c.d_k}, 0);
    for (const auto& [name, branch] : pairs) {
      join(list.constant(k_bias, fmt::format("attn.k_{}_proj.bias", name), {c.n_kv_groups * c.d_k}, 0), branch);
      join(list.constant(v_bias, fmt::format("attn.v_{}_proj.bias", name), {c.n_kv_groups * c.d_v}, 0), branch);
    }
  }
  if (c.qk_norm) {
    list.constant(q_norm, "attn.q_norm.weight", {c.d_k}, 1);
    for (const auto& [name, branch] : pairs)
      join(list.constant(k_norm, fmt::format("attn.k_{}_norm.weight", name), {c.d_k}, 1), branch);
  }
}

void add_attention(SpecList& list, const ModelConfig& c, int64_t layer) {
  using enum ParamRole;
  const AttentionKind kind = c.attention_of(layer);
  add_qkv(list, c, pairs_of(c, kind));
  switch (kind) {
    case AttentionKind::dense:
    case AttentionKind::selected:
    case AttentionKind::window:
      break;
    case AttentionKind::nsa:
      add_phi(list, kPhiK, "attn.phi_k", c.nsa_at(layer), c.d_k);
      add_phi(list, kPhiV, "attn.phi_v", c.nsa_at(layer), c.d_v);
      list.normal(gate_fc1_weight, "attn.gate.fc1.weight", {c.d_k / 2, c.d_k});
      list.constant(gate_fc1_bias, "attn.gate.fc1.bias", {c.d_k / 2}, 0);
      list.constant(gate_fc2_weight, "attn.gate.fc2.weight", {3, c.d_k / 2}, 0);
      list.constant(gate_fc2_bias, "attn.gate.fc2.bias", {3}, 0).values = gate_bias(c.nsa);
      break;
  }
  list.residual_linear(out_proj, "attn.out_proj.weight", c.dim, c.n_heads * c.d_v);
}

// The index of a layer. Its gradients are added up outside of the layers' segments, like those of gates.
void add_index(SpecList& list, const ModelConfig& c, int64_t layer) {
  using enum ParamRole;
  const int64_t width = c.nsa_at(layer).d_index;
  list.normal(index_q_proj, "attn.index_q_proj.weight", {c.n_kv_groups * width, c.dim});
  list.normal(index_k_proj, "attn.index_k_proj.weight", {width, c.dim}).joins_previous = true;
  if (!c.qk_norm) return;
  list.constant(index_q_norm, "attn.index_q_norm.weight", {width}, 1);
  list.constant(index_k_norm, "attn.index_k_norm.weight", {width}, 1).joins_previous = true;
}

void add_mlp(SpecList& list, const ModelConfig& c) {
  using enum ParamRole;
  if (c.mlp == MlpKind::silu) {
    list.linear(mlp_in, "mlp.fc1.weight", c.mlp_hidden, c.dim);
    list.residual_linear(mlp_out, "mlp.fc2.weight", c.dim, c.mlp_hidden);
  } else {
    list.linear(mlp_in, "mlp.gate_proj.weight", c.mlp_hidden, c.dim);
    list.linear(mlp_up, "mlp.up_proj.weight", c.mlp_hidden, c.dim).joins_previous = true;
    list.residual_linear(mlp_out, "mlp.down_proj.weight", c.dim, c.mlp_hidden);
  }
}

}  // namespace

std::vector<ParamSpec> param_specs(const ModelConfig& c) {
  using enum ParamRole;
  std::vector<ParamSpec> all;
  SpecList outside(all, c, "", -1);
  ParamSpec& table = outside.normal(embed, "embed.weight", {c.vocab_size, c.dim});
  table.padded_rows = c.padded_vocab();
  // With tied embeddings the head's matrix product writes this gradient first; the embedding's is then added.
  table.product = c.tie_embeddings;
  for (int64_t i = 0; i < c.n_layers; ++i) {
    SpecList list(all, c, fmt::format("blocks.{}.", i), i);
    list.constant(norm1, "norm1.weight", {c.dim}, 1);
    add_attention(list, c, i);
    list.constant(norm2, "norm2.weight", {c.dim}, 1);
    add_mlp(list, c);
  }
  outside.constant(norm_f, "norm_f.weight", {c.dim}, 1);
  if (!c.tie_embeddings) outside.linear(head, "lm_head.weight", c.vocab_size, c.dim).padded_rows = c.padded_vocab();
  for (int64_t i = 0; i < c.n_layers; ++i) {
    SpecList list(all, c, fmt::format("blocks.{}.", i), i);
    if (c.has_index(i)) add_index(list, c, i);
  }
  for (size_t i = 0; i < all.size(); ++i) all[i].number = static_cast<int64_t>(i);
  return all;
}

int64_t count_parameters(const ModelConfig& c) {
  int64_t n = 0;
  for (const ParamSpec& p : param_specs(c)) n += p.shape.numel();
  return n;
}

int64_t Segments::of(const ParamSpec& spec) const {
  if (spec.role == ParamRole::embed) return embed();
  if (spec.role == ParamRole::head) return head();
  return spec.is_layer_product() ? spec.layer : rest();
}

// The layers' segments follow one another in the flat buffer, so a layer is found by bisection: passes and updates ask
// for each layer.
int64_t Segments::holding(const ElementRange& range) const {
  const auto end = ranges_.begin() + layers_;
  const auto after = std::upper_bound(ranges_.begin(), end, range.begin,
                                      [](int64_t at, const ElementRange& layer) { return at < layer.begin; });
  if (after != ranges_.begin() && std::prev(after)->contains(range)) return after - ranges_.begin() - 1;
  for (int64_t i = layers_; i < count(); ++i)
    if ((*this)[i].contains(range)) return i;
  return -1;
}

FlatBuffer FlatBuffer::windowed(Arena& arena, MemTag tag, const char* name, DType dtype, const Segments& segments,
                                bool overlap) {
  int64_t layer = 0;  // elements in the largest layer
  for (int64_t i = 0; segments.is_layer(i); ++i) layer = std::max(layer, segments[i].size());
  const int64_t head = segments.head(), embed = segments.embed(), rest = segments.rest();
  // Tied embeddings are in use throughout a pass, so they share no memory.
  const bool tied = head == embed;
  const int64_t outside = segments[rest].size();
  const int64_t layers = outside + (tied      ? segments[embed].size()
                                    : overlap ? 0
                                              : std::max(segments[embed].size(), segments[head].size()));
  FlatBuffer buffer;
  int64_t end = layers + 2 * layer;
  for (int64_t i = 0; i < segments.count(); ++i) {
    const int64_t begin = i == rest ? 0 : segments.is_layer(i) ? layers + i % 2 * layer : outside;
    buffer.places_.push_back({begin, begin + segments[i].size()});
    end = std::max(end, buffer.places_.back().end);
  }
  buffer.memory_ = arena.alloc(tag, name, dtype, {end});
  return buffer;
}

Tensor FlatBuffer::at(const ElementRange& range, const Segments& segments) const {
  if (!is_windowed()) return memory_.slice(0, range.begin, range.end);
  const int64_t i = segments.holding(range);
  TRIAD_CHECK(i >= 0, "the elements {} to {} of the flat buffer are in no single segment", range.begin, range.end);
  const int64_t shift = places_[static_cast<size_t>(i)].begin - segments[i].begin;
  return memory_.slice(0, range.begin + shift, range.end + shift);
}

Params::Params(Arena& arena, const ModelConfig& config, const Options& options)
    : config_(config),
      specs_(options.specs ? *options.specs : param_specs(config)),
      offset_(specs_.size()),
      segments_(config.n_layers, config.tie_embeddings) {
  constexpr int64_t kElementAlign = 128;  // parameter alignment in elements: 256 bytes in bf16
  int64_t end = 0, segment = -1;
  // The groups, in this order. The index's begin and end at whole pieces of the sum of squares.
  enum Group { products, decaying, decaying_index, constant_index, constant, groups };
  const auto group_of = [](const ParamSpec& p) {
    if (is_index(p.role)) return p.decays() ? decaying_index : constant_index;
    return p.product ? products : p.decays() ? decaying : constant;
  };
  const auto enter = [&](int64_t next) {
    if (segment == next) return;
    end = align_up(end, std::max(kElementAlign, options.shard_elements));
    if (segment >= 0) segments_[segment].end = end;
    segment = next;
    if (segment >= 0) segments_[segment].begin = end;
  };
  for (int g = 0; g < groups; ++g) {
    if (config.has_index() && (g == decaying_index || g == constant)) {
      enter(segments_.rest());
      end = align_up(end, kSumPiece);
    }
    if (g == decaying_index) index_.begin = end;
    if (g == constant) index_.end = end;
    for (size_t i = 0; i < specs_.size(); ++i) {
      if (group_of(specs_[i]) != g) continue;
      enter(segments_.of(specs_[i]));
      if (!specs_[i].joins_previous) end = align_up(end, kElementAlign);
      offset_[i] = end;
      end += specs_[i].stored().numel();
    }
    if (g == products) enter(-1);
    end = align_up(end, kElementAlign);
    if (g == products) products_end_ = end;
    if (g == decaying_index) decay_end_ = end;
  }
  enter(-1);
  stored_elements_ = end;
  const DType acc = acc_dtype(options.dtype);
  const auto make = [&](MemTag tag, const char* name, DType dtype, bool windows, bool overlap) {
    return windows ? FlatBuffer::windowed(arena, tag, name, dtype, segments_, overlap)
                   : FlatBuffer(arena.alloc(tag, name, dtype, {end}));
  };
  weights_ = make(MemTag::params, options.weights_name, options.dtype, options.weight_windows, /*overlap=*/false);
  if (options.master) master_ = arena.alloc(MemTag::master, "master weights", DType::f32, {end});
  if (!options.grads) return;
  grads_ = make(MemTag::grads, "gradients", acc, options.grad_windows, /*overlap=*/true);
  if (options.grad_windows) list_cleared();
}

// Lists, by segment, the elements outside all parameters whose gradient a matrix product overwrites.
void Params::list_cleared() {
  std::vector<std::vector<ElementRange>> overwritten(static_cast<size_t>(segments_.count()));  // segment -> ranges
  for (int64_t i = 0; i < count(); ++i)
    if (specs_[i].product)
      overwritten[static_cast<size_t>(segments_.of(specs_[i]))].push_back(
          {offset_[i], offset_[i] + specs_[i].stored().numel()});
  cleared_.resize(overwritten.size());
  open_.clear();
  for (int64_t s = 0; s < segments_.count(); ++s) {
    std::vector<ElementRange>& ranges = overwritten[static_cast<size_t>(s)];
    std::ranges::sort(ranges, {}, &ElementRange::begin);
    int64_t at = segments_[s].begin;
    const auto clear_until = [&](int64_t end) {
      if (end > at) cleared_[static_cast<size_t>(s)].push_back({at, end});
    };
    for (const ElementRange& range : ranges) {
      clear_until(range.begin);
      at = range.end;
    }
    clear_until(segments_[s].end);
  }
}

void Params::lend_grads() {
  TRIAD_CHECK(!grads_.is_windowed(), "the gradients have memory for two layers only, so none is free");
  if (!std::exchange(lent_, true)) list_cleared();
}

void Params::open_grads(Context& ctx, int64_t segment) {
  if (!grads_.is_windowed() && !(lent_ && segments_.is_layer(segment))) return;
  std::erase_if(
      open_, [&](int64_t other) { return grads_.place(other, segments_).overlaps(grads_.place(segment, segments_)); });
  if (grads_.is_windowed()) open_.push_back(segment);
  for (const ElementRange& range : cleared_[static_cast<size_t>(segment)]) zero(ctx, grads(range));
}

ElementRange Params::range_of_grad(ConstTensor part) const {
  const Tensor memory = grads_.memory();
  const int64_t begin = (part.data - memory.data) / size_of(memory.dtype);
  const ElementRange range = {begin, begin + part.numel()};
  if (!grads_.is_windowed() && ElementRange{0, stored_elements_}.contains(range)) return range;
  for (const int64_t i : open_) {
    const ElementRange place = grads_.place(i, segments_);
    const int64_t shift = segments_[i].begin - place.begin;
    if (place.contains(range)) return {range.begin + shift, range.end + shift};
  }
  fail("{} is no part of the gradients {}", part.str(), memory.str());
}

Tensor Params::whole(const FlatBuffer& buffer, const char* name) {
  TRIAD_CHECK(!buffer.is_windowed(), "the {} are asked for as a whole, but have memory for two layers only", name);
  return buffer.memory();
}

Tensor Params::stored(const FlatBuffer& buffer, int64_t i, int64_t rows) const {
  Shape shape = specs_[i].shape;
  shape.dim[0] = rows;
  return buffer.at({offset_[i], offset_[i] + shape.numel()}, segments_).view(shape);
}

Tensor Params::part(const Tensor& whole, int64_t i) const { return stored(FlatBuffer(whole), i, specs_[i].shape[0]); }

template <class TensorType>
ModelTensors<TensorType> Params::tensors(const FlatBuffer& buffer) const {
  std::map<std::pair<int64_t, ParamRole>, int64_t> index;  // first parameter by (layer, role)
  for (int64_t i = 0; i < count(); ++i) index.try_emplace({specs_[i].layer, specs_[i].role}, i);
  // A parameter and those stored contiguously after it, as one matrix; an empty tensor if the model has no parameter
  // with this role.
  const auto get = [&](int64_t layer, ParamRole role) -> TensorType {
    const auto it = index.find({layer, role});
    if (it == index.end()) return TensorType{};
    int64_t rows = specs_[it->second].stored()[0];
    for (int64_t i = it->second + 1; i < count() && specs_[i].joins_previous; ++i) rows += specs_[i].shape[0];
    return stored(buffer, it->second, rows);
  };
  ModelTensors<TensorType> t;
  t.embed = get(-1, ParamRole::embed);
  t.norm_f = get(-1, ParamRole::norm_f);
  t.head = config_.tie_embeddings ? t.embed : get(-1, ParamRole::head);
  t.layers.resize(static_cast<size_t>(config_.n_layers));
  for (int64_t i = 0; i < config_.n_layers; ++i)
    for_each_tensor(t.layers[static_cast<size_t>(i)],
                    [&](ParamRole role, TensorType& tensor) { tensor = get(i, role); });
  return t;
}
template ModelTensors<ConstTensor> Params::tensors(const FlatBuffer&) const;
template ModelTensors<Tensor> Params::tensors(const FlatBuffer&) const;

void draw_values(Context& ctx, const ParamSpec& p, int64_t first, Tensor out, uint64_t seed) {
  const int64_t end = first + out.numel();
  TRIAD_CHECK(first >= 0 && end <= p.shape.numel(), "elements {} to {} of {}, which has {}", first, end, p.name,
              p.shape.numel());
  const uint64_t stream = random_stream(RandomUse::init, static_cast<uint64_t>(p.number));
  if (p.init == Init::normal) return draw_normal(ctx, out, first, {.seed = seed, .stream = stream, .std = p.value});
  if (p.init == Init::uniform) return draw_uniform(ctx, out, first, {.seed = seed, .stream = stream, .bound = p.value});
  if (p.values.empty()) return fill_constant(ctx, out, p.value);
  for (int64_t i = first; i < end; ++i)
    fill_constant(ctx, out.slice(0, i - first, i - first + 1), p.values[static_cast<size_t>(i)]);
}

void draw_range(Context& ctx, const Params& params, int64_t begin, int64_t end, Tensor out, uint64_t seed) {
  TRIAD_CHECK(begin >= 0 && end <= params.stored_elements() && out.shape() == Shape{end - begin},
              "elements {} to {} of {} are drawn to {}", begin, end, params.stored_elements(), out.str());
  std::vector<int64_t> order;  // the range's parameters, by place
  for (int64_t i = 0; i < params.count(); ++i)
    if (params.offset(i) < end && params.offset(i) + params.specs()[static_cast<size_t>(i)].shape.numel() > begin)
      order.push_back(i);
  std::ranges::sort(order, {}, [&](int64_t i) { return params.offset(i); });
  int64_t done = begin;  // elements [begin, done) are written
  const auto pad_to = [&](int64_t to) {
    if (to > done) zero(ctx, out.slice(0, done - begin, to - begin));
    done = std::max(done, to);
  };
  for (const int64_t i : order) {
    const ParamSpec& spec = params.specs()[static_cast<size_t>(i)];
    const int64_t offset = params.offset(i), from = std::max(offset, begin),
                  to = std::min(offset + spec.shape.numel(), end);
    if (from >= to) continue;
    pad_to(from);
    draw_values(ctx, spec, from - offset, out.slice(0, from - begin, to - begin), seed);
    done = to;
  }
  pad_to(end);
}

void Params::init(Context& ctx, uint64_t seed) {
  draw_range(ctx, *this, 0, stored_elements_, master(), seed);
  if (has_master()) cast(ctx, weights(), master_);
}

void Params::init(Context& ctx, int64_t i, uint64_t seed) {
  const int64_t begin = offset_[static_cast<size_t>(i)], end = begin + specs_[static_cast<size_t>(i)].shape.numel();
  draw_range(ctx, *this, begin, end, master().slice(0, begin, end), seed);
  if (has_master()) cast(ctx, weights({begin, end}), master_.slice(0, begin, end));
}

void Params::set(Context& ctx, const std::vector<float>& stored) {
  TRIAD_CHECK(static_cast<int64_t>(stored.size()) == stored_elements_, "{} values for {} stored parameters",
              stored.size(), stored_elements_);
  set(ctx, 0, stored);
}

void Params::set(Context& ctx, int64_t begin, std::span<const float> values) {
  const int64_t n = static_cast<int64_t>(values.size());
  TRIAD_CHECK(begin >= 0 && n <= stored_elements_ - begin, "{} values from {} on for {} stored parameters", n, begin,
              stored_elements_);
  const ElementRange range = {begin, begin + n};
  if (has_master()) write(ctx, master_.slice(0, range.begin, range.end), values.data());
  write_floats(ctx, weights(range), values.data());
}

void Params::clear(Context& ctx) {
  zero(ctx, weights());
  if (has_master()) zero(ctx, master_);
}

}  // namespace triad
