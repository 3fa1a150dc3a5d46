// Slots: many texts that are continued together. Each is in a slot of a DecodeSession; a finished text leaves, and a
// waiting one takes the slot and starts, on a GPU as soon as a few can start in one pass.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/rng.h"
#include "model/decoding/decode_session.h"
#include "model/decoding/sampling.h"

namespace triad {

// A text to continue. Its seed and the number of tokens sampled before decide a draw, not its slot.
struct Continuation {
  std::vector<int32_t> tokens;  // prompt tokens, then sampled ones
  size_t prompt = 0;            // tokens in the prompt, at least one
  SamplingOptions sampling;
  Philox random{0, 0};

  size_t sampled() const { return tokens.size() - prompt; }
  std::span<const int32_t> last(int64_t n) const {
    return std::span(tokens).last(std::min(tokens.size(), static_cast<size_t>(n)));
  }
};

class Slots {
 public:
  // model: the weights' name, for errors. together: how many texts start at once, as long as others run and no slot is
  // free; 0: an eighth of the slots on a GPU, up to 8, where a pass over several texts takes little longer than one
  // text's, and 1 on the CPU.
  Slots(DecodeSession& session, int64_t context, std::string model, int64_t together = 0);
  bool has_room() const;
  bool empty() const;
  // Gives a text a free slot; the text stays the caller's. A prompt longer than the context loses its beginning.
  void add(Continuation&);
  // Samples each text's next token, for which took(text, token) says whether the text ends there; if not, it has
  // appended the token. A text whose cache is full goes on after its last half.
  using Took = std::function<bool(Continuation&, int32_t token)>;
  void step(const Took&);

 private:
  struct Slot {
    Continuation* text = nullptr;  // null: free
    int64_t starts = 0;            // how many of its last tokens it starts with; 0: it runs
    bool runs() const { return text != nullptr && starts == 0; }
  };
  bool may_start() const;
  std::vector<int32_t> decode();
  bool start();
  int32_t sample(int64_t b, int32_t likeliest);

  DecodeSession& session_;
  int64_t context_, together_;
  std::string model_;
  std::vector<Slot> slots_;
};

// The slots without --batch, if memory holds as many.
int64_t default_slots(Device);
// A session for Slots with `batch` sequences. If they don't fit into the device's free memory, an Error names what
// does, or if `batch` was not `asked` for, there are as many as fit.
std::unique_ptr<DecodeSession> open_slots(const ModelConfig&, DecodeSession::Options, int64_t batch, bool asked);

}  // namespace triad
