// A shuffle without memory: a bijection of {0, .., n-1}, keyed by (seed, stream), that is evaluated one element at a
// time.
#pragma once
#include <bit>
#include <cstdint>

#include "engine/rng.h"

namespace triad {

class Permutation {
 public:
  // n >= 1, n <= 2^62.
  Permutation(int64_t n, uint64_t seed, uint64_t stream)
      : n_(static_cast<uint64_t>(n)), half_bits_((std::bit_width(n_ - 1) + 1) / 2), random_(seed, stream) {}

  // A Feistel network permutes the smallest power of four >= n. Values >= n are permuted again until they are below n
  // (cycle walking, fewer than four passes on average), which gives a permutation of {0, .., n-1}.
  int64_t operator()(int64_t i) const {
    auto x = static_cast<uint64_t>(i);
    do x = scramble(x);
    while (x >= n_);
    return static_cast<int64_t>(x);
  }

 private:
  uint64_t scramble(uint64_t x) const {
    // Number of Feistel rounds: four make a pseudorandom permutation (Luby-Rackoff); six mix small domains better.
    constexpr uint64_t kRounds = 6;
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    uint64_t left = x >> half_bits_, right = x & mask;
    for (uint64_t round = 0; round < kRounds; ++round) {
      const uint64_t next = left ^ (random_.block(round << 32 | right)[0] & mask);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  uint64_t n_;
  int half_bits_;
  Philox random_;
};

}  // namespace triad
