// Reads byte-level BPE tokenizer files: tokenizer.json, and GPT-2's encoder.json with vocab.bpe.
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <unordered_map>
#include <unordered_set>

#include "engine/check.h"
#include "io/file.h"
#include "io/foreign_format.h"
#include "io/json_config.h"
#include "io/tokenizer/bpe_tokenizer.h"
#include "io/tokenizer/tokenizer_file.h"
#include "io/tokenizer/word_counter.h"

namespace triad {

namespace {

using TokenJson = nlohmann::json;  // not ordered, because the ordered triad::Json would search keys linearly

// A value in the JSON file, with its key for messages.
class Value {
 public:
  Value(const std::string& path, const TokenJson& json, std::string key)
      : path_(&path), json_(&json), key_(std::move(key)) {}

  [[noreturn]] void refuse(const std::string& wanted) const {
    fail("{}: {} is {}: {}", *path_, key_, brief(*json_), wanted);
  }
  bool absent() const { return json_->is_null(); }
  const TokenJson& json() const { return *json_; }
  const std::string& key() const { return key_; }
  const std::string& path() const { return *path_; }

  const TokenJson& object() const {
    if (!json_->is_object()) refuse("an object is needed");
    return *json_;
  }
  // A key's value in this object; null if the key is absent.
  Value operator[](const char* key) const {
    static const TokenJson kNull;
    const auto found = object().find(key);
    return {*path_, found == json_->end() ? kNull : *found, key_.empty() ? key : key_ + "." + key};
  }
  std::vector<Value> list() const {
    if (!json_->is_array()) refuse("a list is needed");
    std::vector<Value> values;
    for (size_t i = 0; i < json_->size(); ++i) values.emplace_back(*path_, (*json_)[i], fmt::format("{}[{}]", key_, i));
    return values;
  }
  const std::string& text() const {
    if (!json_->is_string()) refuse("a string is needed");
    return json_->get_ref<const std::string&>();
  }
  bool flag(bool otherwise) const {
    if (absent()) return otherwise;
    if (!json_->is_boolean()) refuse("true or false is needed");
    return json_->get<bool>();
  }
  int32_t id() const {
    if (!json_->is_number_unsigned() || json_->get<uint64_t>() >= static_cast<uint64_t>(kMaxTokens))
      refuse(fmt::format("a token's number below {} is needed", kMaxTokens));
    return json_->get<int32_t>();
  }
  // This object's `type`.
  std::string type() const { return (*this)["type"].text(); }

 private:
  const std::string* path_;
  const TokenJson* json_;
  std::string key_;
};

class Vocabulary {
 public:
  // byte_fallback: the model's flag, under which a character without a token becomes tokens such as <0x0A>.
  Vocabulary(const Value& vocab, BpeSpec& spec, bool byte_fallback = false) : spec_(spec), where_(vocab.path()) {
    for (const auto& [token, id] : vocab.object().items())
      add(token, Value(where_, id, fmt::format("{}[{}]", vocab.key(), brief(TokenJson(token)))).id());
    TRIAD_CHECK(!ids_.empty(), "{}: {} holds no token", where_, vocab.key());
    for (int byte = 0; byte < 256; ++byte) {
      const auto found = ids_.find(spell_byte(static_cast<uint8_t>(byte)));
      TRIAD_CHECK(found != ids_.end(),
                  "{}: {}the vocabulary has no token for byte {:#04x} ({}): byte-level BPE needs all 256 (BpeTrainer's "
                  "initial_alphabet=ByteLevel.alphabet())",
                  where_, byte_fallback ? "model.byte_fallback is true, and " : "", byte,
                  spell_byte(static_cast<uint8_t>(byte)));
      spec_.byte_tokens[static_cast<size_t>(byte)] = found->second;
    }
  }

