// Stochastic rounding to bf16: a number between two bf16 values becomes the upper one with a probability equal to the
// relative distance from the lower one, so that on average nothing is lost, however small a change is. (Rounded to
// nearest, a change below half a unit in the last place, 2^-9 to 2^-8 of the number, has no effect.) Random bits are a
// pure function of seed, stream and element index, and rounding is integer arithmetic, so CPU, GPU and any split of the
// elements give the same bits.
#pragma once
#include <bit>
#include <cstdint>

#include "engine/dtype.h"
#include "engine/rng.h"

namespace triad {

// The random bits for a flat buffer's elements. Eight elements share one generator block: 16 bits each.
class RoundingBits {
 public:
  static constexpr int64_t kGroup = 8;
  struct Block {
    std::array<uint32_t, 4> words;
    // The bits for element 8 group + lane, as a number below 2^16.
    constexpr uint32_t lane(int lane) const { return words[static_cast<size_t>(lane / 2)] >> lane % 2 * 16 & 0xffffu; }
  };
  constexpr RoundingBits(uint64_t seed, uint64_t stream) : random_(seed, stream) {}
  // The bits for elements [8 group, 8 group + 8).
  constexpr Block block(int64_t group) const { return {random_.block(static_cast<uint64_t>(group))}; }
  constexpr uint32_t of(int64_t element) const {
    return block(element / kGroup).lane(static_cast<int>(element % kGroup));
  }

 private:
  Philox random_;
};

// Rounds the float with these bits to bf16, and returns its bits; random is below 2^16. A bf16 value stays what it is,
// infinities and NaN included, and a finite number stays finite: beyond the largest bf16 it is rounded toward zero.
constexpr uint16_t round_stochastically(uint32_t float_bits, uint32_t random) {
  constexpr uint32_t kLargest = 0x7f7f0000, kInfinity = 0x7f800000, kQuiet = 0x40;
  const uint32_t magnitude = float_bits & 0x7fffffffu;
  if (magnitude > kLargest) return static_cast<uint16_t>(float_bits >> 16 | (magnitude > kInfinity ? kQuiet : 0));
  return static_cast<uint16_t>((float_bits + random) >> 16);
}

// Rounds a flat buffer's elements, visited in ascending order, on the CPU.
class StochasticRounder {
 public:
  StochasticRounder(uint64_t seed, uint64_t stream) : bits_(seed, stream) {}
  bf16 operator()(float x, int64_t element) {
    if (const int64_t group = element / RoundingBits::kGroup; group != group_) {
      block_ = bits_.block(group);
      group_ = group;
    }
    bf16 rounded;
    rounded.bits =
        round_stochastically(std::bit_cast<uint32_t>(x), block_.lane(static_cast<int>(element % RoundingBits::kGroup)));
    return rounded;
  }

 private:
  RoundingBits bits_;
  RoundingBits::Block block_{};
  int64_t group_ = -1;
};

}  // namespace triad
