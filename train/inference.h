// LoadedModel: a model loaded from a checkpoint for forward (and backward) on one device with one batch shape, as the
// verbs generate, eval and grads use it.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/model.h"
#include "train/state.h"

namespace triad {

class LoadedModel {
 public:
  struct Options {
    std::string checkpoint;  // a path for find_model
    Device device;
    DType dtype = DType::f32;
    int64_t batch = 1, seq_len = 0;  // sequences; tokens, 0: train.seq_len
    bool training = false;           // keep activations and gradients
  };
  explicit LoadedModel(const Options&);

  const Config& config() const { return source_.config; }
  // The checkpoint's copy of the tokenizer if it has one, else data.tokenizer.
  std::unique_ptr<Tokenizer> tokenizer() const {
    return tokenizer_of_checkpoint(source_.folder, config().data.tokenizer);
  }
  Context& ctx() { return runtime_->ctx(); }
  Model& model() { return *model_; }
  Activations& activations() { return *activations_; }
  // Copies tokens [B*T], and targets [B*T] if given, to the device for the next forward.
  void set_tokens(std::span<const int32_t> tokens, std::span<const int32_t> targets = {});
  // Call after forward: returns the logits of rows [begin, begin + n) of the batch, n * V values. n <= kLogitRows.
  static constexpr int64_t kLogitRows = 256;
  std::vector<double> logits(int64_t begin, int64_t n);

 private:
  void build(Runtime&, const Options&);
  std::vector<double> logits(Context&, int64_t begin, int64_t n);

  ModelSource source_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Activations> activations_;
};

// Copies the elements of a contiguous tensor of any float dtype to the host.
std::vector<double> read_floats(Context&, ConstTensor);

// Options that several verbs share: --device auto|cpu|cuda, --dtype f64|f32|bf16.
DType parse_dtype(const std::string& word);
Device parse_device(const std::string& word);

}  // namespace triad
