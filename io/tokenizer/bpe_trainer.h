// Learns byte-level BPE from words: again and again the most frequent pair of neighbouring tokens becomes a token. Of
// pairs that are equally frequent the one with the lowest token ids is merged first.
// The result is that of the `tokenizers` library's BpeTrainer with ByteLevel's alphabet, for any order of the words.
#pragma once
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "io/tokenizer/word_counts.h"

namespace triad {

struct BpeTrainerOptions {
  int64_t vocab_size = 32'000;
  std::vector<std::string> special_tokens;  // the first ids, in this order
  int64_t min_frequency = 1;                // pairs that occur less often are not merged
  // The longest token that a merge makes; at least 2. It is the library's max_token_length - 1.
  int64_t max_token_bytes = std::numeric_limits<int64_t>::max();
};

struct TrainedBpe {
  // Tokens in id order, written in the byte alphabet (io/tokenizer/unicode.h): special ones as they are, the 256 bytes
  // in the order of their characters, then one for each merge that does not make a special token.
  std::vector<std::string> tokens;
  std::vector<std::pair<int32_t, int32_t>> merges;  // pairs of token ids in rank order
  int64_t words = 0, text_bytes = 0;                // distinct words; bytes of all their occurrences
  int64_t text_tokens = 0;                          // tokens of all their occurrences, by the order of training
};

// Throws a UsageError, which names the value, for options that no vocabulary can have, or special tokens that the byte
// alphabet would read as other bytes.
void check_bpe_options(const BpeTrainerOptions& options);

// words: taken apart, to save memory. progress: called after each merge with the number of tokens.
// If no pair is left that occurs often enough, the vocabulary is smaller than vocab_size.
TrainedBpe train_bpe(SharedWordCounts& words, const BpeTrainerOptions& options,
                     const std::function<void(int64_t tokens)>& progress);

}  // namespace triad
