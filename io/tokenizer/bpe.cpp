#include "io/tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "io/tokenizer/pair_counts.h"

namespace triad {

namespace {

// The largest word, in bytes, for which scanning all pairs is faster than a heap.
constexpr size_t kShortWord = 128;

// Multiplier of Fibonacci hashing: the product's top bits are well mixed.
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;

}  // namespace

Bpe::Bpe(const std::array<int32_t, 256>& byte_tokens, const std::vector<Merge>& merges, WordTokens whole_words)
    : byte_tokens_(byte_tokens), whole_words_(std::move(whole_words)) {
  const size_t size = std::bit_ceil(std::max<size_t>(16, merges.size() * 2));
  shift_ = 64 - std::countr_zero(size);
  table_.resize(size);
  uint32_t rank = 0;
  for (const Merge& m : merges) {
    const uint64_t pair = pair_of(m.left, m.right);
    size_t at = pair * kGolden >> shift_;
    while (table_[at].rank != kNone && table_[at].pair != pair) at = (at + 1) & (size - 1);
    table_[at] = {pair, rank++, m.merged};
  }
  byte_pair_ranks_.resize(size_t{1} << 16);
  for (size_t i = 0; i < byte_pair_ranks_.size(); ++i)
    byte_pair_ranks_[i] = find(byte_tokens_[i >> 8], byte_tokens_[i & 0xff]).rank;
}

Bpe::Entry Bpe::find(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  for (size_t at = pair * kGolden >> shift_;; at = (at + 1) & (table_.size() - 1))
    if (table_[at].pair == pair || table_[at].rank == kNone) return table_[at];
}

void Bpe::encode(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& out) const {
  if (word.size() == 1) return out.push_back(byte_tokens_[static_cast<uint8_t>(word[0])]);
  std::array<uint64_t, 3> text{};
  if (word.empty() || word.size() > sizeof text) return encode_unknown(word, scratch, out);
  std::memcpy(text.data(), word.data(), word.size());
  const uint64_t mixed = ((text[0] * kGolden ^ text[1]) * kGolden ^ text[2] ^ word.size()) * kGolden;
  BpeScratch::Word& kept = scratch.words[mixed >> (64 - BpeScratch::kWordBits)];
  if (kept.bytes == word.size() && kept.text == text) {
    out.insert(out.end(), kept.tokens.begin(), kept.tokens.begin() + kept.count);
    return;
  }
  const size_t before = out.size();
  encode_unknown(word, scratch, out);
  const size_t count = out.size() - before;
  if (count > kept.tokens.size()) return;
  kept.text = text;
  kept.bytes = static_cast<uint8_t>(word.size());
  kept.count = static_cast<uint8_t>(count);
  std::copy_n(out.begin() + static_cast<int64_t>(before), count, kept.tokens.begin());
}

void Bpe::encode_unknown(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& out) const {
  if (!whole_words_.empty())
    if (const auto found = whole_words_.find(word); found != whole_words_.end()) return out.push_back(found->second);
  word.size() > kShortWord ? encode_long(word, scratch, out) : encode_short(word, scratch, out);
}

void Bpe::encode_short(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& out) const {
  size_t n = word.size();
  if (n == 0) return;
  scratch.tokens.resize(n);
  scratch.ranks.resize(n);  // ranks[i] is the rank of the pair (i, i+1)
  int32_t* tokens = scratch.tokens.data();
  uint32_t* ranks = scratch.ranks.data();
  const auto* bytes = reinterpret_cast<const uint8_t*>(word.data());
  for (size_t i = 0; i < n; ++i) tokens[i] = byte_tokens_[bytes[i]];
  for (size_t i = 0; i + 1 < n; ++i) ranks[i] = byte_pair_ranks_[static_cast<size_t>(bytes[i]) << 8 | bytes[i + 1]];
  while (n > 1) {
    uint32_t least = kNone;
    for (size_t i = 0; i + 1 < n; ++i) least = std::min(least, ranks[i]);
    if (least == kNone) break;
    const auto at = static_cast<size_t>(std::find(ranks, ranks + n - 1, least) - ranks);
    tokens[at] = find(tokens[at], tokens[at + 1]).merged;
    --n;
    std::move(tokens + at + 2, tokens + n + 1, tokens + at + 1);
    std::move(ranks + at + 1, ranks + n, ranks + at);
    if (at > 0) ranks[at - 1] = find(tokens[at - 1], tokens[at]).rank;
    if (at + 1 < n) ranks[at] = find(tokens[at], tokens[at + 1]).rank;
  }
  out.insert(out.end(), tokens, tokens + n);
}

void Bpe::encode_long(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& out) const {
  const auto n = static_cast<int32_t>(word.size());
  std::vector<BpeScratch::Symbol>& symbols = scratch.symbols;
  std::vector<BpeScratch::Candidate>& heap = scratch.heap;
  symbols.resize(word.size());
  heap.clear();
  for (int32_t i = 0; i < n; ++i)
    symbols[static_cast<size_t>(i)] = {byte_tokens_[static_cast<uint8_t>(word[static_cast<size_t>(i)])], i - 1,
                                       i + 1 < n ? i + 1 : -1};
  const auto later = [](const BpeScratch::Candidate& a, const BpeScratch::Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  };
  const auto symbol = [&](int32_t at) -> BpeScratch::Symbol& { return symbols[static_cast<size_t>(at)]; };
  const auto add = [&](int32_t at) {  // adds the pair that begins at symbol `at` to the heap
    const Entry entry = find(symbol(at).token, symbol(symbol(at).next).token);
    if (entry.rank == kNone) return;
    heap.push_back({entry.rank, at, entry.merged});
    std::push_heap(heap.begin(), heap.end(), later);
  };
  for (int32_t i = 0; i + 1 < n; ++i) add(i);
  while (!heap.empty()) {
    const BpeScratch::Candidate best = heap.front();
    std::pop_heap(heap.begin(), heap.end(), later);
    heap.pop_back();
    BpeScratch::Symbol& left = symbol(best.at);
    if (left.token < 0 || left.next < 0) continue;
    BpeScratch::Symbol& right = symbol(left.next);
    // Skipped: one of the two tokens has been merged in the meantime.
    if (find(left.token, right.token).rank != best.rank) continue;
    left.token = best.merged;
    right.token = -1;
    left.next = right.next;
    if (left.next >= 0) {
      symbol(left.next).prev = best.at;
      add(best.at);
    }
    if (left.prev >= 0) add(left.prev);
  }
  for (int32_t at = n > 0 ? 0 : -1; at >= 0; at = symbol(at).next) out.push_back(symbol(at).token);
}

}  // namespace triad
