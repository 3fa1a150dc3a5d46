// Fuzzes tokenizers (io/tokenizer/tokenizer.h). A byte-level vocabulary needs a token for each of 256 bytes. Random
// changes would destroy some, so inputs contain %ALPHABET% in their place. Each input ends with a text, which is
// encoded, decoded, and encoded in two pieces.
#include "io/tokenizer/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "io/tokenizer/unicode.h"
#include "tests/fuzz/contract.h"

namespace triad::fuzz {

namespace {

using Json = nlohmann::json;

// Tokens for the 256 bytes as JSON object members, "!": 33, ...: the token's number is the byte's value.
const std::string& alphabet() {
  static const std::string members = [] {
    std::string text;
    for (int byte = 0; byte < 256; ++byte)
      text += fmt::format("{}{}:{}", byte == 0 ? "" : ",", Json(spell_byte(static_cast<uint8_t>(byte))).dump(), byte);
    return text;
  }();
  return members;
}

std::string expanded(std::string_view bytes) {
  constexpr std::string_view kMark = "%ALPHABET%";
  const size_t at = bytes.find(kMark);
  if (at == std::string_view::npos) return std::string(bytes);
  return std::string(bytes.substr(0, at)) + alphabet() + std::string(bytes.substr(at + kMark.size()));
}

// Returns whether a pre-tokenizer keeps every byte in a text and adds none.
bool keeps_text(const Json& pre) {
  const std::string type = pre["type"];
  if (type == "Sequence") return std::ranges::all_of(pre["pretokenizers"], keeps_text);
  if (type == "ByteLevel") return pre.contains("add_prefix_space") && pre["add_prefix_space"] == false;
  return type != "Split" || pre["behavior"] != "Removed";
}
// Returns whether decode(encode(x)) must equal x for this tokenizer.json.
bool is_lossless(const std::string& text) {
  const Json json = Json::parse(text);
  if (json.contains("normalizer") && !json["normalizer"].is_null()) return false;
  if (json.contains("added_tokens") && !json["added_tokens"].is_null())
    for (const Json& token : json["added_tokens"])
      for (const char* flag : {"lstrip", "rstrip"})
        if (token.contains(flag) && token[flag] == true) return false;
  return keeps_text(json["pre_tokenizer"]);
}

void check_tokenizer(const Tokenizer& tokenizer, const std::string& name, std::string_view text, bool lossless) {
  const int64_t vocab = tokenizer.vocab_size();
  expect(vocab >= 256 && tokenizer.eot() >= 0 && tokenizer.eot() < vocab, "{}: {} tokens, documents begin with {}",
         name, vocab, tokenizer.eot());
  const auto whole = read_or_refuse(name, [&] { return tokenizer.encode(text); });
  if (!whole) return;  // the pattern's step limit was exceeded
  for (const int32_t token : *whole)
    expect(tokenizer.has(token) && token < vocab, "{}: encoded as token {}", name, token);
  const std::string decoded = tokenizer.decode(*whole);
  expect(!lossless || decoded == text, "{}: {:02x} comes back as {:02x}", name, fmt::join(text, " "),
         fmt::join(decoded, " "));
  for (const int32_t outside : {-1, static_cast<int32_t>(vocab)})
    expect(!tokenizer.has(outside) && !accepts(name,
                                               [&] {
                                                 tokenizer.decode({&outside, 1});
                                               }),
           "{}: token {} is decoded", name, outside);

  // Encodes the text in two pieces: what no later text can change in its first half, then the rest.
  std::vector<int32_t> pieces;
  const auto taken =
      read_or_refuse(name, [&] { return tokenizer.append_prefix(text.substr(0, text.size() / 2), pieces); });
  if (!taken) return;
  expect(*taken <= text.size() / 2, "{}: {} bytes of {} are taken", name, *taken, text.size() / 2);
  if (!accepts(name, [&] { tokenizer.append(text.substr(*taken), pieces); })) return;
  expect(pieces == *whole, "{}: in pieces of {} and {} bytes its tokens are {}, else {}", name, *taken,
         text.size() - *taken, fmt::join(pieces, " "), fmt::join(*whole, " "));
}

}  // namespace

void read_tokenizer_json(std::string_view bytes) {
  const std::vector<std::string_view> parts = sections(bytes, 2);
  const std::string json = expanded(parts[0]), path = scratch_file("tokenizer.json", json);
  const bool special_as_text = parts[1].size() % 2 == 1;
  const auto tokenizer = read_or_refuse(path, [&] { return make_tokenizer(path, {special_as_text}); });
  if (tokenizer) check_tokenizer(**tokenizer, path, parts[1], is_lossless(json));
}

void read_tokenizer_pair(std::string_view bytes) {
  const std::vector<std::string_view> parts = sections(bytes, 3);
  const std::string path = scratch_file("encoder.json", expanded(parts[0]));
  scratch_file("vocab.bpe", parts[1]);
  const auto tokenizer = read_or_refuse(scratch_folder(), [&] { return make_tokenizer(path); });
  if (tokenizer) check_tokenizer(**tokenizer, path, parts[2], true);
}

}  // namespace triad::fuzz
