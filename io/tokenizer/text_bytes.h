// How many bytes of text tokens stand for, by which a loss per token becomes bits per byte.
#pragma once
#include <cstdint>
#include <limits>
#include <numbers>
#include <span>

#include "io/tokenizer/tokenizer.h"

namespace triad {

// Bytes of the targets' text. Targets below 0 are none, and an end-of-text token has no bytes. Throws for a token
// outside the vocabulary.
int64_t text_bytes(const Tokenizer&, std::span<const int32_t> targets);

// Bits per byte of losses in nats, summed over all targets, end-of-text tokens included; NaN without bytes.
inline double bits_per_byte(double nats, double bytes) {
  return bytes > 0 ? nats / std::numbers::ln2 / bytes : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace triad
