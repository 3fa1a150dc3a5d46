// A model and its decoder on one device, with exactly the memory that they need; `triad generate` and the benchmarks
// use it. A prefill allocates its activations and frees them afterwards. On a GPU, decoding steps are replayed from a
// graph.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "engine/graph.h"
#include "model/decode.h"

namespace triad {

class DecodeSession {
 public:
  struct Options {
    Device device;
    DType dtype = DType::f32;
    int64_t batch = 1;
    int64_t context = 0;  // each sequence's cache capacity, tokens
    // prefills: every text length with which prefill() will be called, because scratch memory is planned for them.
    std::vector<int64_t> prefills;
    KernelChoices kernels = {};
  };
  DecodeSession(const ModelConfig&, const Options&);

  Context& ctx() { return runtime_->ctx(); }
  Model& model() { return *model_; }
  Decoder& decoder() { return *decoder_; }
  int64_t batch() const { return options_.batch; }

  // Starts sequence b with this text: fills the sequence's cache and its logits.
  void prefill(int64_t b, std::span<const int32_t> text);
  // After prefills: chooses each sequence's token with the largest logit, on the device. The result is -1 where a logit
  // is not finite.
  std::vector<int32_t> choose_greedy();
  // Appends the tokens that were chosen last to their sequences, and chooses the next ones.
  std::vector<int32_t> step_greedy();
  // Appends tokens[b] to sequence b, for each b.
  void step(std::span<const int32_t> tokens);
  // Sequence b's logits, one per vocabulary token.
  std::vector<float> logits(int64_t b);

 private:
  struct Recorded {
    Graph graph;
    int runs = 0;
  };
  void build(Runtime&);
  template <class Work>
  void replay(Recorded&, Work&& work);
  std::vector<int32_t> chosen();

  ModelConfig config_;
  Options options_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Decoder> decoder_;
  Recorded step_, greedy_;
};

}  // namespace triad
