// Tokenizers convert text to token numbers and back. A token is a byte, or the tokens are byte-level BPE from files of
// the `tokenizers` library or GPT-2 (io/tokenizer/bpe_tokenizer.h).
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace triad {

// What the reader of a corpus (io/data/corpus.h) hands texts to. Threads may encode concurrently.
class TextEncoder {
 public:
  virtual ~TextEncoder() = default;
  // Appends a text's tokens; the text may hold any bytes; adds no eot.
  virtual void append(std::string_view text, std::vector<int32_t>& out) const = 0;
  // Encodes the beginning of a text that will continue: appends the tokens that later text cannot change, and returns
  // how many bytes they encode. The caller passes the remaining bytes again, with more text. Returns 0 if no token is
  // certain.
  virtual size_t append_prefix(std::string_view text, std::vector<int32_t>& out) const = 0;
  // A position at which a text that will continue can be cut without encoding it, because the two parts' tokens, one
  // after the other, are those of the whole; 0 if none is known.
  virtual size_t safe_cut(std::string_view text) const;
};

// A tokenizer. Threads may encode and decode concurrently.
class Tokenizer : public TextEncoder {
 public:
  struct File {
    std::string name, content;
    bool operator==(const File&) const = default;
  };

  virtual std::string name() const = 0;    // the name with which make_tokenizer makes this tokenizer
  virtual int64_t vocab_size() const = 0;  // every token is in [0, vocab_size)
  virtual int32_t eot() const = 0;         // the end-of-text token, which is written before each document
  // The files from which make_tokenizer can rebuild this tokenizer in any folder.
  virtual std::vector<File> files() const = 0;

  std::vector<int32_t> encode(std::string_view text) const;
  // Concatenates the tokens' bytes. Throws for a token outside the vocabulary.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
  // Whether the vocabulary has this token. A model may have more: its vocabulary is often padded.
  virtual bool has(int32_t token) const = 0;
  virtual bool available() const { return true; }  // false for NoTokenizer only
};

// A tokenizer whose tokens are bytes: vocabulary 256, end-of-text token 0. decode(encode(x)) == x for any bytes.
class ByteTokenizer final : public Tokenizer {
 public:
  std::string name() const override { return "byte"; }
  int64_t vocab_size() const override { return 256; }
  int32_t eot() const override { return 0; }
  std::vector<File> files() const override { return {}; }
  void append(std::string_view text, std::vector<int32_t>& out) const override;
  size_t append_prefix(std::string_view text, std::vector<int32_t>& out) const override;
  std::string decode(std::span<const int32_t> tokens) const override;
  bool has(int32_t token) const override { return token >= 0 && token < vocab_size(); }
};
// The tokenizer.json that gives the byte tokenizer's tokens in the `tokenizers` library. make_tokenizer recognizes it.
// Its token 0 is the character U+0000, special, and the others are spelled as in every byte-level vocabulary.
std::string byte_tokenizer_json();

// Stands in where a model has no tokenizer: every function that needs text throws an Error which says so.
inline constexpr const char* kNoTokenizer = "none";
class NoTokenizer final : public Tokenizer {
 public:
  std::string name() const override { return kNoTokenizer; }
  int64_t vocab_size() const override { return 0; }
  bool available() const override { return false; }
  std::vector<File> files() const override { return {}; }
  int32_t eot() const override { refuse(); }
  void append(std::string_view, std::vector<int32_t>&) const override { refuse(); }
  size_t append_prefix(std::string_view, std::vector<int32_t>&) const override { refuse(); }
  std::string decode(std::span<const int32_t>) const override { refuse(); }
  bool has(int32_t) const override { return false; }

 private:
  [[noreturn]] static void refuse();
};

struct TokenizerOptions {
  bool special_as_text = false;  // special tokens in a text are encoded as plain text
  std::string separator = {};    // the token that becomes eot(); "": the one in separator.json, or a usual name
};
// Written next to a tokenizer.json whose separator was chosen: {"separator": "<|doc|>"}.
inline constexpr const char* kSeparatorFile = "separator.json";
// Makes a tokenizer from a data.tokenizer or --tokenizer value: `byte`, `none`, a tokenizer.json, GPT-2's encoder.json
// (or vocab.json) with vocab.bpe (merges.txt) in the same folder, or a folder that holds one. Anything else throws a
// UsageError.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name, const TokenizerOptions& = {});

// The file in a folder from which make_tokenizer(folder) reads its tokenizer; "" if there is none.
std::string find_tokenizer(const std::string& folder);
// tokenizer_of_checkpoint: the copy in the checkpoint's folder, unless name is "byte"; without a copy, the tokenizer
// with that name; "" means "byte".
void write_tokenizer_files(const std::vector<Tokenizer::File>&, const std::string& folder);
std::unique_ptr<Tokenizer> tokenizer_of_checkpoint(const std::string& folder, const std::string& name);

}  // namespace triad
