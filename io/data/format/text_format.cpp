#include "io/data/format/text_format.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/data/format/json_shape.h"
#include "io/data/format/text_head.h"
#include "io/data/shards.h"
#include "io/data/text_input.h"
#include "io/foreign_format.h"

namespace triad {

namespace {

constexpr size_t kJudgedBytes = 4096;
constexpr const char* kSays = "--format or data.format, jsonl or text, says what it is";

enum class Named { nothing, json, jsonl };

// What a file name says, without compression extensions: "a.JSONL.gz" is JSONL.
Named named(const std::string& path) {
  std::filesystem::path name(path);
  const auto ending = [&] {
    std::string text = name.extension().string();
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
    return text;
  };
  constexpr std::array kPacked = {".gz", ".gzip", ".zst", ".zstd"};
  constexpr std::array kJsonl = {".jsonl", ".ndjson", ".jsonlines", ".jl"};
  if (std::find(kPacked.begin(), kPacked.end(), ending()) != kPacked.end()) name = name.stem();
  if (std::find(kJsonl.begin(), kJsonl.end(), ending()) != kJsonl.end()) return Named::jsonl;
  return ending() == ".json" ? Named::json : Named::nothing;
}

// Throws if a file is hardly text: its beginning has a NUL byte and is not UTF-8, or has many control characters, or
// most of it is NUL.
void refuse_binary(std::string_view head, const std::string& name) {
  const size_t valid = utf8_prefix(head), null = head.find('\0');
  if (null != std::string_view::npos && valid < head.size() && !is_cut_character(head.substr(valid)))
    fail("{}: no text: at offset {} is a NUL byte, at offset {} what is no UTF-8 ({})", name, null, valid,
         kTakenAsText);
  const auto nulls = std::count(head.begin(), head.end(), '\0');
  if (nulls * 2 > static_cast<int64_t>(head.size()))
    fail("{}: no text: {} of its first {} bytes are NUL ({})", name, nulls, head.size(), kTakenAsText);
  const auto is_control = [](unsigned char c) {
    return (c > 0 && c < 0x20 && !std::isspace(c) && c != 0x08 && c != 0x1b) || c == 0x7f;
  };
  const auto controls = std::count_if(head.begin(), head.end(), is_control);
  constexpr int64_t kFew = 4, kShare = 50;
  if (controls >= kFew && controls * kShare > static_cast<int64_t>(head.size()))
    fail("{}: no text: {} of its first {} bytes are control characters ({})", name, controls, head.size(),
         kTakenAsText);
}

Content content_of_shape(JsonShape shape, Named by_name, const std::string& name) {
  const bool lines = by_name == Named::jsonl;  // each line that is no record gets an error of its own
  const std::string as_text = lines ? "" : fmt::format("; {}", kTakenAsText);
  switch (shape) {
    case JsonShape::lines:
      return Content::jsonl;
    case JsonShape::single:
    case JsonShape::unclear:
      if (by_name == Named::json) fail("{}: a document a line, or one document? {}", name, kSays);
      return Content::jsonl;
    case JsonShape::several_lines:
      fail("{}: is JSON over several lines: JSONL, a record a line, is read (jq -c . writes it){}", name, as_text);
    case JsonShape::array_lines:
      if (lines) return Content::jsonl;
      [[fallthrough]];
    case JsonShape::array:
      fail("{}: is a JSON array: JSONL, a record a line, is read (jq -c '.[]' writes it){}", name, as_text);
    case JsonShape::values:
      if (lines) return Content::jsonl;
      fail("{}: is JSON strings, numbers or words, a line each: JSONL of objects is read{}", name, as_text);
    case JsonShape::none:
      break;
  }
  if (by_name == Named::json) fail("{}: named as JSON, but begins with no object: {}", name, kSays);
  return lines ? Content::jsonl : Content::text;
}

}  // namespace

Content content_of(TextInput& input, TextFormat format) {
  const std::string& name = input.name();
  if (format == TextFormat::text) return Content::text;  // TextInput has refused packed_format()
  TextHead head([&](size_t bytes) { return input.look(bytes); });
  head.up_to(kJudgedBytes);
  if (is_shard_head(head.text())) fail("{} is a token shard, not text", name);
  if (const std::string_view foreign = foreign_format(head.text().substr(0, kFormatBytes)); !foreign.empty())
    fail("{}: is {}, no text: plain text and JSONL are read", name, foreign);
  const Named by_name = format == TextFormat::jsonl ? Named::jsonl : named(name);
  const size_t begin = head.skip_blanks(head.begin());
  if (begin == head.size()) return by_name == Named::jsonl ? Content::jsonl : Content::text;
  refuse_binary(head.text().substr(0, kJudgedBytes), name);
  if (by_name == Named::jsonl && head.at(begin) == '<')
    fail("{}: is HTML or XML, no JSONL: the page of an error in place of the file?", name);
  return content_of_shape(json_shape(head, begin), by_name, name);
}

Content content_of(const std::string& path, TextFormat format) {
  if (!is_stream(path) && is_shard(path)) return Content::shard;
  TextInput input(path);
  return content_of(input, format);
}

}  // namespace triad