  void add(const std::string& token, int32_t id) {
    const auto at = static_cast<size_t>(id);
    if (spec_.texts.size() <= at) spec_.texts.resize(at + 1);
    TRIAD_CHECK(!spec_.texts[at], "{}: two tokens have the number {}: {} and {}", where_, id,
                brief(TokenJson(*spec_.texts[at])), brief(TokenJson(token)));
    spec_.texts[at] = unspell_bytes(token).value_or(token);
    ids_.emplace(token, id);
  }
  // A token's id, or -1 if the vocabulary lacks it.
  int32_t find(const std::string& token) const {
    const auto found = ids_.find(token);
    return found == ids_.end() ? -1 : found->second;
  }
  void add_merge(const std::string& left, const std::string& right, const std::string& key) {
    const Bpe::Merge merge{find(left), find(right), find(left + right)};
    for (const auto& [token, id] : {std::pair{left, merge.left}, {right, merge.right}, {left + right, merge.merged}})
      TRIAD_CHECK(id >= 0, "{}: {}: {} is not in the vocabulary", where_, key, brief(TokenJson(token)));
    spec_.merges.push_back(merge);
  }
  void keep_whole_words() {
    for (const auto& [token, id] : ids_)
      if (const auto bytes = unspell_bytes(token)) spec_.whole_words.emplace(*bytes, id);
  }

 private:
  BpeSpec& spec_;
  const std::string& where_;
  std::unordered_map<std::string, int32_t> ids_;
};

void read_model(const Value& model, Vocabulary& vocabulary) {
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (!model[key].absent() && !model[key].text().empty()) model[key].refuse("byte-level BPE has none");
  if (const Value dropout = model["dropout"]; !dropout.absent() && dropout.json() != 0)
    dropout.refuse("null is needed: tokens are the same every time");
  for (const Value& merge : model["merges"].list()) {
    if (merge.json().is_string()) {
      const std::string& text = merge.text();
      const size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos)
        merge.refuse("two tokens with a space between are needed");
      vocabulary.add_merge(text.substr(0, space), text.substr(space + 1), merge.key());
    } else {
      const std::vector<Value> pair = merge.list();
      if (pair.size() != 2) merge.refuse("a list of two tokens is needed");
      vocabulary.add_merge(pair[0].text(), pair[1].text(), merge.key());
    }
  }
  if (model["ignore_merges"].flag(false)) vocabulary.keep_whole_words();
}

void read_added_tokens(const Value& list, BpeSpec& spec, Vocabulary& vocabulary) {
  if (list.absent()) return;
  std::unordered_set<std::string> contents;
  for (const Value& token : list.list()) {
    AddedToken t;
    t.content = token["content"].text();
    t.id = token["id"].id();
    if (t.content.empty()) token.refuse("a token that is not empty is needed");
    t.single_word = token["single_word"].flag(false);
    t.lstrip = token["lstrip"].flag(false);
    t.rstrip = token["rstrip"].flag(false);
    t.special = token["special"].flag(false);
    t.normalized = token["normalized"].flag(!t.special);
    if (!contents.insert(t.content).second) token.refuse("this content is in the list before");
    const int32_t known = vocabulary.find(t.content);
    if (known >= 0 && known != t.id) token.refuse(fmt::format("in the vocabulary this is token {}", known));
    if (known >= 0 && unspell_bytes(t.content).value_or(t.content) != t.content)
      token.refuse(
          "in the vocabulary this spells other bytes: decoded, they and this text would be one. Give it an id of its "
          "own, or drop it from added_tokens");
    if (known < 0) vocabulary.add(t.content, t.id);
    // An added token is plain text, not written in the byte alphabet.
    spec.texts[static_cast<size_t>(t.id)] = t.content;
    spec.added.push_back(std::move(t));
  }
}

void read_normalizer(const Value& normalizer, BpeSpec& spec) {
  if (normalizer.absent()) return;
  const std::string type = normalizer.type();
  if (type == "Sequence") {
    for (const Value& one : normalizer["normalizers"].list()) read_normalizer(one, spec);
    return;
  }
  constexpr std::pair<const char*, NormalForm> kForms[] = {
      {"NFC", NormalForm::nfc}, {"NFD", NormalForm::nfd}, {"NFKC", NormalForm::nfkc}, {"NFKD", NormalForm::nfkd}};
  for (const auto& [name, form] : kForms)
    if (type == name) return spec.normalizers.push_back(form);
  normalizer["type"].refuse("NFC, NFD, NFKC, NFKD or Sequence is understood");
}

SplitBehavior read_behavior(const Value& behavior) {
  constexpr std::pair<const char*, SplitBehavior> kBehaviors[] = {
      {"Isolated", SplitBehavior::isolated},
      {"Removed", SplitBehavior::removed},
      {"MergedWithPrevious", SplitBehavior::merged_with_previous},
      {"MergedWithNext", SplitBehavior::merged_with_next},
      {"Contiguous", SplitBehavior::contiguous}};
  for (const auto& [name, value] : kBehaviors)
    if (behavior.text() == name) return value;
  behavior.refuse("Isolated, Removed, MergedWithPrevious, MergedWithNext or Contiguous is understood");
}

// Reads one pre-tokenizer. Returns true if it is ByteLevel, after which text is in the byte alphabet, so that no
// pre-tokenizer may follow.
bool read_pre_tokenizer(const Value& pre, BpeSpec& spec) {
  const std::string type = pre.type();
  if (type == "Sequence") {
    bool byte_level = false;
    for (const Value& one : pre["pretokenizers"].list()) {
      if (byte_level) one.refuse("ByteLevel has to be the last pre-tokenizer");
      byte_level = read_pre_tokenizer(one, spec);
    }
    return byte_level;
  }
  if (type == "ByteLevel") {
    if (pre["add_prefix_space"].flag(true)) spec.splits.push_back({.prefix_space = true});
    if (pre["use_regex"].flag(true)) spec.splits.push_back({.pattern = pattern_of(WordSplit::gpt2)});
    return true;
  }
  if (type == "Digits") {
    spec.splits.push_back({.pattern = pre["individual_digits"].flag(false) ? R"(\p{N})" : R"(\p{N}+)"});
    return false;
  }
  if (type == "Split") {
    const Value pattern = pre["pattern"];
    BpeSpec::Split split{.behavior = read_behavior(pre["behavior"]), .invert = pre["invert"].flag(false)};
    if (!pattern["Regex"].absent())
      split.pattern = pattern["Regex"].text();
    else if (!pattern["String"].absent())
      split.pattern = literal_pattern(pattern["String"].text());
    else
      pattern.refuse("Regex or String is needed");
    spec.splits.push_back(std::move(split));
    return false;
  }
  pre["type"].refuse("ByteLevel, Split, Digits or Sequence is understood");
}

// Finds the end-of-text token, which these files do not name: an added token with a usual name, or the only special
// token; -1 if there is none.
int32_t find_eot(const BpeSpec& spec) {
  std::vector<std::string> names;
  for (const AddedToken& token : spec.added) names.push_back(token.content);
  const std::string usual = usual_eot(names);
  const auto special = [](const AddedToken& t) { return t.special; };
  if (usual.empty() && std::count_if(spec.added.begin(), spec.added.end(), special) != 1) return -1;
  return std::find_if(spec.added.begin(), spec.added.end(),
                      [&](const AddedToken& t) { return usual.empty() ? t.special : t.content == usual; })
      ->id;
}

// The separator named in the tokenizer file's folder; "" if there is none.
std::string read_separator(const std::string& path) {
  const std::string file = (std::filesystem::path(path).parent_path() / kSeparatorFile).string();
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored)) return "";
  const Json json = parse_json(read_file(file), file);
  if (!json.is_object() || !json.contains("separator") || !json["separator"].is_string())
    fail("{} is {}: an object with the string \"separator\" is needed", file, brief(json));
  return json["separator"].get<std::string>();
}

