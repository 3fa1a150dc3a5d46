// How often pairs of tokens occur, by pair.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace triad {

// A pair of token ids as one number, in whose order pairs are ordered by their left and then their right token.
using TokenPair = uint64_t;
inline TokenPair pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}
inline int32_t left_of(TokenPair pair) { return static_cast<int32_t>(pair >> 32); }
inline int32_t right_of(TokenPair pair) { return static_cast<int32_t>(pair & UINT32_MAX); }

// A hash of a pair for a table of 2^bits slots: the top bits of a product with the golden ratio are well mixed.
inline size_t pair_slot(TokenPair pair, int bits) { return pair * 0x9e3779b97f4a7c15 >> (64 - bits); }

class PairCounts {
 public:
  // The pair's count, 0 at first. The reference is valid until the next call.
  int64_t& operator[](TokenPair pair) {
    if (slots_.size() <= 2 * used_) grow();
    Slot& slot = find(pair);
    if (slot.pair == kNone) slot.pair = pair, ++used_;
    return slot.count;
  }

 private:
  static constexpr TokenPair kNone = UINT64_MAX;
  struct Slot {
    TokenPair pair = kNone;
    int64_t count = 0;
  };

  Slot& find(TokenPair pair) {
    size_t at = pair_slot(pair, std::countr_zero(slots_.size()));
    while (slots_[at].pair != kNone && slots_[at].pair != pair) at = (at + 1) & (slots_.size() - 1);
    return slots_[at];
  }
  void grow() {
    std::vector<Slot> old(slots_.empty() ? size_t{1} << 16 : 2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.pair != kNone) find(slot.pair) = slot;
  }

  std::vector<Slot> slots_;  // hash table with open addressing, at most half full
  size_t used_ = 0;
};

}  // namespace triad
