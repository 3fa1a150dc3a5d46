// Decoding with a KV cache: after a prefill of any length, each step consumes one token per sequence and produces the
// logits that a forward pass over the whole sequence has in its last row. The prefill is that forward pass; a step
// computes the same functions from the cache. Each sequence of a batch has its own length. On a GPU the last bits of
// the logits depend on the batch size (kernels/decode/skinny_linear.h).
#pragma once
#include <vector>

#include "kernels/decode/decode.h"
#include "model/model.h"

namespace triad {

class Decoder {
 public:
  // For B sequences of up to S tokens; S must not exceed the model's max_seq_len. The model and the arena must outlive
  // the decoder.
  Decoder(Context&, Arena&, Model&, int64_t B, int64_t S);

  int64_t B() const { return tokens.size(0); }
  int64_t capacity() const { return capacity_; }
  int64_t length(int64_t b) const { return length_[static_cast<size_t>(b)]; }  // tokens in the cache of b
  void forget(Context&, int64_t b);                                            // empties the cache of b

  // Starts sequence b with the first n tokens of act.tokens [1,>=n]: fills its cache and logits[b]. Tokens after the n
  // are padding without effect.
  void prefill(Context&, Activations& act, int64_t b, int64_t n);
  // Appends tokens[b] to each sequence b and computes the logits of the next token. If a cache is full, its last row is
  // overwritten and the logits are meaningless.
  // Positions are on the device, so a step can be recorded in a graph: record queue(), and call stepped() per launch.
  void step(Context& ctx) {
    queue(ctx);
    stepped();
  }
  void queue(Context&, const DecodeProbe& = {});
  void stepped();
  // tokens[b] = argmax of logits[b]
  void choose_greedy(Context&);

  Tensor tokens;    // [B] i32: input of the next step
  Tensor logits;    // [B, padded V] T
  Tensor position;  // [B] i32: position of the next token

 private:
  void layer_step(Context&, int64_t layer, const DecodeProbe&);

  Model& model_;
  int64_t capacity_;
  std::vector<int64_t> length_;
  std::vector<NsaCache> layers_;
  Tensor x_, qkv_, attended_, hidden_;  // [B,C], [B, qkv width], [B,Hq*dv], [B,H] T: buffers of a step
};

}  // namespace triad