// Sets the end-of-text token: `separator`, or if that is "" the one named in the folder that holds `path`, or the usual
// one. A tokenizer with an unusual one has separator.json among its files.
void choose_eot(BpeSpec& spec, const Vocabulary& vocabulary, const std::string& path, std::string separator) {
  const int32_t usual = find_eot(spec);
  if (separator.empty()) separator = read_separator(path);
  if (separator.empty()) {
    if (usual < 0)
      fail(
          "{}: no end-of-text token, which precedes each document: an added token <|endoftext|>, <|end_of_text|>, "
          "</s>, <eos>, [EOS] or <|bos|> is needed, or exactly one special token "
          "(add_special_tokens([\"<|endoftext|>\"])), or the name of another one (data.separator, triad data "
          "--separator)",
          spec.name);
    spec.eot = usual;
    return;
  }
  const auto added = std::find_if(spec.added.begin(), spec.added.end(),
                                  [&](const AddedToken& token) { return token.content == separator; });
  spec.eot = added != spec.added.end() ? added->id : vocabulary.find(separator);
  if (spec.eot < 0)
    fail_usage("{}: the separator {} is no token of the vocabulary", spec.name, brief(TokenJson(separator)));
  if (spec.eot != usual) spec.files.push_back({kSeparatorFile, dump_json(Json{{"separator", separator}}, -1) + "\n"});
}

}  // namespace

