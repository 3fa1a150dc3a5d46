#include "model/activations.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>

#include "engine/check.h"

namespace triad {

namespace {

using SharedTensors = std::map<std::string, Tensor>;  // tensors that layers share, by name and shape

// An AllocTensor that allocates prefix + name if `shared` has no tensor with this name and shape yet.
AllocTensor shared_alloc(const Activations::AllocActivation& alloc, SharedTensors& shared, const std::string& prefix,
                         int64_t layer) {
  return [&alloc, &shared, prefix, layer](const std::string& name, DType type, const Shape& shape) {
    const auto [entry, is_new] = shared.try_emplace(prefix + name + shape.str());
    if (is_new) entry->second = alloc(MemTag::activations, prefix + name, type, shape, layer);
    return entry->second;
  };
}

// kept: allocates the tensors that the layer has for itself. recomputed: allocates those that recomputing layers share.
// row_tokens: tokens per sequence; this rank has T.
LayerActivations alloc_layer(const ModelConfig& c, int64_t layer, int64_t B, int64_t T, int64_t row_tokens, DType dtype,
                             Recompute recompute, const AllocTensor& kept, const AllocTensor& recomputed) {
  const int64_t N = B * T;
  const DType acc = acc_dtype(dtype);
  const auto alloc_of = [&](LayerPart part) -> const AllocTensor& {
    return covers(recompute, part) ? recomputed : kept;
  };
  const AttentionKind kind = c.attention_of(layer);
  LayerActivations a;
  a.x = kept("x", dtype, {N, c.dim});
  a.rrms1 = kept("rrms1", acc, {N});
  a.rrms2 = kept("rrms2", acc, {N});
  a.qkv = alloc_of(LayerPart::attention)("qkv", dtype, {N, qkv_width(c, kind)});
  if (c.has_index(layer)) {
    a.index = alloc_of(LayerPart::attention)("index", dtype, {N, index_width(c, layer)});
    if (c.qk_norm) a.index_qk = alloc_of(LayerPart::qk)("index_qk", dtype, {N, index_width(c, layer)});
  }
  if (c.qk_norm) a.qk = alloc_of(LayerPart::qk)("qk", dtype, {N, qk_width(c, kind)});
  a.attention = alloc_attention(c, layer, B, T, row_tokens, dtype, kept, alloc_of(LayerPart::attention));
  a.x_mid = alloc_of(LayerPart::out_proj)("x_mid", dtype, {N, c.dim});
  a.mlp_pre =
      alloc_of(LayerPart::mlp_in)("mlp_pre", dtype, {N, c.mlp == MlpKind::silu ? c.mlp_hidden : 2 * c.mlp_hidden});
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

QkvViews attended_qkv(const LayerActivations& a, const ModelConfig& c, AttentionKind kind, int64_t B, int64_t T) {
  QkvViews views = split_qkv(a.qkv, c, kind, B, T);
  if (!a.qk.empty()) views = with_qk(views, a.qk);
  return a.index.empty() ? views : with_index(views, a.index_qk.empty() ? a.index : a.index_qk, c);
}

DocumentTables Activations::documents_of(int64_t layer) const {
  if (documents.empty()) return {};
  return layer < 0 ? documents.begin()->second : documents.at(l_sel_[static_cast<size_t>(layer)]);
}

void ActivationMemory::reserve(const Arena& planned) {
  for (const Arena::Allocation& a : planned.allocations()) {
    const auto [entry, is_new] = by_name_.try_emplace(a.name, Largest{a, {}});
    if (!is_new && entry->second.allocation.bytes < a.bytes) entry->second.allocation = a;
  }
}

Tensor ActivationMemory::take(MemTag tag, const std::string& name, DType dtype, const Shape& shape, int64_t layer) {
  const auto entry = by_name_.find(name);
  TRIAD_CHECK(entry != by_name_.end(), "no memory was reserved for {} {}", name, shape.str());
  auto& [largest, memory] = entry->second;
  if (memory.empty()) memory = source_(tag, name, largest.dtype, largest.shape, layer);
  const Tensor taken(memory.data, dtype, shape, memory.device);
  TRIAD_CHECK(taken.bytes() <= largest.bytes, "{} for {} bytes of {}", taken.str(), largest.bytes, name);
  return taken;
}

Activations::Activations(Arena& arena, const ModelConfig& c, int64_t B, int64_t row_tokens, DType dtype, bool keep,
                         const RecomputePlan& recompute, int64_t most_documents, const SequenceLayout& layout)
    : Activations([&](MemTag tag, const std::string& name, DType type, const Shape& shape,
                      int64_t) { return arena.alloc(tag, name, type, shape); },
                  c, B, row_tokens, dtype, keep, recompute, most_documents, layout) {}

Activations::Activations(const AllocActivation& alloc, const ModelConfig& c, int64_t B, int64_t row_tokens, DType dtype,
                         bool keep, const RecomputePlan& recompute, int64_t most_documents,
                         const SequenceLayout& layout)
    : n_layers_(c.n_layers),
      layout_(layout.chunk_tokens == 0 ? SequenceLayout::of(row_tokens, 1, 0) : layout),
      recompute_(recompute) {
  for (int64_t i = 0; i < n_layers_; ++i) l_sel_.push_back(c.nsa_at(i).l_sel);
  if (layout_.shared() && most_documents > 0 && c.tokens_per_list() > 1)
    fail_usage(
        "dist.context is {}: with nsa.select_every {} tokens share lists, which would be on two ranks where a document "
        "begins inside a row; data.documents=attend_across makes a row one sequence",
        layout_.ranks, c.tokens_per_list());
  const int64_t T = layout_.local_tokens(), all = layout_.tokens();
  tokens = alloc(MemTag::io, "tokens", DType::i32, {B, T}, kNoLayer);
  check_sequences(tokens.device, c, B);
  targets = alloc(MemTag::io, "targets", DType::i32, {B, T}, kNoLayer);
  if (c.has_index()) padding_begin = alloc(MemTag::io, "first padded tokens", DType::i32, {B}, kNoLayer);
  if (most_documents > 0) {
    const auto table = [&](const std::string& name, const Shape& shape) {
      return alloc(MemTag::io, name, DType::i32, shape, kNoLayer);
    };
    bounds = table("document bounds", {B * most_documents + 1});
    const Tensor begin = table("document begin", {B, all}), end = table("document end", {B, all});
    for (const int64_t l_sel : std::set<int64_t>(l_sel_.begin(), l_sel_.end())) {
      const std::string blocks = l_sel == c.nsa.l_sel ? "" : fmt::format(", blocks of {}", l_sel);
      documents[l_sel] = {begin, end, table("document first_block" + blocks, {B, all}),
                          table("document block_begin" + blocks, {B, block_ids(all, l_sel, most_documents)})};
    }
  }
  rrms_final = alloc(MemTag::activations, "rrms_final", acc_dtype(dtype), {B * T}, kNoLayer);
  row_loss = alloc(MemTag::activations, "row_loss", acc_dtype(dtype), {B * T}, kNoLayer);
  x_final_ = alloc(MemTag::activations, "x_final", dtype, {B * T, c.dim}, keep ? c.n_layers : kNoLayer);
  // Without `keep`, two tensor sets are enough: layer i reads its own set and writes x in layer i+1's set.
  SharedTensors shared;
  layers_.resize(static_cast<size_t>(c.n_layers));
  for (int64_t i = c.n_layers - 1; i >= 0; --i) {
    const AllocTensor own =
        shared_alloc(alloc, shared, fmt::format("layer{:02}.", keep ? i : i % 2), keep ? i : kNoLayer);
    layer(i) =
        alloc_layer(c, i, B, T, all, dtype, recompute.of(i), own, shared_alloc(alloc, shared, "recomputed.", kNoLayer));
  }
}

}  // namespace triad
