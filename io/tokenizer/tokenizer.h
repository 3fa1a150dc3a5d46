// Tokenizers: text to token numbers and back. Bytes as they are, or byte-level BPE from files that the `tokenizers`
// library or GPT-2 wrote (io/tokenizer/bpe_tokenizer.h).
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace triad {

// Any thread may encode and decode, several at a time.
class Tokenizer {
 public:
  struct File {
    std::string name, content;
    bool operator==(const File&) const = default;
  };

  virtual ~Tokenizer() = default;
  virtual std::string name() const = 0;         // what make_tokenizer takes
  virtual int64_t vocab_size() const = 0;       // every token is in [0, vocab_size)
  virtual int32_t eot() const = 0;              // stands before each document
  virtual std::vector<File> files() const = 0;  // of which it can be made again, in any folder

  // Appends the tokens of a text of any bytes; no eot is added.
  virtual void append(std::string_view text, std::vector<int32_t>& out) const = 0;
  // Of a text that goes on behind what is given: appends the tokens that nothing behind it can change any more, and
  // returns the bytes they stand for. The rest is to be given again, with more: 0 if that is all.
  virtual size_t append_beginning(std::string_view text, std::vector<int32_t>& out) const = 0;
  std::vector<int32_t> encode(std::string_view text) const;
  // Concatenates the texts of the tokens. A token outside the vocabulary is an Error.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
};

// A token is a byte: vocabulary 256, end of text the byte 0. decode(encode(x)) == x for any bytes.
class ByteTokenizer final : public Tokenizer {
 public:
  std::string name() const override { return "byte"; }
  int64_t vocab_size() const override { return 256; }
  int32_t eot() const override { return 0; }
  std::vector<File> files() const override { return {}; }
  void append(std::string_view text, std::vector<int32_t>& out) const override;
  size_t append_beginning(std::string_view text, std::vector<int32_t>& out) const override;
  std::string decode(std::span<const int32_t> tokens) const override;
};

struct TokenizerOptions {
  bool special_as_text = false;  // text that spells a special token is text all the same
};
// By the name that data.tokenizer and --tokenizer take: `byte`, a tokenizer.json, GPT-2's encoder.json (or a
// vocab.json) with its vocab.bpe (merges.txt) beside it, or a folder that holds one of them. What is neither is a
// UsageError.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name, const TokenizerOptions& = {});

// A checkpoint's own copy of its tokenizer where it has one, else that of the name; bytes where the name is empty.
void write_tokenizer_files(const std::vector<Tokenizer::File>&, const std::string& folder);
std::unique_ptr<Tokenizer> tokenizer_of_checkpoint(const std::string& folder, const std::string& name);

}  // namespace triad
