// Tokenizers convert text to token numbers and back: bytes, or byte-level BPE from files of the `tokenizers` library or
// GPT-2 (io/tokenizer/bpe_tokenizer.h).
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace triad {

// Thread-safe: threads may encode and decode concurrently.
class Tokenizer {
 public:
  struct File {
    std::string name, content;
    bool operator==(const File&) const = default;
  };

  virtual ~Tokenizer() = default;
  virtual std::string name() const = 0;         // argument of make_tokenizer
  virtual int64_t vocab_size() const = 0;       // every token is in [0, vocab_size)
  virtual int32_t eot() const = 0;              // end of text, written before each document
  virtual std::vector<File> files() const = 0;  // files from which make_tokenizer can rebuild it, in any folder

  // Appends the tokens of a text, which may hold any bytes; adds no eot.
  virtual void append(std::string_view text, std::vector<int32_t>& out) const = 0;
  // For text of which more will follow: appends the tokens that later text cannot change, and returns the bytes that
  // they encode. The caller passes the rest again, with more text. Returns 0 if no token is certain.
  virtual size_t append_prefix(std::string_view text, std::vector<int32_t>& out) const = 0;
  std::vector<int32_t> encode(std::string_view text) const;
  // Concatenates the tokens' bytes. Throws for a token outside the vocabulary.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
};

// Each byte is a token: vocabulary 256, end of text 0. decode(encode(x)) == x for any bytes.
class ByteTokenizer final : public Tokenizer {
 public:
  std::string name() const override { return "byte"; }
  int64_t vocab_size() const override { return 256; }
  int32_t eot() const override { return 0; }
  std::vector<File> files() const override { return {}; }
  void append(std::string_view text, std::vector<int32_t>& out) const override;
  size_t append_prefix(std::string_view text, std::vector<int32_t>& out) const override;
  std::string decode(std::span<const int32_t> tokens) const override;
};

struct TokenizerOptions {
  bool special_as_text = false;  // special tokens in a text are encoded as plain text
};
// Makes a tokenizer from a value of data.tokenizer or --tokenizer: `byte`, a tokenizer.json, GPT-2's encoder.json (or
// vocab.json) with vocab.bpe (merges.txt) in the same folder, or a folder that holds one of them. Anything else throws
// a UsageError.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name, const TokenizerOptions& = {});

// A checkpoint's tokenizer: the copy in its folder unless name is "byte", else the tokenizer of that name; "" means
// bytes.
void write_tokenizer_files(const std::vector<Tokenizer::File>&, const std::string& folder);
std::unique_ptr<Tokenizer> tokenizer_of_checkpoint(const std::string& folder, const std::string& name);

}  // namespace triad
