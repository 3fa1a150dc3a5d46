// Associative recall over a distance, for `data.kind: needle`: keys with their values, the needles, lie in a haystack
// of other tokens, and a key that comes again asks for its value. Answers alone are targets: the rest is noise
// that nothing could predict.
#pragma once
#include <cstdint>
#include <vector>

#include "io/data/dataset.h"

namespace triad {

// Token 0 begins a sequence; the others are keys, values and hay, a third of the vocabulary each. A sequence is a pure
// function of the seed and its number.
struct NeedleTask {
  int64_t vocab = 0, seq_len = 0;
  int64_t pairs = 64;        // keys with their values in a sequence; no key has two
  int64_t questions = 1;     // for each, on average; every second key has one question
  int64_t value_tokens = 1;  // that follow a key
  double depth = -1;  // in [0, 1]: needle_probe's, in every sequence; -1: all keys are asked for, anywhere behind
  uint64_t seed = 0;

  int64_t kinds() const { return (vocab - 1) / 3; }  // keys, and values
  int32_t first_value() const { return static_cast<int32_t>(1 + kinds()); }
  int32_t first_hay() const { return static_cast<int32_t>(1 + 2 * kinds()); }
  // Throws UsageError, naming the config's keys and what is possible, where sequences of this length cannot hold it.
  void check() const;
};

// Training and validation sequences. In each, pairs and questions lie anywhere: half of a key's places at any distance
// from one another, half at one of any magnitude, so that near ones teach what far ones need.
DataSplit needle_data(const NeedleTask&, double val_fraction);

// `length` tokens that end in a key (and, of its value, all tokens but the last), and the key's pair at `depth` of the
// way from the first token (0) to directly before the question (1). Other pairs lie around, as densely as in training.
struct NeedleProbe {
  std::vector<int32_t> tokens, targets;  // targets: -1, but for the last value_tokens
  int64_t needle = 0;                    // where the key stands
};
// number: of the probe, for this length and depth; none is likely to be a training or validation sequence. Throws
// UsageError for depths outside of [0, 1] and lengths that have no room.
NeedleProbe needle_probe(const NeedleTask&, int64_t length, double depth, uint64_t number);

}  // namespace triad
