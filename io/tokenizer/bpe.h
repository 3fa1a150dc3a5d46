// Byte-pair encoding of one word. Each byte begins as one token. Then, of all adjacent pairs in the table of merges,
// the pair of the lowest rank (the leftmost of equals) is merged into one token, until no pair is in the table.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace triad {

// Buffers of one encoding thread. A Bpe is shared by all threads.
struct BpeScratch {
  // A direct-mapped cache of encoded words of up to 24 bytes and 9 tokens, a cache line each.
  struct Word {
    std::array<uint64_t, 3> text;
    uint8_t bytes, count;  // bytes 0: empty entry
    std::array<int32_t, 9> tokens;
  };
  static constexpr int kWordBits = 15;  // 2 MiB
  std::vector<Word> words = std::vector<Word>(size_t{1} << kWordBits);

  struct Symbol {
    int32_t token, prev, next;  // next -1: last symbol; token -1: merged into its left neighbour
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

// Hash for lookups of a std::string by a std::string_view.
struct ViewHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using WordTokens = std::unordered_map<std::string, int32_t, ViewHash, std::equal_to<>>;

class Bpe {
 public:
  struct Merge {
    int32_t left, right,
        merged;  // merges are in the order of their ranks; of two merges of one pair the later one counts
  };
  // whole_words are encoded as one token, without merges.
  Bpe(const std::array<int32_t, 256>& byte_tokens, const std::vector<Merge>& merges, WordTokens whole_words = {});

  // Appends the tokens of a word, which may hold any bytes.
  void encode(std::string_view word, BpeScratch&, std::vector<int32_t>& out) const;
  // The two algorithms, public for the test that they agree: short words by scanning all pairs after each merge, long
  // words by a heap of candidate pairs.
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
  std::vector<Entry> table_;               // hash table with open addressing, at most half full
  std::vector<uint32_t> byte_pair_ranks_;  // ranks of pairs of byte tokens: the first lookups of a word need no hashing
  int shift_ = 0;
  WordTokens whole_words_;
};

}  // namespace triad
