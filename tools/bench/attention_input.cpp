#include "tools/bench/attention_input.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "engine/check.h"
#include "io/data/dataset.h"
#include "kernels/common/op_case_args.h"
#include "model/attention.h"
#include "train/inference.h"

namespace triad {

int64_t AttentionProblem::most_documents() const {
  int64_t most = 0, count = 0;
  for (size_t i = 1; i < bounds.size(); ++i) {
    most = std::max(most, ++count);
    if (bounds[i] % T == 0) count = 0;
  }
  return most;
}

namespace {

void store(std::byte* row, int64_t column, DType dtype, const float* from, int64_t n) {
  for (int64_t j = 0; j < n; ++j) store_element(row, column + j, dtype, from[j]);
}

}  // namespace

Normals::Normals(uint64_t stream) : start_(kSeed, stream) {
  const Philox random(kSeed, 0);
#pragma omp parallel for
  for (int64_t i = 0; i < kTable; ++i) table_[static_cast<size_t>(i)] = static_cast<float>(random.normal(i));
}

std::vector<std::byte> random_rows(int64_t rows, int64_t heads, int64_t width, DType dtype, const Normals& normals) {
  std::vector<std::byte> host(static_cast<size_t>(rows * heads * width * size_of(dtype)));
#pragma omp parallel for
  for (int64_t i = 0; i < rows * heads; ++i)
    store(host.data() + i * width * size_of(dtype), 0, dtype, normals.piece(i), width);
  return host;
}

std::vector<std::byte> random_qkv(const AttentionProblem& p, DType dtype, double drift, const Normals& normals) {
  struct Head {
    int64_t column, width;
    bool drifts;
  };
  std::vector<Head> heads;
  int64_t columns = 0;
  const auto add = [&](int64_t count, int64_t width, bool drifts) {
    for (int64_t h = 0; h < count; ++h, columns += width) heads.push_back({columns, width, drifts});
  };
  add(p.config.n_heads, p.config.d_k, true);
  for (int pair = 0; pair < kv_pairs(p.config, p.kind()); ++pair) {
    add(p.config.n_kv_groups, p.config.d_k, true);
    add(p.config.n_kv_groups, p.config.d_v, false);
  }
  const int64_t row_bytes = columns * size_of(dtype), count = static_cast<int64_t>(heads.size());
  std::vector<std::byte> host(static_cast<size_t>(p.B * p.T * row_bytes));
#pragma omp parallel for
  for (int64_t i = 0; i < p.B * count; ++i) {
    const Head& head = heads[static_cast<size_t>(i % count)];
    const float a = static_cast<float>(head.drifts ? drift : 0), fresh = std::sqrt(1 - a * a);
    float x[kMaxHeadWidth] = {};
    for (int64_t t = 0; t < p.T; ++t) {
      const float* e = normals.piece(i * p.T + t);
      for (int64_t j = 0; j < head.width; ++j) x[j] = t == 0 ? e[j] : a * x[j] + fresh * e[j];
      store(host.data() + (i / count * p.T + t) * row_bytes, head.column, dtype, x, head.width);
    }
  }
  return host;
}

namespace {

// Returns the layer index to time. Throws a UsageError if the model lacks it, or has other heads and widths than p.
int64_t timed_layer(const ModelConfig& c, const AttentionProblem& p, const std::string& checkpoint, int64_t layer) {
  if (c.n_heads != p.config.n_heads || c.n_kv_groups != p.config.n_kv_groups || c.d_k != p.config.d_k ||
      c.d_v != p.config.d_v || c.attention != p.config.attention)
    fail_usage("--shapes: {} is not for {}, whose layers are {} and {}x{}x{}v{}", p.name, checkpoint,
               word_of(c.attention), c.n_heads, c.n_kv_groups, c.d_k, c.d_v);
  if (layer < 0) layer = c.n_layers / 2;
  if (layer >= c.n_layers) fail_usage("--layer is {}: {} has {} layers", layer, checkpoint, c.n_layers);
  if (c.has_index(layer) || p.config.has_index())
    fail_usage("--data {}: it must be randn or local with nsa.selector index", checkpoint);
  if (const AttentionKind kind = c.attention_of(layer); kind != p.kind())
    fail_usage("--layer is {}: this layer of {} has {} attention", layer, checkpoint,
               kind == AttentionKind::window ? "window" : word_of(kind));
  return layer;
}

}  // namespace

void check_trained(const AttentionProblem& p, const std::string& checkpoint, const TrainedInput& input) {
  const ModelSource model = [&] {
    try {
      return find_model(checkpoint);
    } catch (const Error& e) {
      fail_usage("--data {}: neither randn nor local, and no model: {}", checkpoint, e.what());
    }
  }();
  timed_layer(model.config.model, p, checkpoint, input.layer);
  if (input.text.empty()) fail_usage("--data {}: a checkpoint needs something to read, --text", checkpoint);
  const auto tokenizer = tokenizer_of_checkpoint(model.folder, model.config.data.tokenizer);
  const auto source = open_tokens(input.text, *tokenizer, model.config.model.vocab_size);
  if (source->size() < p.B * p.T)
    fail("--text: {} holds {} tokens, {} needs {}", source->name(), source->size(), p.name, p.B * p.T);
}

std::vector<std::byte> trained_qkv(AttentionProblem& p, const std::string& checkpoint, const TrainedInput& input,
                                   Device device, DType dtype) {
  LoadedModel loaded({.checkpoint = checkpoint,
                      .device = device,
                      .dtype = dtype,
                      .batch = p.B,
                      .seq_len = p.T,
                      .training = true});  // a training model keeps every layer's activations
  const ModelConfig& c = loaded.config().model;
  const int64_t layer = timed_layer(c, p, checkpoint, input.layer);
  p.config.nsa = c.nsa_at(layer);
  const auto tokenizer = loaded.tokenizer();
  const auto source = open_tokens(input.text, *tokenizer, c.vocab_size);
  std::vector<int32_t> tokens(static_cast<size_t>(p.B * p.T));
  source->read(0, tokens);
  loaded.set_tokens(tokens);
  loaded.model().forward(loaded.ctx(), loaded.activations());
  const LayerActivations& activations = loaded.activations().layer(layer);
  const Tensor qkv = activations.qkv;
  if (c.qk_norm) {  // attention reads q and k from another tensor; the qkv rows must then contain it
    const QkHeads to = qk_heads(split_qkv(qkv, c, c.attention_of(layer), p.B, p.T)),
                  from = qk_heads(attended_qkv(activations, c, c.attention_of(layer), p.B, p.T));
    for (size_t i = 0; i < to.size(); ++i)
      if (!to[i].empty()) copy(loaded.ctx(), to[i], from[i]);
  }
  std::vector<std::byte> host(static_cast<size_t>(qkv.bytes()));
  read(loaded.ctx(), host.data(), qkv);
  return host;
}

Overlap overlap_of(const std::vector<int32_t>& lists, int64_t B, int64_t T, int64_t groups, int64_t n) {
  const auto list = [&](int64_t b, int64_t t, int64_t g) { return lists.data() + ((b * T + t) * groups + g) * n; };
  const auto length = [&](const int32_t* l) {
    return std::count_if(l, l + n, [](int32_t block) { return block >= 0; });
  };
  int64_t longest = 0;
  for (int64_t t = 0; t < T; ++t) longest = std::max<int64_t>(longest, length(list(0, t, 0)));
  // Mean number of distinct blocks in the lists of R consecutive tokens, divided by `longest`.
  const auto mean_union = [&](int64_t R) {
    double sum = 0;
    int64_t count = 0;
    for (int64_t b = 0; b < B; ++b)
      for (int64_t g = 0; g < groups; ++g)
        for (int64_t t = 0; t + R <= T; t += R) {
          if (length(list(b, t, g)) < longest) continue;
          std::set<int32_t> blocks;
          for (int64_t i = 0; i < R; ++i) blocks.insert(list(b, t + i, g), list(b, t + i, g) + n);
          blocks.erase(-1);
          sum += static_cast<double>(blocks.size()) / static_cast<double>(longest);
          ++count;
        }
    return count > 0 ? sum / static_cast<double>(count) : 1.0;
  };
  return {2 - mean_union(2), mean_union(4), mean_union(10)};
}

}  // namespace triad