std::string usual_eot(std::span<const std::string> names) {
  constexpr const char* kNames[] = {"<|endoftext|>",
                                    "<|end_of_text|>",
                                    "</s>",
                                    "<eos>",
                                    "<|eos|>",
                                    "[EOS]",
                                    "<|eot|>",
                                    "<|eot_id|>",
                                    "<\xef\xbd\x9c"
                                    "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
                                    "<|bos|>"};
  for (const char* usual : kNames)
    if (std::find(names.begin(), names.end(), usual) != names.end()) return usual;
  return "";
}

std::unique_ptr<Tokenizer> read_tokenizer_json(const std::string& name, const std::string& path,
                                               const TokenizerOptions& options) {
  BpeSpec spec;
  spec.name = name;
  spec.files = {{"tokenizer.json", read_file(path)}};
  const auto json = parse_json<TokenJson>(spec.files[0].content, path);
  if (!json.is_object() || !json.contains("model"))
    fail("{}: a JSON object with a key model is needed: is this a tokenizer.json?", path);
  const Value root(path, json, "");
  const Value model = root["model"];
  // The oldest tokenizer.json files have no model type.
  if (!model["type"].absent() && model.type() != "BPE") model["type"].refuse("BPE is understood");
  if (model["vocab"].json() == TokenJson(byte_vocabulary()) && model["merges"].list().empty()) {
    if (!options.separator.empty()) refuse_separator(name, options.separator);
    return std::make_unique<ByteTokenizer>();
  }
  Vocabulary vocabulary(model["vocab"], spec, model["byte_fallback"].flag(false));
  read_model(model, vocabulary);
  read_added_tokens(root["added_tokens"], spec, vocabulary);
  read_normalizer(root["normalizer"], spec);
  if (root["pre_tokenizer"].absent() || !read_pre_tokenizer(root["pre_tokenizer"], spec))
    root["pre_tokenizer"].refuse("ByteLevel is needed, alone or at the end of a Sequence");
  if (const Value decoder = root["decoder"]; !decoder.absent() && decoder.type() != "ByteLevel")
    decoder["type"].refuse("ByteLevel is understood");
  choose_eot(spec, vocabulary, path, options.separator);
  return std::make_unique<BpeTokenizer>(std::move(spec), options);
}

std::unique_ptr<Tokenizer> read_bpe_pair(const std::string& name, const std::string& vocabulary_path,
                                         const std::string& merges_path, const TokenizerOptions& options) {
  constexpr const char* kEndOfText = "<|endoftext|>";
  BpeSpec spec;
  spec.name = name;
  const auto file_name = [](const std::string& path) { return std::filesystem::path(path).filename().string(); };
  if (const std::string text = read_file(merges_path); !packed_format(text).empty())
    fail("{}: is {}, no vocabulary", merges_path, packed_format(text));
  spec.files = {{file_name(vocabulary_path), read_file(vocabulary_path)},
                {file_name(merges_path), read_file(merges_path)}};
  const auto json = parse_json<TokenJson>(spec.files[0].content, vocabulary_path);
  Vocabulary vocabulary(Value(vocabulary_path, json, "the vocabulary"), spec);
  std::string_view text = spec.files[1].content;
  for (int64_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || (number == 1 && line.starts_with("#version"))) continue;
    const size_t space = line.find(' ');
    TRIAD_CHECK(space != std::string_view::npos && line.find(' ', space + 1) == std::string_view::npos,
                "{}: line {} is {}: two tokens with a space between are needed", merges_path, number,
                brief(TokenJson(std::string(line))));
    vocabulary.add_merge(std::string(line.substr(0, space)), std::string(line.substr(space + 1)),
                         fmt::format("line {} of {}", number, merges_path));
  }
  const int32_t end_of_text = vocabulary.find(kEndOfText);
  TRIAD_CHECK(end_of_text >= 0, "{}: the vocabulary has no {}", vocabulary_path, kEndOfText);
  spec.added = {{.content = kEndOfText, .id = end_of_text, .special = true}};
  choose_eot(spec, vocabulary, vocabulary_path, options.separator);
  spec.splits = {{.pattern = pattern_of(WordSplit::gpt2)}};
  return std::make_unique<BpeTokenizer>(std::move(spec), options);
}

}  // namespace triad
