#include "model/params.h"

#include <cmath>
#include <map>

#include "engine/check.h"
#include "engine/random_streams.h"
#include "engine/rng.h"
#include "kernels/common/parallel.h"
#include "kernels/ops/cast.h"

namespace triad {

Shape ParamSpec::stored() const {
  Shape s = shape;
  if (padded_rows > 0) s.dim[0] = padded_rows;
  return s;
}

namespace {

using Init = ParamSpec::Init;

// The weight [out,in] of a linear layer.
ParamSpec linear(std::string name, int64_t out, int64_t in, double std, bool joins_previous = false) {
  return {.name = std::move(name), .shape = {out, in}, .value = std, .joins_previous = joins_previous, .product = true};
}

void add_phi(std::vector<ParamSpec>& list, const std::string& name, const ModelConfig& c, int64_t width) {
  const int64_t l = c.nsa.l;
  if (c.nsa.phi == Phi::conv)
    list.push_back({name + ".weight", {l, width}, Init::constant, 1.0 / static_cast<double>(l)});
  if (c.nsa.phi == Phi::mlp) {
    list.push_back({name + ".pos", {l, width}, Init::normal, c.init_std});
    list.push_back({name + ".fc1.weight", {2 * width, l * width}, Init::normal, c.init_std});
    list.push_back({name + ".fc2.weight", {width, 2 * width}, Init::normal, c.init_std});
  }
}

void add_attention(std::vector<ParamSpec>& list, const std::string& name, const ModelConfig& c, double out_std) {
  const std::vector<const char*> branches =
      c.dense() ? std::vector<const char*>{"win"} : std::vector<const char*>{"cmp", "sel", "win"};
  list.push_back(linear(name + "q_proj.weight", c.n_heads * c.d_k, c.dim, c.init_std));
  for (const std::string b : branches)
    for (const auto& [letter, width] : {std::pair{"k_", c.d_k}, std::pair{"v_", c.d_v}})
      list.push_back(linear(name + letter + b + "_proj.weight", c.n_kv_groups * width, c.dim, c.init_std, true));
  if (!c.dense()) {
    add_phi(list, name + "phi_k", c, c.d_k);
    add_phi(list, name + "phi_v", c, c.d_v);
    list.push_back({name + "gate.fc1.weight", {c.d_k / 2, c.d_k}, Init::normal, c.init_std});
    list.push_back({name + "gate.fc1.bias", {c.d_k / 2}, Init::constant, 0});
    list.push_back({name + "gate.fc2.weight", {3, c.d_k / 2}, Init::constant, 0});
    list.push_back({name + "gate.fc2.bias", {3}, Init::constant, 0});
  }
  list.push_back(linear(name + "out_proj.weight", c.dim, c.n_heads * c.d_v, out_std));
}

void add_mlp(std::vector<ParamSpec>& list, const std::string& name, const ModelConfig& c, double out_std) {
  if (c.mlp == MlpKind::silu) {
    list.push_back(linear(name + "fc1.weight", c.mlp_hidden, c.dim, c.init_std));
    list.push_back(linear(name + "fc2.weight", c.dim, c.mlp_hidden, out_std));
  } else {
    list.push_back(linear(name + "gate_proj.weight", c.mlp_hidden, c.dim, c.init_std));
    list.push_back(linear(name + "up_proj.weight", c.mlp_hidden, c.dim, c.init_std, true));
    list.push_back(linear(name + "down_proj.weight", c.dim, c.mlp_hidden, out_std));
  }
}

}  // namespace

std::vector<ParamSpec> param_specs(const ModelConfig& c) {
  const double out_std = c.init_std / std::sqrt(2.0 * static_cast<double>(c.n_layers));
  std::vector<ParamSpec> list;
  list.push_back({"embed.weight", {c.vocab_size, c.dim}, Init::normal, c.init_std, c.padded_vocab()});
  for (int64_t i = 0; i < c.n_layers; ++i) {
    const std::string block = fmt::format("blocks.{}.", i);
    list.push_back({block + "norm1.weight", {c.dim}, Init::constant, 1});
    add_attention(list, block + "attn.", c, out_std);
    list.push_back({block + "norm2.weight", {c.dim}, Init::constant, 1});
    add_mlp(list, block + "mlp.", c, out_std);
  }
  list.push_back({"norm_f.weight", {c.dim}, Init::constant, 1});
  if (c.tie_embeddings) {
    list.front().product = true;  // the gradient of the tied head, to which the embedding's is added
  } else {
    list.push_back(linear("lm_head.weight", c.vocab_size, c.dim, c.init_std));
    list.back().padded_rows = c.padded_vocab();
  }
  return list;
}

int64_t count_parameters(const ModelConfig& c) {
  int64_t n = 0;
  for (const ParamSpec& p : param_specs(c)) n += p.shape.numel();
  return n;
}

Params::Params(Arena& arena, const ModelConfig& config, const Options& options)
    : config_(config), specs_(param_specs(config)), offset_(specs_.size()) {
  constexpr int64_t kElementAlign = 128;  // 256 bytes in bf16
  int64_t end = 0;
  const auto group = [](const ParamSpec& p) { return p.product ? 0 : p.decays() ? 1 : 2; };
  int64_t* const ends[] = {&products_end_, &decay_end_, &stored_elements_};
  for (int g = 0; g < 3; ++g) {
    for (size_t i = 0; i < specs_.size(); ++i) {
      if (group(specs_[i]) != g) continue;
      if (!specs_[i].joins_previous) end = align_up(end, kElementAlign);
      offset_[i] = end;
      end += specs_[i].stored().numel();
    }
    *ends[g] = end = align_up(end, kElementAlign);
  }
  stored_elements_ = end = align_up(end, options.shard_elements);
  weights_ = arena.alloc(MemTag::params, "weights", options.dtype, {end});
  if (options.master) master_ = arena.alloc(MemTag::master, "master weights", DType::f32, {end});
  if (options.grads) grads_ = arena.alloc(MemTag::grads, "gradients", acc_dtype(options.dtype), {end});
}

Tensor Params::stored(const Tensor& whole, int64_t i, int64_t rows) const {
  Shape shape = specs_[i].shape;
  shape.dim[0] = rows;
  return whole.slice(0, offset_[i], offset_[i] + shape.numel()).view(shape);
}

Tensor Params::part(const Tensor& whole, int64_t i) const { return stored(whole, i, specs_[i].shape[0]); }

template <class TensorType>
ModelTensors<TensorType> Params::tensors(const Tensor& whole) const {
  std::map<std::string, int64_t> id;
  for (int64_t i = 0; i < count(); ++i) id[specs_[i].name] = i;
  auto get = [&](const std::string& name) -> TensorType {
    const auto it = id.find(name);
    return it == id.end() ? TensorType{} : stored(whole, it->second, specs_[it->second].stored()[0]);
  };
  // A parameter and those stored contiguously after it, as one matrix.
  auto get_joined = [&](const std::string& name) -> TensorType {
    const int64_t first = id.at(name);
    int64_t rows = specs_[first].shape[0];
    for (int64_t i = first + 1; i < count() && specs_[i].joins_previous; ++i) rows += specs_[i].shape[0];
    return stored(whole, first, rows);
  };

  ModelTensors<TensorType> t;
  t.embed = get("embed.weight");
  t.norm_f = get("norm_f.weight");
  t.head = config_.tie_embeddings ? t.embed : get("lm_head.weight");
  for (int64_t i = 0; i < config_.n_layers; ++i) {
    const std::string block = fmt::format("blocks.{}.", i), attn = block + "attn.", mlp = block + "mlp.";
    LayerTensors<TensorType> layer;
    layer.norm1 = get(block + "norm1.weight");
    layer.norm2 = get(block + "norm2.weight");
    layer.qkv = get_joined(attn + "q_proj.weight");
    layer.out_proj = get(attn + "out_proj.weight");
    const bool silu = config_.mlp == MlpKind::silu;
    layer.mlp_in = get_joined(mlp + (silu ? "fc1.weight" : "gate_proj.weight"));
    layer.mlp_out = get(mlp + (silu ? "fc2.weight" : "down_proj.weight"));
    auto phi = [&](const std::string& name) {
      return PhiTensors<TensorType>{get(name + ".weight"), get(name + ".pos"), get(name + ".fc1.weight"),
                                    get(name + ".fc2.weight")};
    };
    layer.nsa.phi_k = phi(attn + "phi_k");
    layer.nsa.phi_v = phi(attn + "phi_v");
    layer.nsa.gate = {get(attn + "gate.fc1.weight"), get(attn + "gate.fc1.bias"), get(attn + "gate.fc2.weight"),
                      get(attn + "gate.fc2.bias")};
    t.layers.push_back(layer);
  }
  return t;
}
template ModelTensors<ConstTensor> Params::tensors(const Tensor&) const;
template ModelTensors<Tensor> Params::tensors(const Tensor&) const;

void Params::init(Context& ctx, uint64_t seed) {
  if (ctx.planning) return;
  std::vector<float> host(static_cast<size_t>(stored_elements_), 0.0f);
  for (int64_t i = 0; i < count(); ++i) {
    const ParamSpec& p = specs_[i];
    const Philox random(seed, random_stream(RandomUse::init, static_cast<uint64_t>(i)));
    float* to = host.data() + offset_[i];
    parallel_for(ctx, p.shape.numel(), [&](int64_t j) {
      to[j] =
          static_cast<float>(p.init == Init::constant ? p.value : p.value * random.normal(static_cast<uint64_t>(j)));
    });
  }
  set(ctx, host);
}

void Params::set(Context& ctx, const std::vector<float>& host) {
  TRIAD_CHECK(static_cast<int64_t>(host.size()) == stored_elements_, "{} values for {} stored parameters", host.size(),
              stored_elements_);
  if (has_master()) write(ctx, master_, host.data());
  if (weights_.dtype == DType::f32) return write(ctx, weights_, host.data());
  // Rounded to bf16 or converted to f64 on the host, so that every device starts from the same bits.
  std::vector<std::byte> converted(static_cast<size_t>(weights_.bytes()));
  const Tensor to(converted.data(), weights_.dtype, weights_.shape(), Device::cpu());
  const Tensor from(reinterpret_cast<std::byte*>(const_cast<float*>(host.data())), DType::f32, weights_.shape(),
                    Device::cpu());
  Runtime cpu({.device = Device::cpu()});
  cast(cpu.ctx(), to, from);
  write(ctx, weights_, converted.data());
}

}  // namespace triad
