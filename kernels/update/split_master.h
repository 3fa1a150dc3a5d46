// Split masters: an fp32 master weight is stored as the bf16 weight that the model computes with, which is the master
// rounded to nearest even, and a 16-bit remainder. As integers, the bits of all three are
//   master = 2^16 weight + remainder,  -2^15 <= remainder <= 2^15.
// The weight may be farther from zero than the master, so the remainder has a sign. If the master is halfway between
// two bf16 values, the weight is the one whose last bit is 0, and the remainder is 2^15 or -2^15. Both have the lower
// 16 bits 0x8000, so one more bit for each master, its tie bit, is set for 2^15. (No 16-bit code can be exact: 2^16 + 1
// masters round to a weight whose last bit is 0.)
//
// Exact for every finite master, both zeros, subnormal numbers and those that round to infinity included, and for
// infinities. A NaN stays a NaN, but its payload, the bits below its exponent, may change.
#pragma once
#include <cstdint>

#include "engine/context.h"

namespace triad {

// Whether the master with these bits has its tie bit set: it is halfway, and the lower bf16 value has the last bit 0.
constexpr bool has_tie_bit(uint32_t master) { return (master & 0x1ffffu) == 0x8000u; }
// The remainder's lower 16 bits.
constexpr uint16_t remainder_of(uint32_t master) { return static_cast<uint16_t>(master); }
constexpr uint32_t join_bits(uint16_t weight, uint16_t remainder, bool tie) {
  const auto extended = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(remainder)));
  return ((uint32_t{weight} + (tie ? 1u : 0u)) << 16) + extended;
}

// Consecutive masters' tie bits, 32 in a word: master i's is bit (first + i) % 32 in word (first + i) / 32.
struct TieBits {
  Tensor words;  // [any] i32
  int64_t first = 0;
  static constexpr int64_t kPerWord = 32;
  static int64_t words_for(int64_t masters) { return (masters + kPerWord - 1) / kPerWord; }
};

// Tensors for n masters. Parts of one buffer may be updated at the same time even if they have bits in one word.
struct SplitMaster {
  Tensor remainder;  // [n, 2] u8: each remainder's two bytes, the lower one first
  Tensor weights;    // [n] bf16
  TieBits ties;
};
inline bool is_remainder(const Tensor& t) { return t.dtype == DType::u8; }
inline uint16_t* remainder_bits(const Tensor& t) { return reinterpret_cast<uint16_t*>(t.ptr<uint8_t>()); }
inline uint32_t* tie_words(const TieBits& ties) { return reinterpret_cast<uint32_t*>(ties.words.ptr<int32_t>()); }
// Throws unless these are split masters for n elements.
void check_split_master(const char* op, const SplitMaster&, int64_t n);

// master [n] f32 overwritten with the masters.
void join_master(Context&, Tensor master, const SplitMaster&);
// Split masters overwritten with those for master [n] f32. Other masters' bits in the words stay as they are.
void split_master(Context&, const SplitMaster&, ConstTensor master);

namespace cuda {
void join_master(Context&, Tensor master, const SplitMaster&);
void split_master(Context&, const SplitMaster&, ConstTensor master);
}  // namespace cuda
}  // namespace triad
