#include "tools/selection_lists.h"

#include <fmt/ranges.h>

#include <vector>

#include "engine/check.h"
#include "io/safetensors.h"
#include "kernels/nsa/document_tables.h"

namespace triad {

namespace {

constexpr const char* kPrefix = "block_index/";

// Throws a UsageError unless `list` is ascending, padded at the end with -1, and without a block after `current`.
// row(): words for the list's place.
void check_list(std::span<const int32_t> list, int64_t current, auto&& row) {
  for (size_t i = 0; i < list.size(); ++i) {
    const int32_t block = list[i];
    if (block == -1) continue;
    if (block < 0) fail_usage("{}: block {} is not a block, nor -1 for none", row(), block);
    if (block > current) fail_usage("{}: block {} is in the future, the token is in block {}", row(), block, current);
    if (i > 0 && (list[i - 1] == -1 || block <= list[i - 1]))
      fail_usage("{}: block {} stands after {}: a list must ascend, and only its end be -1", row(), block, list[i - 1]);
  }
}

// A layer's lists, checked, with the block ids of a packed row.
std::vector<int32_t> read_lists(const SafetensorsFile& file, const std::string& name, const Shape& shape, int64_t l_sel,
                                std::span<const int32_t> bounds) {
  const TensorEntry* const entry = file.find(name);
  if (entry == nullptr) fail_usage("{}: has no tensor {}, and the model's layer has lists", file.path(), name);
  const std::vector<int64_t> expected(shape.dim.begin(), shape.dim.begin() + shape.rank);
  if (entry->dtype != "I32" || entry->shape != expected)
    fail_usage("{}: {} is {}, expected I32[{}]", file.path(), name, entry->str(), fmt::join(expected, ","));
  std::vector<int32_t> lists(static_cast<size_t>(shape.numel()));
  file.read(*entry, std::as_writable_bytes(std::span(lists)));
  const int64_t T = shape[1], groups = shape[2];
  const auto n = static_cast<size_t>(shape[3]);
  for (int64_t i = 0; i < shape[0] * T * groups; ++i) {
    const int64_t token = i / groups, t = token % T;
    const int64_t document = bounds.empty() ? 0 : last_bound(bounds.data(), static_cast<int64_t>(bounds.size()), t);
    const int64_t begin = bounds.empty() ? 0 : bounds[static_cast<size_t>(document)];
    const auto list = std::span(lists).subspan(static_cast<size_t>(i) * n, n);
    check_list(list, (t - begin) / l_sel, [&] {
      return fmt::format("{}: {}: row {}, token {}, group {}", file.path(), name, token / T, t, i % groups);
    });
    for (int32_t& block : list)
      if (block >= 0) block += static_cast<int32_t>(begin / l_sel + document);  // common/documents.h
  }
  return lists;
}

}  // namespace

void give_lists(LoadedModel& loaded, const std::string& path, std::span<const int32_t> bounds) {
  const ModelConfig& model = loaded.config().model;
  const SafetensorsFile file(path);
  for (const TensorEntry& entry : file.entries()) {
    if (!entry.name.starts_with(kPrefix)) continue;
    const auto is_of = [&](int64_t layer) { return entry.name == kPrefix + std::to_string(layer); };
    bool known = false;
    for (int64_t i = 0; i < model.n_layers; ++i) known = known || (model.has_lists(i) && is_of(i));
    if (!known) fail_usage("{}: {}: the model has no lists of that name", path, entry.name);
  }
  for (int64_t i = 0; i < model.n_layers; ++i) {
    if (!model.has_lists(i)) continue;
    const Tensor to = loaded.activations().layer(i).attention.nsa.block_index;
    write(loaded.ctx(), to,
          read_lists(file, kPrefix + std::to_string(i), to.shape(), model.nsa_at(i).l_sel, bounds).data());
  }
  loaded.model().keep_block_index(true);
}

}  // namespace triad
