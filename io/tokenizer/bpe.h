// Byte-pair encoding of one word: its bytes are tokens, and of all neighbours that the table of merges knows, the pair
// of the lowest rank (the leftmost of several) becomes one token, until no pair is left that it knows.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace triad {

// What an encoder works with. A Bpe is shared by all threads; each brings a scratch of its own.
struct BpeScratch {
  // Words come again and again: of those up to 24 bytes and 9 tokens the last one of each place is kept, a cache line
  // each.
  struct Word {
    std::array<uint64_t, 3> text;
    uint8_t bytes, count;  // bytes 0: none
    std::array<int32_t, 9> tokens;
  };
  static constexpr int kWordBits = 15;  // 2 MiB
  std::vector<Word> words = std::vector<Word>(size_t{1} << kWordBits);

  struct Symbol {
    int32_t token, prev, next;  // next -1: the last one; token -1: merged into the one before
  };
  struct Candidate {
    uint32_t rank;
    int32_t at, merged;
  };
  std::vector<int32_t> tokens;
  std::vector<uint32_t> ranks;
  std::vector<Symbol> symbols;
  std::vector<Candidate> heap;
};

// Looks strings up by views of them.
struct ViewHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using WordTokens = std::unordered_map<std::string, int32_t, ViewHash, std::equal_to<>>;

class Bpe {
 public:
  struct Merge {
    int32_t left, right, merged;  // in the order of their ranks; of one pair's two the later counts
  };
  // whole_words are one token whatever the merges say.
  Bpe(const std::array<int32_t, 256>& byte_tokens, const std::vector<Merge>& merges, WordTokens whole_words = {});

  // Appends the tokens of a word of any bytes.
  void encode(std::string_view word, BpeScratch&, std::vector<int32_t>& out) const;
  // The two ways to merge, for the test that they agree: short words by looking at all pairs after each merge, long
  // ones by a heap of candidates.
  void encode_short(std::string_view word, BpeScratch&, std::vector<int32_t>& out) const;
  void encode_long(std::string_view word, BpeScratch&, std::vector<int32_t>& out) const;

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Entry {
    uint64_t pair = UINT64_MAX;
    uint32_t rank = kNone;
    int32_t merged = -1;
  };
  Entry find(int32_t left, int32_t right) const;
  void encode_unknown(std::string_view word, BpeScratch&, std::vector<int32_t>& out) const;

  std::array<int32_t, 256> byte_tokens_;
  std::vector<Entry> table_;               // open addressing, at most half full
  std::vector<uint32_t> byte_pair_ranks_;  // of two bytes' tokens: a word's first look-ups need no hashing
  int shift_ = 0;
  WordTokens whole_words_;
};

}  // namespace triad
