// LoadedModel: a model loaded from a checkpoint for forward (and backward) on one device with a fixed batch shape. The
// verbs generate, eval and grads use it.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/model.h"
#include "model/sequence/group.h"
#include "train/checkpoint/state.h"

namespace triad {

class LoadedModel {
 public:
  struct Options {
    std::string checkpoint;  // path to a checkpoint, a run's folder or a weights file (find_model)
    Device device;
    DType dtype = DType::f32;
    bool fp8 = false;                // all layers multiply in fp8 (Model::Options::fp8_layers)
    int64_t batch = 1, seq_len = 0;  // sequences; tokens per sequence, 0: train.seq_len
    bool training = false;           // allocate what backward needs: kept activations, and gradients
    int64_t most_documents = 0;      // most documents in a row; 0: every row is one document
    bool dense = false;              // all passes attend densely (Model::attend_densely)
    Comm* comm = nullptr;            // its ranks share each sequence (dist.context); null: this process has whole ones
    // If set, the checkpoint must have a dense model. An NSA model with this shape is loaded instead:
    // load_dense_weights() makes its weights from the checkpoint's, with the seed of the checkpoint's run.
    std::optional<ModelConfig> begun = {};
  };
  explicit LoadedModel(const Options&);

  const Config& config() const { return source_.config; }
  // The tokenizer copied into the checkpoint, or without a copy the one that data.tokenizer names.
  std::unique_ptr<Tokenizer> tokenizer() const {
    return tokenizer_of_checkpoint(source_.folder, config().data.tokenizer);
  }
  Context& ctx() { return runtime_->ctx(); }
  Model& model() { return *model_; }
  Activations& activations() { return *activations_; }
  // Copies whole sequences' tokens [B*T], and targets [B*T] if given, to the device for the next forward.
  void set_tokens(std::span<const int32_t> tokens, std::span<const int32_t> targets = {});
  const SequenceLayout& layout() const { return layout_; }  // which tokens of the sequences this rank has
  // Copies the bounds of the documents (nsa/document_tables.h) to the device for the next forward. Throws a UsageError
  // if they are not the bounds of at most Options::most_documents documents in each row.
  void set_documents(std::span<const int32_t> bounds);
  // Call after forward. Returns logits for rows [begin, begin + n) in this rank's part of the batch, n * V values,
  // where V is the vocabulary size. n <= kLogitRows.
  static constexpr int64_t kLogitRows = 256;
  std::vector<double> logits(int64_t begin, int64_t n);
  // Call after forward: the loss of this target in a row.
  double row_loss(int64_t row, int32_t target);
  // The most likely token in each of these rows, found on the device; -1 where a logit is not finite.
  std::vector<int32_t> likeliest(int64_t begin, int64_t n);

 private:
  void build(Runtime&, const Options&);
  std::vector<double> logits(Context&, int64_t begin, int64_t n);
  std::vector<int32_t> likeliest(Context&, int64_t begin, int64_t n);

  ModelSource source_;
  int64_t seq_len_ = 0;  // tokens of a sequence
  SequenceLayout layout_;
  std::unique_ptr<SequenceGroup> group_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Activations> activations_;
};

// Copies a contiguous tensor with any float dtype to the host and converts its elements to double.
std::vector<double> read_floats(Context&, ConstTensor);

// Parse the options that several verbs share: --device auto|cpu|cuda and --dtype f64|f32|bf16.
DType parse_dtype(const std::string& word);
Device parse_device(const std::string& word, const LaunchEnv& launch = {});

}  // namespace triad
