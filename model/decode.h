// Cached decoding: after a prefill of any length, each step takes one token a sequence and gives the logits that a
// forward pass over the whole sequence has in that row. The prefill is that forward pass; the step computes the same
// functions of the cache. Sequences of a batch have lengths of their own. On a GPU the last bits of a sequence's logits
// depend on how many there are beside it (decode/skinny_linear.h).
#pragma once
#include <vector>

#include "kernels/decode/decode.h"
#include "model/model.h"

namespace triad {

class Decoder {
 public:
  // B sequences of up to S tokens; the model is built for that many. Both outlive the decoder.
  Decoder(Context&, Arena&, Model&, int64_t B, int64_t S);

  int64_t B() const { return tokens.size(0); }
  int64_t capacity() const { return capacity_; }
  int64_t length(int64_t b) const { return length_[static_cast<size_t>(b)]; }  // tokens in b's cache
  void forget(Context&, int64_t b);                                            // b is empty again

  // Sequence b begins with the first n tokens of act.tokens [1,>=n]: fills its cache and logits[b]. What stands behind
  // the n is padding that nothing sees.
  void prefill(Context&, Activations& act, int64_t b, int64_t n);
  // Each sequence gets tokens[b]: logits[b] of what follows, and its cache is one longer; where it is full, the last
  // row is overwritten and the logits mean nothing. Positions are on the device, so a step can be recorded in a graph:
  // then queue() is what to record, and each launch of it counts with stepped().
  void step(Context& ctx) {
    queue(ctx);
    stepped();
  }
  void queue(Context&, const DecodeProbe& = {});
  void stepped();
  // tokens[b] = the likeliest next one
  void choose_greedy(Context&);

  Tensor tokens;    // [B] i32: what the next step takes
  Tensor logits;    // [B, padded V] T
  Tensor position;  // [B] i32: where the next token goes

 private:
  void layer_step(Context&, int64_t layer, const DecodeProbe&);

  Model& model_;
  int64_t capacity_;
  std::vector<int64_t> length_;
  std::vector<NsaCache> layers_;
  Tensor x_, qkv_, attended_, hidden_;  // [B,C], [B,rows of the projection], [B,Hq*dv], [B,H] T: of the step under way
};

}  // namespace triad
