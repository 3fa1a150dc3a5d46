// Byte-pair encoding of one word. Each byte begins as one token. Then, again and again, among all adjacent pairs in the
// merge table, the pair with the lowest rank (in a tie, the leftmost) is merged into one token, until no pair is in the
// table.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace triad {

// One encoding thread's buffers. A Bpe itself is shared by all threads.
struct BpeScratch {
  // An entry in a direct-mapped cache of encoded words: up to 24 bytes and 9 tokens, in one cache line.
  struct Word {
    std::array<uint64_t, 3> text;
    uint8_t bytes, count;  // lengths of the word and its tokens; bytes 0: the entry is empty
    std::array<int32_t, 9> tokens;
  };
  static constexpr int kWordBits = 15;  // log2 of the cache's entry count; the entries take 2 MiB
  std::vector<Word> words = std::vector<Word>(size_t{1} << kWordBits);

  struct Symbol {
    int32_t token, prev, next;  // next: -1 at the last symbol; token: -1 if merged into its left neighbour
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

// A hash with which a std::string_view finds a std::string without a copy.
struct ViewHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using WordTokens = std::unordered_map<std::string, int32_t, ViewHash, std::equal_to<>>;

class Bpe {
 public:
  struct Merge {
    int32_t left, right, merged;
  };
  // merges: in rank order; if two merge the same pair, the later one counts. whole_words: words that are encoded as one
  // token, without merges.
  Bpe(const std::array<int32_t, 256>& byte_tokens, const std::vector<Merge>& merges, WordTokens whole_words = {});

  // Appends a word's tokens. The word may hold any bytes.
  void encode(std::string_view word, BpeScratch&, std::vector<int32_t>& out) const;
  // encode()'s two algorithms, public for the test that they agree. encode_short() scans all pairs after each merge;
  // encode_long() keeps candidate pairs in a heap.
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
  std::vector<Entry> table_;  // merge hash table, with open addressing, at most half full
  // Ranks for pairs of single bytes, so that the first lookups of a word need no hashing.
  std::vector<uint32_t> byte_pair_ranks_;
  int shift_ = 0;
  WordTokens whole_words_;
};

}  // namespace triad
