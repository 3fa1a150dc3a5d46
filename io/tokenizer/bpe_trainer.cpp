#include "io/tokenizer/bpe_trainer.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/text.h"
#include "io/tokenizer/pair_counts.h"
#include "io/tokenizer/unicode.h"

namespace triad {

namespace {

constexpr int64_t kBytes = 256;

// The byte alphabet's characters, in the order of their code points.
std::vector<std::string> byte_alphabet() {
  std::vector<std::string> characters;
  for (int byte = 0; byte < kBytes; ++byte) characters.push_back(spell_byte(static_cast<uint8_t>(byte)));
  std::sort(characters.begin(), characters.end());  // UTF-8 sorts as code points do
  return characters;
}

class BpeTrainer {
 public:
  BpeTrainer(SharedWordCounts& words, const BpeTrainerOptions& options) : options_(options) {
    // A special token that is spelled like a word is the token that merges make, too.
    for (const std::string& token : options.special_tokens)
      add_token(token, static_cast<int64_t>(unspell_bytes(token).value_or("").size()));
    for (const std::string& character : byte_alphabet()) add_token(character, 1);
    take_words(words);
    queue_pairs_of_bytes();
  }

  TrainedBpe run(const std::function<void(int64_t tokens)>& progress) {
    while (static_cast<int64_t>(result_.tokens.size()) < options_.vocab_size && !queue_.empty()) {
      std::pop_heap(queue_.begin(), queue_.end(), later);
      Candidate& best = queue_.back();
      if (const int64_t count = counts_[best.pair]; count != best.count) {  // it has fallen since it was queued
        best.count = count;
        std::push_heap(queue_.begin(), queue_.end(), later);
        continue;
      }
      if (best.count < std::max<int64_t>(1, options_.min_frequency)) break;
      const TokenPair pair = best.pair;
      const std::vector<uint32_t> words = std::exchange(places_[best.at], {});
      queue_.pop_back();
      result_.merges.emplace_back(left_of(pair), right_of(pair));
      merge(left_of(pair), right_of(pair), words);
      progress(static_cast<int64_t>(result_.tokens.size()));
    }
    for (const Word& word : words_) result_.text_tokens += word.count * word.size;
    return std::move(result_);
  }

 private:
  struct Word {
    uint64_t begin;  // index of its first token in symbols_
    uint32_t size;   // number of tokens, which falls with each merge
    int64_t count;
  };
  // A pair that may be merged.
  struct Candidate {
    int64_t count;  // when it was queued
    TokenPair pair;
    uint32_t at;  // the words that hold it, or did, are places_[at]
  };
  static bool later(const Candidate& a, const Candidate& b) {
    return a.count != b.count ? a.count < b.count : a.pair > b.pair;
  }
  // What a merge changes next to the merged pair, by the neighbouring token, so that one access to counts_ does for all
  // words.
  struct Neighbour {
    int64_t count = 0;
    std::vector<uint32_t> words;
  };
  struct Side {
    std::vector<Neighbour> by_token;
    std::vector<int32_t> touched;
    Neighbour& operator[](int32_t token) { return by_token[static_cast<size_t>(token)]; }
    void add(int32_t token, int64_t count, uint32_t word) {
      Neighbour& neighbour = (*this)[token];
      if (neighbour.words.empty()) touched.push_back(token);
      if (neighbour.words.empty() || neighbour.words.back() != word) neighbour.words.push_back(word);
      neighbour.count += count;
    }
    void clear() {
      for (const int32_t token : touched) {
        (*this)[token].count = 0;
        (*this)[token].words.clear();
      }
      touched.clear();
    }
  };

  int64_t length_of(int32_t token) const { return lengths_[static_cast<size_t>(token)]; }

  // length: in bytes.
  int32_t add_token(const std::string& token, int64_t length) {
    const auto id = static_cast<int32_t>(result_.tokens.size());
    const auto [known, is_new] = ids_.emplace(token, id);
    if (!is_new) return known->second;
    result_.tokens.push_back(token);
    lengths_.push_back(length);
    for (Side* side : {&left_, &right_}) side->by_token.emplace_back();
    return id;
  }

  void take_words(SharedWordCounts& shared) {
    std::array<int32_t, kBytes> byte_tokens{};
    for (size_t byte = 0; byte < byte_tokens.size(); ++byte)
      byte_tokens[byte] = ids_.at(spell_byte(static_cast<uint8_t>(byte)));
    result_.words = static_cast<int64_t>(shared.size());
    TRIAD_CHECK(result_.words < UINT32_MAX, "{} distinct words: fewer than {} are needed", result_.words, UINT32_MAX);
    size_t bytes = 0;
    for (const WordCounts& part : shared.parts()) bytes += part.text_bytes();
    symbols_.reserve(bytes);
    words_.reserve(shared.size());
    for (WordCounts& part : shared.parts()) {
      const WordCounts words = std::exchange(part, {});
      for (size_t i = 0; i < words.size(); ++i) {
        const std::string_view word = words.word(i);
        result_.text_bytes += words.count(i) * static_cast<int64_t>(word.size());
        words_.push_back({symbols_.size(), static_cast<uint32_t>(word.size()), words.count(i)});
        for (const char c : word) symbols_.push_back(byte_tokens[static_cast<uint8_t>(c)]);
      }
    }
  }

