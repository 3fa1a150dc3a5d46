// A small model with a cached decoder, and the forward pass to compare it with.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "model/decoding/decode.h"

namespace triad::test {

constexpr int64_t kTokens = 310;  // crosses these models' l, d, l_sel and w boundaries many times
// A model with 2 layers and odd widths.
ModelConfig config_of(Phi, GateKind, int64_t heads, int64_t groups);
// Such a model in a shape that the GPU's fused kernels support. width: head width.
ModelConfig gpu_config(Phi, GateKind, int64_t heads, int64_t groups, int64_t width);
// Models whose layers or branches differ from the given one's; with three layers or more, so kinds alternate.
std::vector<std::pair<const char*, ModelConfig>> layer_variants(ModelConfig);

// A model with random weights (norms around 1, the others around 0), a decoder for B sequences, and activations for a
// forward pass over one T-token sequence, or with most_documents > 0 over a row of documents.
class DecodeFixture {
 public:
  DecodeFixture(const ModelConfig&, int64_t B, int64_t T, Device, DType, double std = 0.3, int64_t most_documents = 0);
  void set_weights(const std::vector<float>& stored) { model_->params().set(ctx(), stored); }

  static std::vector<int32_t> random_tokens(uint64_t stream, int64_t n, int64_t vocab);

  // Logits from a forward pass over these tokens, padded to T: every row's, or the last row's.
  std::vector<std::vector<double>> forward(const std::vector<int32_t>& tokens);
  std::vector<double> forward_last(const std::vector<int32_t>& tokens);
  void prefill(int64_t b, std::vector<int32_t> tokens);
  // One pass over all texts: text b is a document of the row, from token begins[b] on.
  void prefill_packed(const std::vector<std::vector<int32_t>>& texts, const std::vector<int64_t>& begins);
  void step(const std::vector<int32_t>& tokens);  // one token per sequence
  std::vector<double> logits(int64_t b);          // sequence b's, after a prefill or a step

  Context& ctx() { return runtime_->ctx(); }
  Decoder& decoder() { return *decoder_; }
  Tensor reads() const { return reads_; }  // i64 [3], how many keys a step reads

 private:
  void build(Runtime& runtime);
  void run(std::vector<int32_t> tokens);  // a forward pass over tokens, padded to T
  std::vector<double> row(int64_t i);     // the last forward's logits in row i
  std::vector<double> used(const std::vector<double>& padded, int64_t row) const;

  ModelConfig config_;
  int64_t B_, T_, most_documents_;
  DType dtype_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Activations> act_;
  std::unique_ptr<Decoder> decoder_;
  Tensor one_row_, reads_;
};

}  // namespace triad::test
