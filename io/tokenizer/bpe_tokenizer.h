// Byte-level BPE as the `tokenizers` library does it, token for token. A text goes through five steps:
//   1. added tokens that are looked for in the text as it is are cut out;
//   2. the normalizer, where there is one, brings what lies between into a normal form;
//   3. added tokens that are looked for behind the normalizer are cut out;
//   4. the pre-tokenizer's patterns cut what lies between into words;
//   5. each word's bytes are merged (io/tokenizer/bpe.h).
// Bytes that are no UTF-8, which the library does not take at all, are words of their own; so every byte string comes
// back from decode() as it was, unless a normalizer, a prefix space or a token that swallows spaces changed it.
#pragma once
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "io/tokenizer/added_tokens.h"
#include "io/tokenizer/bpe.h"
#include "io/tokenizer/pattern.h"
#include "io/tokenizer/tokenizer.h"
#include "io/tokenizer/unicode.h"

namespace triad {

// What becomes of a pattern's matches and of what lies between them.
enum class SplitBehavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };

// What the files say.
struct BpeSpec {
  std::string name;
  std::vector<Tokenizer::File> files;
  std::vector<std::optional<std::string>> texts;  // by token: the bytes it stands for; ids without a token have none
  std::array<int32_t, 256> byte_tokens{};
  std::vector<Bpe::Merge> merges;
  std::vector<AddedToken> added;
  std::vector<NormalForm> normalizers;
  struct Split {
    bool prefix_space = false;  // no pattern: a space goes before what has none
    std::string pattern = {};   // Oniguruma's
    SplitBehavior behavior = SplitBehavior::isolated;
    bool invert = false;  // matches are what lies between, and the other way round
  };
  std::vector<Split> splits;
  WordTokens whole_words;  // ignore_merges: these are one token whatever the merges say
  int32_t eot = 0;
};

class BpeTokenizer final : public Tokenizer {
 public:
  BpeTokenizer(BpeSpec, const TokenizerOptions&);
  ~BpeTokenizer() override;
  std::string name() const override { return spec_.name; }
  int64_t vocab_size() const override { return static_cast<int64_t>(spec_.texts.size()); }
  int32_t eot() const override { return spec_.eot; }
  std::vector<File> files() const override { return spec_.files; }
  void append(std::string_view text, std::vector<int32_t>& out) const override;
  size_t append_beginning(std::string_view text, std::vector<int32_t>& out) const override;
  std::string decode(std::span<const int32_t> tokens) const override;

 private:
  struct Workspace;
  class Lease;
  struct Step {
    std::optional<Pattern> pattern;  // none: a prefix space
    SplitBehavior behavior;
    bool invert;
  };
  template <class Section>
  size_t cut_out(const AddedTokens&, std::string_view text, bool goes_on, std::vector<int32_t>& out,
                 Section&& section) const;
  size_t encode_utf8(std::string_view text, bool goes_on, Workspace&, std::vector<int32_t>& out) const;
  size_t split(size_t step, std::string_view text, bool goes_on, Workspace&, std::vector<int32_t>& out) const;
  void split_otherwise(size_t step, std::string_view text, Workspace&, std::vector<int32_t>& out) const;
  bool cuts_beginnings(size_t step) const;

  BpeSpec spec_;
  TokenizerOptions options_;
  Bpe bpe_;
  AddedTokens raw_, normalized_;
  std::vector<Step> steps_;
  bool has_beginnings_ = false;  // append_beginning() finds any
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Workspace>> idle_;  // each encoding call borrows one
};

// tokenizer.json of the `tokenizers` library. What it asks for and is not understood here is an Error that names it:
// other models than BPE, normalizers but Unicode's forms, pre-tokenizers but Split, Digits and ByteLevel, which has to
// be the last. Truncation, padding and the post-processor's tokens have no say in what a document's tokens are.
std::unique_ptr<Tokenizer> read_tokenizer_json(const std::string& name, const std::string& path,
                                               const TokenizerOptions&);
// GPT-2's encoder.json and vocab.bpe; <|endoftext|> is a special token, the pattern GPT-2's.
std::unique_ptr<Tokenizer> read_bpe_pair(const std::string& name, const std::string& vocabulary,
                                         const std::string& merges, const TokenizerOptions&);

}  // namespace triad