  void queue_pairs_of_bytes() {
    const auto first = static_cast<int32_t>(options_.special_tokens.size());
    std::vector<Neighbour> pairs(kBytes * kBytes);
    for (size_t w = 0; w < words_.size(); ++w)
      for (uint32_t i = 0; i + 1 < words_[w].size; ++i) {
        const int32_t* symbols = &symbols_[words_[w].begin + i];
        Neighbour& pair = pairs[static_cast<size_t>((symbols[0] - first) * kBytes + symbols[1] - first)];
        pair.count += words_[w].count;
        if (pair.words.empty() || pair.words.back() != w) pair.words.push_back(static_cast<uint32_t>(w));
      }
    for (size_t i = 0; i < pairs.size(); ++i) {
      if (pairs[i].count == 0) continue;
      const TokenPair pair =
          pair_of(first + static_cast<int32_t>(i / kBytes), first + static_cast<int32_t>(i % kBytes));
      counts_[pair] = pairs[i].count;
      queue(pair, pairs[i].words);
      pairs[i].words = {};
    }
  }

  void queue(TokenPair pair, const std::vector<uint32_t>& words) {
    const int64_t count = counts_[pair];
    if (count <= 0) return;
    queue_.push_back({count, pair, static_cast<uint32_t>(places_.size())});
    std::push_heap(queue_.begin(), queue_.end(), later);
    places_.push_back(words);
  }

  void merge(int32_t left, int32_t right, const std::vector<uint32_t>& words) {
    const auto& tokens = result_.tokens;
    const int32_t merged = add_token(tokens[static_cast<size_t>(left)] + tokens[static_cast<size_t>(right)],
                                     length_of(left) + length_of(right));
    for (const uint32_t word : words) merge_in(word, left, right, merged);
    for (const int32_t token : left_.touched) replace(pair_of(token, left), pair_of(token, merged), left_[token]);
    for (const int32_t token : right_.touched) replace(pair_of(right, token), pair_of(merged, token), right_[token]);
    left_.clear();
    right_.clear();
  }

  // No pair is queued twice: `made` holds the token that a merge has just made.
  void replace(TokenPair gone, TokenPair made, const Neighbour& where) {
    counts_[gone] -= where.count;
    if (length_of(left_of(made)) + length_of(right_of(made)) > options_.max_token_bytes) return;
    counts_[made] += where.count;
    queue(made, where.words);
  }

  // Merges the pair wherever it is in a word, from the left.
  void merge_in(uint32_t number, int32_t left, int32_t right, int32_t merged) {
    Word& word = words_[number];
    int32_t* const symbols = &symbols_[word.begin];
    const uint32_t size = word.size;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < size;) {
      if (symbols[i] != left || i + 1 == size || symbols[i + 1] != right) {
        symbols[kept++] = symbols[i++];
        continue;
      }
      i += 2;
      if (kept > 0) left_.add(symbols[kept - 1], word.count, number);
      if (i < size) right_.add(symbols[i], word.count, number);
      symbols[kept++] = merged;
    }
    word.size = kept;
  }

  const BpeTrainerOptions& options_;
  TrainedBpe result_;
  std::unordered_map<std::string, int32_t> ids_;
  std::vector<int64_t> lengths_;  // [token id]
  std::vector<Word> words_;
  std::vector<int32_t> symbols_;  // each word's tokens
  PairCounts counts_;
  std::vector<Candidate> queue_;  // a heap
  std::vector<std::vector<uint32_t>> places_;
  Side left_, right_;  // what is to the left and right of the pair that is being merged
};

void check_special_token(const std::string& token) {
  if (token.empty()) fail_usage("a special token is empty: a text is needed, such as <|endoftext|>");
  if (utf8_prefix(token) != token.size()) fail_usage("the special token {} is not UTF-8", printable(token));
  const std::optional<std::string> bytes = unspell_bytes(token);
  if (bytes && (bytes->size() == 1 || *bytes != token))
    fail_usage("the special token {} is how a vocabulary of bytes writes {}: a text of its own is needed, such as {}",
               printable(token), bytes->size() == 1 ? "a single byte" : "other bytes", "<|endoftext|>");
}

}  // namespace

void check_bpe_options(const BpeTrainerOptions& options) {
  std::unordered_set<std::string> known;
  for (const std::string& token : options.special_tokens) {
    check_special_token(token);
    if (!known.insert(token).second) fail_usage("the special token {} is given twice", printable(token));
  }
  const auto special = static_cast<int64_t>(known.size());
  if (options.vocab_size < kBytes + special)
    fail_usage("a vocabulary of {} is too small: 256 bytes and {} need {}", options.vocab_size,
               counted(special, "special token"), kBytes + special);
}

TrainedBpe train_bpe(SharedWordCounts& words, const BpeTrainerOptions& options,
                     const std::function<void(int64_t tokens)>& progress) {
  check_bpe_options(options);
  return BpeTrainer(words, options).run(progress);
}

}  // namespace triad
