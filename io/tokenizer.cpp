#include "io/tokenizer.h"

#include "engine/check.h"

namespace triad {

std::vector<int32_t> ByteTokenizer::encode(std::string_view text) const {
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  return {bytes, bytes + text.size()};
}

std::string ByteTokenizer::decode(std::span<const int32_t> tokens) const {
  std::string text(tokens.size(), '\0');
  for (size_t i = 0; i < tokens.size(); ++i) {
    TRIAD_CHECK(tokens[i] >= 0 && tokens[i] < 256, "token {} at position {} is not one of the byte tokenizer's 0..255",
                tokens[i], i);
    text[i] = static_cast<char>(tokens[i]);
  }
  return text;
}

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name) {
  if (name == "byte") return std::make_unique<ByteTokenizer>();
  fail_usage("tokenizer {}: byte is allowed", name);
}

}  // namespace triad
