#include "io/tokenizer/tokenizer_file.h"

#include <string_view>
#include <utility>

#include "io/tokenizer/tokenizer.h"
#include "io/tokenizer/unicode.h"

namespace triad {

namespace {

// Tokens and their ids. They are appended, because to insert one searches all keys before it.
Json vocabulary_of(const std::vector<std::string>& tokens) {
  Json vocabulary = Json::object();
  auto& entries = vocabulary.get_ref<Json::object_t&>();
  for (size_t id = 0; id < tokens.size(); ++id) entries.emplace_back(tokens[id], id);
  return vocabulary;
}

// with_pattern: whether the step splits by GPT-2's pattern.
Json byte_level(bool with_pattern) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", with_pattern}};
}

std::string file_of(std::span<const std::string> special_tokens, Json pre_tokenizer, Json vocabulary, Json merges) {
  Json added = Json::array();
  for (size_t id = 0; id < special_tokens.size(); ++id)
    added.push_back({{"id", id},
                     {"content", special_tokens[id]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  const Json file = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", std::move(added)},
                     {"normalizer", nullptr},
                     {"pre_tokenizer", std::move(pre_tokenizer)},
                     {"post_processor", nullptr},
                     {"decoder", byte_level(false)},
                     {"model",
                      {{"type", "BPE"},
                       {"dropout", nullptr},
                       {"unk_token", nullptr},
                       {"continuing_subword_prefix", nullptr},
                       {"end_of_word_suffix", nullptr},
                       {"fuse_unk", false},
                       {"byte_fallback", false},
                       {"ignore_merges", false},
                       {"vocab", std::move(vocabulary)},
                       {"merges", std::move(merges)}}}};
  return dump_json(file, 2) + "\n";
}

}  // namespace

Json byte_vocabulary() {
  std::vector<std::string> tokens = {std::string(1, '\0')};
  for (int byte = 1; byte < 256; ++byte) tokens.push_back(spell_byte(static_cast<uint8_t>(byte)));
  return vocabulary_of(tokens);
}

std::string byte_tokenizer_json() {
  const std::string first(1, '\0');
  return file_of({&first, 1}, byte_level(false), byte_vocabulary(), Json::array());
}

std::string tokenizer_json(const TrainedBpe& bpe, const std::vector<std::string>& special_tokens, WordSplit split) {
  Json pre_tokenizer = byte_level(true);
  if (split != WordSplit::gpt2) {
    const Json pattern = {
        {"type", "Split"}, {"pattern", {{"Regex", pattern_of(split)}}}, {"behavior", "Isolated"}, {"invert", false}};
    pre_tokenizer = {{"type", "Sequence"}, {"pretokenizers", Json::array({pattern, byte_level(false)})}};
  }
  Json merges = Json::array();  // written "a b", which every version of the library reads
  for (const auto& [left, right] : bpe.merges)
    merges.push_back(bpe.tokens[static_cast<size_t>(left)] + " " + bpe.tokens[static_cast<size_t>(right)]);
  return file_of(special_tokens, std::move(pre_tokenizer), vocabulary_of(bpe.tokens), std::move(merges));
}

}  // namespace triad
