// Byte-level BPE with the same tokens as the `tokenizers` library. A text passes five steps:
//   1. added tokens that are matched in raw text are cut out;
//   2. the normalizer, if there is one, normalizes the text between them;
//   3. added tokens that are matched in normalized text are cut out;
//   4. the pre-tokenizer's patterns split the text between them into words;
//   5. each word's bytes are merged (io/tokenizer/bpe.h).
// Bytes that are not UTF-8, which the library does not accept, are separate words. So decode(encode(x)) == x for any
// bytes, unless a normalizer, a prefix space or a token with lstrip or rstrip changed the text.
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

// How a split treats a pattern's matches and the text between them.
enum class SplitBehavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };

// What the tokenizer's files contain.
struct BpeSpec {
  std::string name;
  std::vector<Tokenizer::File> files;
  std::vector<std::optional<std::string>> texts;  // [token id]: the token's bytes; nullopt for an unused id
  std::array<int32_t, 256> byte_tokens{};
  std::vector<Bpe::Merge> merges;
  std::vector<AddedToken> added;
  std::vector<NormalForm> normalizers;
  struct Split {
    bool prefix_space = false;  // instead of a pattern: this step prepends a space if the text does not begin with one
    std::string pattern = {};   // regular expression in Oniguruma's syntax
    SplitBehavior behavior = SplitBehavior::isolated;
    bool invert = false;  // true: matches and the text between them exchange their roles
  };
  std::vector<Split> splits;
  WordTokens whole_words;  // words that are encoded as one token (ignore_merges)
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
  size_t append_prefix(std::string_view text, std::vector<int32_t>& out) const override;
  std::string decode(std::span<const int32_t> tokens) const override;
  bool has(int32_t token) const override {
    return token >= 0 && token < vocab_size() && spec_.texts[static_cast<size_t>(token)];
  }

 private:
  struct Workspace;
  class Lease;
  struct Step {
    std::optional<Pattern> pattern;  // nullopt: this step adds a prefix space
    SplitBehavior behavior;
    bool invert;
  };
  template <class Section>
  size_t cut_out(const AddedTokens&, std::string_view text, bool more_follows, std::vector<int32_t>& out,
                 Section&& section) const;
  size_t encode_utf8(std::string_view text, bool more_follows, Workspace&, std::vector<int32_t>& out) const;
  size_t split(size_t step, std::string_view text, bool more_follows, Workspace&, std::vector<int32_t>& out) const;
  void split_otherwise(size_t step, std::string_view text, Workspace&, std::vector<int32_t>& out) const;
  bool splits_prefixes(size_t step) const;

  BpeSpec spec_;
  TokenizerOptions options_;
  Bpe bpe_;
  AddedTokens raw_, normalized_;
  std::vector<Step> steps_;
  bool has_final_prefixes_ = false;  // whether append_prefix() can return tokens
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Workspace>> idle_;  // unused workspaces; each concurrent call takes one
};

// Throws a UsageError for a tokenizer that takes no separator but its own.
[[noreturn]] void refuse_separator(const std::string& name, const std::string& separator);

// Reads the `tokenizers` library's tokenizer.json. Supported: the model BPE, Unicode's normal forms as normalizers, and
// the pre-tokenizers Split, Digits and ByteLevel, where ByteLevel must be the last. Anything else throws an Error that
// names it. Truncation, padding and the post-processor do not affect a document's tokens and are ignored. A file with
// byte_tokenizer_json()'s vocabulary is a ByteTokenizer.
std::unique_ptr<Tokenizer> read_tokenizer_json(const std::string& name, const std::string& path,
                                               const TokenizerOptions&);
// Reads GPT-2's encoder.json and vocab.bpe. <|endoftext|> is a special token, and the pattern is GPT-2's.
std::unique_ptr<Tokenizer> read_bpe_pair(const std::string& name, const std::string& vocabulary,
                                         const std::string& merges, const TokenizerOptions&);

}  // namespace triad
