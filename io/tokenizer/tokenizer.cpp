#include "io/tokenizer/tokenizer.h"

#include <filesystem>
#include <initializer_list>
#include <system_error>
#include <utility>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/file.h"
#include "io/json_config.h"
#include "io/tokenizer/bpe_tokenizer.h"

namespace triad {

namespace fs = std::filesystem;

size_t TextEncoder::safe_cut(std::string_view) const { return 0; }

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> tokens;
  append(text, tokens);
  return tokens;
}

void ByteTokenizer::append(std::string_view text, std::vector<int32_t>& out) const {
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  out.insert(out.end(), bytes, bytes + text.size());
}

size_t ByteTokenizer::append_prefix(std::string_view text, std::vector<int32_t>& out) const {
  append(text, out);
  return text.size();
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

namespace {

constexpr std::pair<const char*, const char*> kPairs[] = {{"encoder.json", "vocab.bpe"}, {"vocab.json", "merges.txt"}};

// Whether a file looks like the separator files that are written here.
bool is_separator_file(const std::string& path) {
  try {
    const Json json = fs::is_regular_file(path) ? parse_json(read_file(path), path) : Json();
    return json.is_object() && json.size() == 1 && json.contains("separator");
  } catch (const Error&) { return false; }
}

}  // namespace

void NoTokenizer::refuse() {
  fail(
      "the model has no tokenizer (data.tokenizer is none), so texts cannot be read or written: put its tokenizer.json "
      "into the folder of the weights, or set data.tokenizer");
}

void refuse_separator(const std::string& name, const std::string& separator) {
  fail_usage("the separator is \"{}\", and the tokenizer {} takes none: the byte 0 separates its documents",
             shortened(separator), name);
}

std::string find_tokenizer(const std::string& name) {
  const fs::path folder = name;
  std::error_code ignored;
  if (fs::is_regular_file(folder / "tokenizer.json", ignored)) return (folder / "tokenizer.json").string();
  for (const auto& [vocabulary, merges] : kPairs)
    if (fs::is_regular_file(folder / vocabulary, ignored) && fs::is_regular_file(folder / merges, ignored))
      return (folder / vocabulary).string();
  return "";
}

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name, const TokenizerOptions& options) {
  if (name == "byte" || name == kNoTokenizer) {
    if (!options.separator.empty()) refuse_separator(name, options.separator);
    if (name == "byte") return std::make_unique<ByteTokenizer>();
    return std::make_unique<NoTokenizer>();
  }
  std::error_code ignored;
  const std::string path = fs::is_directory(name, ignored) ? find_tokenizer(name) : name;
  if (path.empty() || !fs::is_regular_file(path, ignored))
    fail_usage(
        "tokenizer {}: byte is allowed, or a file that is there: tokenizer.json, or encoder.json with vocab.bpe beside "
        "it, or a folder that holds them",
        name);
  const std::string file_name = fs::path(path).filename().string();
  for (const auto& [vocabulary, merges] : kPairs)
    for (const std::string& given : {std::string(vocabulary), std::string(merges)})
      if (file_name == given) {
        const fs::path folder = fs::path(path).parent_path();
        return read_bpe_pair(name, (folder / vocabulary).string(), (folder / merges).string(), options);
      }
  return read_tokenizer_json(name, path, options);
}

void write_tokenizer_files(const std::vector<Tokenizer::File>& files, const std::string& folder) {
  bool has_separator = false;
  for (const Tokenizer::File& file : files) {
    write_file_atomically(folder + "/" + file.name, file.content);
    has_separator = has_separator || file.name == kSeparatorFile;
  }
  // Another tokenizer's separator, which was in the folder before, would be read with these files.
  const std::string separator = folder + "/" + kSeparatorFile;
  if (!files.empty() && !has_separator && is_separator_file(separator)) fs::remove(separator);
}

std::unique_ptr<Tokenizer> tokenizer_of_checkpoint(const std::string& folder, const std::string& name) {
  const std::string own = name == "byte" ? "" : find_tokenizer(folder);
  if (!own.empty()) return make_tokenizer(own);
  return make_tokenizer(name.empty() ? "byte" : name);
}

}  // namespace triad
