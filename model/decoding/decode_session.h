// A model and its decoder on one device, with exactly the memory that they need; `triad generate`, `triad chat` and the
// benchmarks use it. On a GPU, decoding steps are replayed from a graph, which serves all sequences that come and go:
// they change its inputs alone.
#pragma once
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "engine/graph.h"
#include "model/decoding/decode.h"

namespace triad {

class DecodeSession {
 public:
  struct Options {
    Device device;
    DType dtype = DType::f32;
    int64_t batch = 1;
    int64_t context = 0;  // each sequence's cache capacity, tokens
    // prefills: every text length with which prefill() will be called, because scratch memory is planned for them.
    std::vector<int64_t> prefills = {};
    bool starts = false;  // plan for start()
    KernelChoices kernels = {};
    // Decodes with this model's whole weights, as they are at each call, after prefill(); null: makes its own model.
    Model* model = nullptr;
  };
  DecodeSession(const ModelConfig&, const Options&);
  // Bytes that a session takes on its device, without those that prefill() allocates.
  static int64_t planned_bytes(const ModelConfig&, const Options&);

  Context& ctx() { return runtime_->ctx(); }
  Model& model() { return options_.model != nullptr ? *options_.model : *model_; }
  Decoder& decoder() { return *decoder_; }
  int64_t batch() const { return options_.batch; }

  // Starts sequence b with this text: fills the sequence's cache and its logits. The pass's activations are allocated
  // and freed here.
  void prefill(int64_t b, std::span<const int32_t> text);
  // The same for several sequences, and texts of any length up to the context, in memory that the session has. On a GPU
  // texts are packed into passes. A pass's length follows from each of its texts alone, and a text begins at a multiple
  // of kernels' tiles, so that its bits do not depend on the texts beside it. On the CPU each has a pass of its own,
  // because OpenBLAS's sums depend on a row's place.
  struct Start {
    int64_t b;
    std::span<const int32_t> text;
  };
  void start(std::span<const Start>);
  // After prefills: chooses each sequence's token with the largest logit, on the device. The result is -1 where a logit
  // is not finite.
  std::vector<int32_t> choose_greedy();
  // Appends the tokens that were chosen last to their sequences, and chooses the next ones.
  std::vector<int32_t> step_greedy();
  // Appends tokens[b] to sequence b, for each b, and chooses the next ones. Sequences `idle` have no text and begin
  // anew.
  std::vector<int32_t> step_greedy(std::span<const int32_t> tokens, std::span<const int64_t> idle);
  // Appends tokens[b] to sequence b, for each b.
  void step(std::span<const int32_t> tokens);
  // Sequence b's logits, one per vocabulary token.
  std::vector<float> logits(int64_t b);

 private:
  struct Recorded {
    Graph graph;
    int runs = 0;
  };
  struct PlanOnly {};
  DecodeSession(const ModelConfig&, const Options&, PlanOnly);
  struct Sizes {
    int64_t arena, scratch;
  };
  Sizes plan();
  void build(Runtime&);
  void build_passes(Arena&);
  void run_pass(Activations&, std::span<const Start>);
  void check_tokens(std::span<const int32_t>) const;
  void write_tokens(std::span<const int32_t>);
  template <class Work>
  void replay(Recorded&, Work&& work);
  std::vector<int32_t> chosen();

  ModelConfig config_;
  Options options_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Decoder> decoder_;
  std::map<int64_t, Activations> passes_;  // start()'s, by the number of tokens; they share memory
  Recorded step_, greedy_;
};

}  // namespace triad
