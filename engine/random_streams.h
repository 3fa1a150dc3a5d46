// Assigns Philox streams (engine/rng.h) to the uses of a run's seed. The ranges are disjoint, so no two uses draw the
// same number. A run's weights and data depend on these values: a new use gets a new range, and the existing ranges
// never change.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace triad {

// The uses of a seed. The trailing comment says what `index` in random_stream(use, index) counts.
enum class RandomUse {
  init,                // model parameters
  needle_train,        // needle task's training sequences
  needle_val,          // needle task's validation sequences
  needle_probe,        // needle task's probes: a hash of the probe's cell plus its number, modulo 2^48
  order,               // training data epochs
  sampling,            // `triad generate` prompts
  held_out_documents,  // index is always 0
  held_out_strata,     // index is always 0
  synthetic,           // 0: training data, 1: validation data
  packed_documents,    // epoch
  packed_rows,         // document group
  state_rounding,      // optimizer state in bf16: 4 times the optimizer step, plus the tensor's number in adamw.h
  gradient_rounding,   // gradient sums in bf16: micro-step, counted from the run's beginning
  component_seed,      // a mixture's component
};

// The random streams [first, first + count), which are reserved for one use.
struct RandomStreams {
  RandomUse use;
  uint64_t first, count;
};
inline constexpr uint64_t kManyStreams = uint64_t{1} << 48;
inline constexpr std::array<RandomStreams, 14> kRandomStreams = {{
    {RandomUse::init, 0, kManyStreams},
    {RandomUse::needle_train, 0x6e65000000000000, kManyStreams},
    {RandomUse::needle_val, 0x6e66000000000000, kManyStreams},
    {RandomUse::needle_probe, 0x6e67000000000000, kManyStreams},
    {RandomUse::order, 0x6f72646572000000, kManyStreams},
    {RandomUse::sampling, 0x73616d706c650000, kManyStreams},
    {RandomUse::held_out_documents, 0x73706c6974000000, 1},
    {RandomUse::held_out_strata, 0x7374726174610000, 1},
    {RandomUse::synthetic, 0x746f6b656e000000, 2},
    {RandomUse::packed_documents, 0x7061000000000000, kManyStreams},
    {RandomUse::packed_rows, 0x7062000000000000, kManyStreams},
    {RandomUse::state_rounding, 0x7273000000000000, kManyStreams},
    {RandomUse::gradient_rounding, 0x7274000000000000, kManyStreams},
    {RandomUse::component_seed, 0x6d69000000000000, kManyStreams},
}};

// The stream for a use's sequence `index`; index < the use's count.
constexpr uint64_t random_stream(RandomUse use, uint64_t index = 0) {
  return kRandomStreams[static_cast<size_t>(use)].first + index;
}

}  // namespace triad
