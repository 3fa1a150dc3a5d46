// Counts the words into which a pre-tokenizer's pattern splits the texts of a corpus: what byte-level BPE learns from.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/fields.h"
#include "io/tokenizer/pattern.h"
#include "io/tokenizer/tokenizer.h"
#include "io/tokenizer/word_counts.h"

namespace triad {

// The patterns of known tokenizers. All three keep a word's space with it and split "don't" before the apostrophe.
// gpt2 has numbers of any length, gpt4 (cl100k) of up to three digits and qwen of one; the last two let any other
// character than a letter, digit or line end begin a word, and keep line ends together.
enum class WordSplit { gpt2, gpt4, qwen };
template <>
struct EnumWords<WordSplit> {
  static constexpr std::pair<std::string_view, WordSplit> words[] = {
      {"gpt2", WordSplit::gpt2}, {"gpt4", WordSplit::gpt4}, {"qwen", WordSplit::qwen}};
};
const char* pattern_of(WordSplit split);

// Its "tokens" are none: append() counts words. Bytes that are not UTF-8 are words of their own, as in BpeTokenizer.
class WordCounter final : public TextEncoder {
 public:
  explicit WordCounter(WordSplit split);
  ~WordCounter() override;
  void append(std::string_view text, std::vector<int32_t>& out) const override;
  size_t append_prefix(std::string_view text, std::vector<int32_t>& out) const override;
  size_t safe_cut(std::string_view text) const override;

  size_t size() const { return counts_.size(); }  // distinct words so far, without each thread's last few
  SharedWordCounts& finish();                     // all words, for when no thread appends any more

 private:
  struct Workspace;
  void count(std::string_view text, Workspace&) const;

  Pattern pattern_;
  mutable SharedWordCounts counts_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Workspace>> idle_;  // unused workspaces; each concurrent call takes one
};

}  // namespace triad
