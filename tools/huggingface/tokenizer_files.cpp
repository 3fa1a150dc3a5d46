#include "tools/huggingface/tokenizer_files.h"

#include <algorithm>
#include <array>

#include "engine/check.h"
#include "engine/process/text.h"

namespace triad {

namespace {

constexpr const char *kConfigFile = "tokenizer_config.json", *kClassKey = "tokenizer_class";
constexpr const char *kTemplateJson = "chat_template.json", *kTemplateJinja = "chat_template.jinja",
                     *kTemplateKey = "chat_template";
constexpr const char* kAnyClass = "PreTrainedTokenizerFast";  // takes any tokenizer.json

// The files that hold the vocabulary, under the names that transformers reads.
std::vector<Tokenizer::File> vocabulary_files(const Tokenizer& tokenizer) {
  std::vector<Tokenizer::File> files = tokenizer.files();
  if (files.empty()) return {{"tokenizer.json", byte_tokenizer_json()}};
  for (Tokenizer::File& file : files) {  // GPT-2's names
    if (file.name == "encoder.json") file.name = "vocab.json";
    if (file.name == "vocab.bpe") file.name = "merges.txt";
  }
  return files;
}

std::string json_file(const Json& json) { return dump_json(json, 2) + "\n"; }

// The small files that the import has kept. A model whose class differs from the imported one needs a tokenizer_class,
// because transformers would look it up by the model's class.
std::vector<Tokenizer::File> imported_files(const Json& origin, const ExportClass& c) {
  constexpr std::array kKept = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", kTemplateJson,
                                kTemplateJinja};
  const Json texts = origin.value("files", Json::object());
  TRIAD_CHECK(texts.is_object(), "origin.files in state.json is {}: an object is needed", brief(texts));
  std::vector<Tokenizer::File> files;
  for (const auto& [name, text] : texts.items()) {
    const bool known = std::find(kKept.begin(), kKept.end(), name) != kKept.end() && text.is_string();
    TRIAD_CHECK(known, "origin.files in state.json: {} is none of the files that an import keeps", shortened(name));
    files.push_back({name, text.get<std::string>()});
  }
  if (c.huggingface) return files;
  const auto is_config = [](const Tokenizer::File& file) { return file.name == kConfigFile; };
  const auto config = std::find_if(files.begin(), files.end(), is_config);
  Json json = config == files.end() ? Json::object() : parse_json(config->content, kConfigFile);
  TRIAD_CHECK(json.is_object(), "origin.files in state.json: {} is {}: an object is needed", kConfigFile, brief(json));
  if (!json.contains(kClassKey)) json[kClassKey] = kAnyClass;
  if (config == files.end())
    files.push_back({kConfigFile, json_file(json)});
  else
    config->content = json_file(json);
  return files;
}

}  // namespace

bool remove_chat_template(Json& origin) {
  if (!has_imported_tokens(origin) || !origin["files"].is_object()) return false;
  Json& files = origin["files"];
  bool found = files.erase(kTemplateJson) + files.erase(kTemplateJinja) > 0;
  if (!files.contains(kConfigFile) || !files[kConfigFile].is_string()) return found;
  Json config = parse_json(files[kConfigFile].get<std::string>(), kConfigFile);
  if (!config.is_object() || config.erase(kTemplateKey) == 0) return found;
  files[kConfigFile] = json_file(config);
  return true;
}

std::vector<Tokenizer::File> special_token_files(const Tokenizer& tokenizer, const std::string& vocabulary,
                                                 std::optional<int64_t> seq_len) {
  // An end-of-text token precedes each document, so it begins texts, too.
  const std::string eot = tokenizer.decode(std::array{tokenizer.eot()});
  Json special = {{"bos_token", eot}, {"eos_token", eot}};
  Json config = special;
  config[kClassKey] = vocabulary == "tokenizer.json" ? kAnyClass : "GPT2Tokenizer";
  if (vocabulary != "tokenizer.json") config["unk_token"] = special["unk_token"] = eot;
  config["clean_up_tokenization_spaces"] = false;
  if (seq_len) config["model_max_length"] = *seq_len;
  return {{kConfigFile, json_file(config)}, {"special_tokens_map.json", json_file(special)}};
}

std::vector<Tokenizer::File> tokenizer_files(const Tokenizer& tokenizer, const Json& origin, const ExportClass& c,
                                             int64_t seq_len) {
  if (!tokenizer.available()) return {};
  std::vector<Tokenizer::File> files = vocabulary_files(tokenizer);
  std::vector<Tokenizer::File> more;
  if (has_imported_tokens(origin)) {
    more = imported_files(origin, c);
  } else {
    more = special_token_files(tokenizer, files.front().name, seq_len);
  }
  files.insert(files.end(), more.begin(), more.end());
  return files;
}

void set_chat_template(std::vector<Tokenizer::File>& files, const ChatFormat& chat) {
  std::erase_if(files, [](const auto& file) { return file.name == kTemplateJson || file.name == kTemplateJinja; });
  const std::map<std::string, std::string>& templates = chat.templates();
  for (Tokenizer::File& file : files) {
    if (file.name != kConfigFile) continue;
    Json config = parse_json(file.content, kConfigFile);
    config.erase(kTemplateKey);
    // Several templates are a list here; one is a file of its own.
    for (const auto& [name, text] : templates)
      if (templates.size() > 1) config[kTemplateKey].push_back({{"name", name}, {"template", text}});
    file.content = json_file(config);
  }
  if (templates.size() == 1) files.push_back({kTemplateJinja, templates.begin()->second});
}

void add_turn_end(Json& generation_config, const ChatFormat& chat, const Tokenizer& tokenizer) {
  const std::vector<int32_t> tokens = tokenizer.encode(chat.turn_end());
  if (tokens.size() != 1) return;
  Json& eos = generation_config["eos_token_id"];
  if (!eos.is_array()) eos = eos.is_null() ? Json::array() : Json::array({eos});
  if (std::find(eos.begin(), eos.end(), Json(tokens[0])) == eos.end()) eos.push_back(tokens[0]);
  if (eos.size() == 1) eos = Json(eos[0]);
}

}  // namespace triad
