// Tokenizers: text to token numbers and back.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace triad {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::string name() const = 0;                                  // what make_tokenizer takes
  virtual int64_t vocab_size() const = 0;                                // every token is in [0, vocab_size)
  virtual int32_t eot() const = 0;                                       // stands before each document
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;  // no eot is added
  // Concatenates the texts of the tokens. A token outside the vocabulary is an Error.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
};

// A token is a byte: vocabulary 256, end of text the byte 0. decode(encode(x)) == x for any bytes.
class ByteTokenizer final : public Tokenizer {
 public:
  std::string name() const override { return "byte"; }
  int64_t vocab_size() const override { return 256; }
  int32_t eot() const override { return 0; }
  std::vector<int32_t> encode(std::string_view text) const override;
  std::string decode(std::span<const int32_t> tokens) const override;
};

// By the name that data.tokenizer and --tokenizer take. Any other is a UsageError that names what is allowed.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name);

}  // namespace triad
