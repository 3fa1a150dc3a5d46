// The Philox streams that each use of a seed may draw from. The ranges are disjoint, so no two uses draw the same
// number. A run's weights and data depend on these values: a new use gets a new range, and the existing ranges never
// change.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace triad {

// The uses of a seed. The trailing comment says what the argument `index` of random_stream() is.
enum class RandomUse {
  init,                // parameter
  needle_train,        // sequence
  needle_val,          // sequence
  needle_probe,        // cell and number of the probe, 48 bits
  order,               // epoch
  sampling,            // prompt
  held_out_documents,  // 0
  held_out_strata,     // 0
  synthetic,           // 0: training, 1: validation
};

struct RandomStreams {
  RandomUse use;
  uint64_t first, count;
};
inline constexpr uint64_t kManyStreams = uint64_t{1} << 48;
inline constexpr std::array<RandomStreams, 9> kRandomStreams = {{
    {RandomUse::init, 0, kManyStreams},
    {RandomUse::needle_train, 0x6e65000000000000, kManyStreams},
    {RandomUse::needle_val, 0x6e66000000000000, kManyStreams},
    {RandomUse::needle_probe, 0x6e67000000000000, kManyStreams},
    {RandomUse::order, 0x6f72646572000000, kManyStreams},
    {RandomUse::sampling, 0x73616d706c650000, kManyStreams},
    {RandomUse::held_out_documents, 0x73706c6974000000, 1},
    {RandomUse::held_out_strata, 0x7374726174610000, 1},
    {RandomUse::synthetic, 0x746f6b656e000000, 2},
}};

// The stream of the index-th sequence of numbers of a use; index < count.
constexpr uint64_t random_stream(RandomUse use, uint64_t index = 0) {
  return kRandomStreams[static_cast<size_t>(use)].first + index;
}

}  // namespace triad
