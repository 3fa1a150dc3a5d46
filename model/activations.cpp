#include "model/activations.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <string>

#include "engine/check.h"

namespace triad {

namespace {

constexpr int kWin = static_cast<int>(Branch::win);

using SharedTensors = std::map<std::string, Tensor>;  // tensors of recomputing layers, by name

LayerActivations alloc_layer(Arena& arena, const ModelConfig& c, int64_t B, int64_t T, DType dtype,
                             const std::string& prefix, Recompute recompute, SharedTensors& shared) {
  const int64_t N = B * T;
  const DType acc = acc_dtype(dtype);
  bool again = false;  // the next tensors are recomputed
  auto alloc = [&](const std::string& name, DType type, const Shape& shape) {
    if (!again) return arena.alloc(MemTag::activations, prefix + name, type, shape);
    const auto [entry, is_new] = shared.try_emplace(name);
    if (is_new) entry->second = arena.alloc(MemTag::activations, "recomputed." + name, type, shape);
    return entry->second;
  };
  LayerActivations a;
  a.x = alloc("x", dtype, {N, c.dim});
  a.rrms1 = alloc("rrms1", acc, {N});
  a.rrms2 = alloc("rrms2", acc, {N});
  if (!c.dense()) a.nsa.block_index = alloc("block_index", DType::i32, {B, T, c.n_kv_groups, c.nsa.n_sel});
  again = covers(recompute, LayerPart::attention);
  a.qkv = alloc("qkv", dtype, {N, qkv_width(c)});
  for (int b = c.dense() ? kWin : 0; b < 3; ++b) {
    a.nsa.o[b] = alloc(fmt::format("o_{}", word_of(static_cast<Branch>(b))), dtype, {B, T, c.n_heads, c.d_v});
    a.nsa.lse[b] = alloc(fmt::format("lse_{}", word_of(static_cast<Branch>(b))), acc, {B, T, c.n_heads});
  }
  if (!c.dense()) {
    const int64_t Tc = compressed_length(T, c.nsa.l, c.nsa.d);
    a.nsa.k_cmp = alloc("k_cmp", dtype, {B, Tc, c.n_kv_groups, c.d_k});
    a.nsa.v_cmp = alloc("v_cmp", dtype, {B, Tc, c.n_kv_groups, c.d_v});
    a.nsa.gate = alloc("gate", acc, {3, B, T, c.n_kv_groups});
  }
  again = covers(recompute, LayerPart::out_proj);
  a.x_mid = alloc("x_mid", dtype, {N, c.dim});
  again = covers(recompute, LayerPart::mlp_in);
  a.mlp_pre = alloc("mlp_pre", dtype, {N, c.mlp == MlpKind::silu ? c.mlp_hidden : 2 * c.mlp_hidden});
  return a;
}

}  // namespace

int64_t most_sequences(Device device, const ModelConfig& c) {
  constexpr int64_t kMostCtas = 65535;
  return device.is_cuda() ? kMostCtas / c.n_kv_groups : std::numeric_limits<int32_t>::max();
}

void check_sequences(Device device, const ModelConfig& c, int64_t B) {
  const int64_t most = most_sequences(device, c);
  if (B > most)
    fail_usage(
        "a batch of {} sequences (train.micro_batch_size, --batch) of {} groups (model.n_kv_groups): on a GPU at most "
        "{} "
        "are possible, {} groups in all",
        B, c.n_kv_groups, most, most * c.n_kv_groups);
}

Activations::Activations(Arena& arena, const ModelConfig& c, int64_t B, int64_t T, DType dtype, bool keep,
                         const RecomputePlan& recompute)
    : n_layers_(c.n_layers), recompute_(recompute) {
  tokens = arena.alloc(MemTag::io, "tokens", DType::i32, {B, T});
  check_sequences(tokens.device, c, B);
  targets = arena.alloc(MemTag::io, "targets", DType::i32, {B, T});
  // Layer i writes the x of layer i+1, so two sets are needed.
  const int64_t sets = keep ? c.n_layers : std::min<int64_t>(2, c.n_layers);
  SharedTensors shared;
  for (int64_t i = 0; i < sets; ++i)
    layers_.push_back(alloc_layer(arena, c, B, T, dtype, fmt::format("layer{:02}.", i), recompute.of(i), shared));
  x_final_ = arena.alloc(MemTag::activations, "x_final", dtype, {B * T, c.dim});
  rrms_final = arena.alloc(MemTag::activations, "rrms_final", acc_dtype(dtype), {B * T});
  row_loss = arena.alloc(MemTag::activations, "row_loss", acc_dtype(dtype), {B * T});
}

int64_t qkv_width(const ModelConfig& c) {
  return c.n_heads * c.d_k + (c.dense() ? 1 : 3) * c.n_kv_groups * (c.d_k + c.d_v);
}

QkvViews split_qkv(const Tensor& qkv, const ModelConfig& c, int64_t B, int64_t T) {
  int64_t at = 0;
  auto take = [&](int64_t heads, int64_t width) {
    const Tensor columns = qkv.slice(1, at, at + heads * width);
    at += heads * width;
    return columns.view({B, T, heads, width});
  };
  QkvViews views;
  views.q = take(c.n_heads, c.d_k);
  for (int b = c.dense() ? kWin : 0; b < 3; ++b) {
    views.k[b] = take(c.n_kv_groups, c.d_k);
    views.v[b] = take(c.n_kv_groups, c.d_v);
  }
  return views;
}

}  // namespace triad
