// Associative recall over a distance, for `data.kind: needle`: keys followed by their values (the needles) are placed
// among random tokens (the hay). When a key occurs again, the model must predict its value. Only these values are
// targets, since the rest is unpredictable.
#pragma once
#include <cstdint>
#include <vector>

#include "io/data/dataset.h"

namespace triad {

// A recall task. Token 0 begins a sequence; the other tokens are keys, values and hay, a third of the vocabulary each.
// A sequence is a pure function of the seed and its number.
struct NeedleTask {
  int64_t vocab = 0, seq_len = 0;
  int64_t pairs = 64;        // key-value pairs per sequence; each key has one value
  int64_t questions = 1;     // questions per key on average; every second key has one
  int64_t value_tokens = 1;  // length of a value, tokens
  // depth in [0, 1] for each sequence, as in needle_probe; -1: all keys are asked, at any later position
  double depth = -1;
  uint64_t seed = 0;

  int64_t kinds() const { return (vocab - 1) / 3; }  // number of keys, and of value tokens
  int32_t first_value() const { return static_cast<int32_t>(1 + kinds()); }
  int32_t first_hay() const { return static_cast<int32_t>(1 + 2 * kinds()); }
  // Throws a UsageError, with the config's keys and the limits, if a sequence of this length cannot hold the task.
  void check() const;
};

// Training and validation sequences. Positions are random: half of a key's occurrences are at a uniform position, half
// at a log-uniform distance from the key's previous occurrence, so that short distances are frequent enough to be
// learned first.
DataSplit needle_data(const NeedleTask&, double val_fraction);

// A sequence of `length` tokens that ends in a key and its value without the value's last token. The key's first
// occurrence is at `depth` of the way from the first token (0) to directly before the question (1). Other pairs
// surround it, as densely as in training.
struct NeedleProbe {
  std::vector<int32_t> tokens, targets;  // targets are -1 except the last value_tokens
  int64_t needle = 0;                    // position of the key's first occurrence
};
// number: number of the probe for this length and depth; it is unlikely to equal a training or validation sequence.
// Throws a UsageError for a depth outside [0, 1] or a length that is too short.
NeedleProbe needle_probe(const NeedleTask&, int64_t length, double depth, uint64_t number);

}  // namespace triad
