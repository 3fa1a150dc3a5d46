// A model and its decoder on one device, with the memory that they need and no more: what generate and the benches run.
// Prefills are passes over the prompt alone, in memory that is given back; on a GPU steps are replayed from a graph.
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
    int64_t context = 0;            // tokens that a cache holds
    std::vector<int64_t> prefills;  // every length that prefill() will be asked for: scratch is planned for them
    KernelChoices kernels = {};
  };
  DecodeSession(const ModelConfig&, const Options&);

  Context& ctx() { return runtime_->ctx(); }
  Model& model() { return *model_; }
  Decoder& decoder() { return *decoder_; }
  int64_t batch() const { return options_.batch; }

  // Sequence b begins with this text: its cache is filled, its logits are those of what follows.
  void prefill(int64_t b, std::span<const int32_t> text);
  // Each sequence's likeliest next token is chosen on the device: after prefills. -1 where a logit is not finite.
  std::vector<int32_t> choose_greedy();
  // Each sequence takes the token that was chosen last, and the next is chosen.
  std::vector<int32_t> step_greedy();
  // Each sequence takes its token of these.
  void step(std::span<const int32_t> tokens);
  // The logits of sequence b, V of them.
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
