// The task of `data.kind: needle`, associative recall over a distance. Keys followed by their values (the needles) are
// placed among random tokens (the hay). Where a key occurs again (a question), the model must predict the key's value.
// Only these values are targets, because everything else is unpredictable.
#pragma once
#include <cstdint>
#include <vector>

#include "io/data/dataset.h"

namespace triad {

// The parameters of a recall task. Token 0 begins a sequence; of the other tokens, a third each are keys, tokens of
// values, and hay. A sequence is a pure function of the seed and the sequence's number.
struct NeedleTask {
  int64_t vocab = 0, seq_len = 0;
  int64_t pairs = 64;        // key-value pairs per sequence; each key has one value
  int64_t questions = 1;     // mean number of questions per key; every second key has exactly one
  int64_t value_tokens = 1;  // number of tokens in a value
  // In [0, 1]: only one key is asked, at this depth, as in needle_probe. -1: all keys are asked, at any later position.
  double depth = -1;
  uint64_t seed = 0;

  int64_t kinds() const { return (vocab - 1) / 3; }  // number of different keys, and of different tokens in values
  int32_t first_value() const { return static_cast<int32_t>(1 + kinds()); }
  int32_t first_hay() const { return static_cast<int32_t>(1 + 2 * kinds()); }
  // Throws a UsageError, which names the config's keys and the limits, if a sequence of `length` tokens cannot hold the
  // task.
  void check() const;
};

// Training and validation sequences of the task. Positions are random: half of a key's occurrences are at a uniform
// position, half at a log-uniform distance from the key's previous occurrence, so that short distances, which are
// learned first, are frequent enough.
DataSplit needle_data(const NeedleTask&, double val_fraction);

// A test sequence for the needle at one depth. It has `length` tokens and ends in a key and the key's value without its
// last token. The key's first occurrence is at `depth` of the way from the first token (0) to directly before the
// question (1). Other pairs surround it, as densely as in training.
struct NeedleProbe {
  std::vector<int32_t> tokens, targets;  // targets are -1, except for the last value_tokens
  int64_t needle = 0;                    // position of the first occurrence of the key that is asked
};
// Makes a probe. number: the probe's number for this length and depth. A probe is unlikely to equal a training or
// validation sequence. Throws a UsageError for a depth outside [0, 1] or a length that is too short.
NeedleProbe needle_probe(const NeedleTask&, int64_t length, double depth, uint64_t number);

}  // namespace triad
