// Decoding with a KV cache: after a prefill of any length, each step appends one token per sequence and computes the
// same logits as a forward pass over the whole sequence has in its last row. The prefill is such a forward pass; a step
// computes the same functions from the cache. Each sequence in a batch has its own length. On a GPU the logits' last
// bits depend on the batch size (kernels/decode/README.md), but never on the other sequences.
#pragma once
#include <span>
#include <vector>

#include "kernels/decode/decode.h"
#include "model/model.h"

namespace triad {

class Decoder {
 public:
  // A decoder for B sequences with up to S tokens; S must not exceed the model's max_seq_len. The model and the arena
  // must outlive the decoder.
  Decoder(Context&, Arena&, Model&, int64_t B, int64_t S);

  int64_t B() const { return tokens.size(0); }
  int64_t capacity() const { return capacity_; }
  // Tokens in sequence b's cache.
  int64_t length(int64_t b) const { return length_[static_cast<size_t>(b)]; }
  // Empties these sequences' caches. In the steps after that such a sequence begins anew with tokens[b], which costs
  // little: a sequence without a text is forgotten before each step.
  void forget(Context&, std::span<const int64_t> sequences);

  using Prompt = CachedText;  // its tokens are in act.tokens
  // Starts sequences: one pass over act.tokens [1,T] fills their caches and logits[b]. Each prompt is a document of the
  // row (act.bounds), in order; further tokens of a document are padding without effect. Without act.bounds there is
  // one prompt, which begins at 0. Prompts are of different sequences. One op fills all prompts' caches of a layer.
  void prefill(Context&, Activations& act, std::span<const Prompt> prompts);
  // Appends tokens[b] to each sequence b and computes logits for the token after it. If a cache is full, its last row
  // is overwritten and the logits are meaningless. Positions are on the device, so that a step can be recorded in a
  // graph: record queue(), and call stepped() once per launch.
  void step(Context& ctx) {
    queue(ctx);
    stepped();
  }
  void queue(Context&, const DecodeProbe& = {});
  void stepped();
  // Sets tokens[b] to argmax(logits[b]) for each sequence b.
  void choose_greedy(Context&);

  Tensor tokens;    // [B] i32: the tokens that the next step appends
  Tensor logits;    // [B, padded vocabulary] in the compute dtype: next-token logits
  Tensor position;  // [B] i32: the next token's position in each sequence

 private:
  void write_positions(Context&);      // the positions after length_ tokens
  Tensor qkv_of(int64_t layer) const;  // [B, the layer's qkv rows]: a part of qkv_
  void layer_step(Context&, int64_t layer, const DecodeProbe&);
  void attend(Context&, int64_t layer, const DecodeProbe&);

  Model& model_;
  int64_t capacity_;
  std::vector<int64_t> length_;
  // The cache of a layer: nsa or dense, by the layer's kind, and a taught index. Branches that share keys and values
  // have caches of their own too: those of the window and the raw rows are short rings, so that only k_sel and v_sel
  // grow with S.
  struct LayerCache {
    NsaCache nsa;
    DenseCache dense;  // also of one softmax, over selected blocks or a window
    Tensor index_k;    // [B,S,1,d_index]: the keys of a taught index; absent without one
    Tensor lists;      // [B,1,Hkv,n] i32: the lists that the last tokens share (nsa.select_every); absent if none do
  };
  static LayerCache alloc_cache(Arena&, const ModelConfig&, int64_t B, int64_t S, DType, int64_t layer);

  void fill_caches(Context&, int64_t layer, LayerActivations&, int64_t T, std::span<const Prompt>);
  void last_logits(Context&, Activations&, std::span<const Prompt>);

  std::vector<LayerCache> caches_;
  void list_by_index(Context&, int64_t layer);
  // [B,1,Hkv,n] i32: the cache's, or a part of lists_; absent without a taught index.
  Tensor lists_of(int64_t layer) const;

  // Buffers of a step, compute dtype: [B,C], [B * rows of the widest layer's qkv], [B,Hq*dv], [B,H]; with a taught
  // index [B * its largest index_width], and the longest lists [B * Hkv * n] i32.
  Tensor x_, qkv_, attended_, hidden_, index_, lists_;
};

}  // namespace triad
