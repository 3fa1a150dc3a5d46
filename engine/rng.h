// Philox4x32-10 (Salmon et al., SC 2011): a counter-based random generator. Number i of a (seed, stream) is a pure
// function of i, so the CPU, the GPU, any thread and a resumed run draw the same numbers. Its functions are constexpr,
// so that device code can call them.
#pragma once
#include <array>
#include <cstdint>

#include "engine/normal.h"

namespace triad {

class Philox {
 public:
  // Streams of one seed are independent; engine/random_streams.h assigns them.
  constexpr Philox(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}

  // A counter's 128 random bits.
  constexpr std::array<uint32_t, 4> block(uint64_t counter) const {
    std::array<uint32_t, 4> x = {lo(counter), hi(counter), lo(stream_), hi(stream_)};
    uint32_t k0 = lo(seed_), k1 = hi(seed_);
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = uint64_t{0xD2511F53u} * x[0], b = uint64_t{0xCD9E8D57u} * x[2];
      x = {hi(b) ^ x[1] ^ k0, lo(b), hi(a) ^ x[3] ^ k1, lo(a)};
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return x;
  }
  // The 64 random bits for each of the indices 2 j and 2 j + 1, which share block j.
  constexpr std::array<uint64_t, 2> bit_pair(uint64_t j) const {
    const std::array<uint32_t, 4> x = block(j);
    return {uint64_t{x[1]} << 32 | x[0], uint64_t{x[3]} << 32 | x[2]};
  }
  // The 64 random bits for index i.
  constexpr uint64_t bits(uint64_t i) const { return bit_pair(i / 2)[i % 2]; }
  // A number uniform in [0, 1), a multiple of 2^-53.
  constexpr double uniform(uint64_t i) const { return static_cast<double>(bits(i) >> 11) * 0x1p-53; }
  // An integer uniform in {0, .., n-1}, n < 2^32. Each probability deviates from 1 / n by less than n / 2^64.
  constexpr uint64_t below(uint64_t i, uint64_t n) const {
    const uint64_t b = bits(i);
    return (hi(b) * n + (lo(b) * n >> 32)) >> 32;
  }
  // A standard normal number (Box-Muller), made from the uniform numbers 2 i and 2 i + 1.
  TRIAD_HOST_DEVICE double normal(uint64_t i) const {
    const std::array<uint64_t, 2> pair = bit_pair(i);
    return normal_from_bits(pair[0], pair[1]);
  }

 private:
  static constexpr uint32_t lo(uint64_t v) { return static_cast<uint32_t>(v); }
  static constexpr uint32_t hi(uint64_t v) { return static_cast<uint32_t>(v >> 32); }
  uint64_t seed_, stream_;
};

}  // namespace triad
