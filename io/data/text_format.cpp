#include "io/data/text_format.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "engine/check.h"
#include "io/data/record.h"
#include "io/data/shards.h"
#include "io/data/text_input.h"
#include "io/foreign_format.h"
#include "io/tokenizer/unicode.h"

namespace triad {

namespace {

constexpr size_t kHeadBytes = 4096, kMostBytes = size_t{1} << 26;
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

// The text that decides: an input's first bytes, more on demand.
class Head {
 public:
  explicit Head(TextInput& input) : input_(input) { grow(kHeadBytes); }

  char at(size_t i) {  // '\0' past the end
    if (i >= text_.size()) grow(i + 1);
    return i < text_.size() ? text_[i] : '\0';
  }
  bool has(size_t i) {
    at(i);
    return i < text_.size();
  }
  // Where the first nonblank character is from `i` on, or size(). Blank is what a blank line may hold (is_blank_line).
  size_t skip_blanks(size_t i) {
    constexpr size_t kLongest = 3;  // bytes in a blank character
    while (has(i)) {
      has(i + kLongest);
      size_t bytes = 1;
      while (bytes < kLongest && i + bytes < text_.size() && (text_[i + bytes] & 0xc0) == 0x80) ++bytes;
      if (!is_blank_line(text_.substr(i, bytes))) break;
      i += bytes;
    }
    return std::min(i, text_.size());
  }
  size_t line_end(size_t i) {
    while (has(i) && text_[i] != '\n') ++i;
    return std::min(i, text_.size());
  }
  size_t begin() const { return text_.starts_with("\xef\xbb\xbf") ? 3 : 0; }
  size_t size() const { return text_.size(); }
  std::string_view text() const { return text_; }
  bool limited() const { return limited_; }  // the text is longer than kMostBytes

 private:
  void grow(size_t bytes) {
    if (ended_ || limited_) return;
    const size_t wanted = std::max(bytes, text_.size() * 2);
    limited_ = wanted > kMostBytes;
    text_ = input_.look(std::min(wanted, kMostBytes));
    ended_ = text_.size() < std::min(wanted, kMostBytes);
  }

  TextInput& input_;
  std::string_view text_;
  bool ended_ = false, limited_ = false;
};

// End position of the JSON object or array at `begin`, found by its brackets alone; npos if the text ends before.
// in_string: the text ends within a string.
size_t value_end(std::string_view text, size_t begin, bool& in_string) {
  int64_t depth = 0;
  in_string = false;
  for (size_t i = begin; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\')
        ++i;
      else if (c == '"')
        in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if ((c == '}' || c == ']') && --depth == 0) {
      return i + 1;
    }
  }
  return std::string_view::npos;
}

enum class Shape {
  no_json,
  lines,          // objects, one a line
  single,         // a single object, in one line
  several_lines,  // one object in several lines
  array,
  unclear  // an object in a line longer than kMostBytes
};

Shape object_shape(Head& head, size_t begin) {
  const size_t end = head.line_end(begin);
  bool in_string = false;
  const size_t value = value_end(head.text().substr(0, end), begin, in_string);
  if (value == std::string_view::npos) {
    if (end == head.size() && head.limited()) return Shape::unclear;
    // A damaged line (an open string, or another record in the next line) gets its error when the records are read.
    const size_t next = head.skip_blanks(end);
    return in_string || next == head.size() || head.at(next) == '{' ? Shape::lines : Shape::several_lines;
  }
  return head.skip_blanks(value) == head.size() ? Shape::single : Shape::lines;
}

// Plain text may begin with a bracket, too: "[1] A footnote". It is an array only if the brackets hold valid JSON.
Shape array_shape(Head& head, size_t begin) {
  const char first = head.at(head.skip_blanks(begin + 1));
  if (first == '{') {  // it begins records; Markdown, templates and code may begin so, too, but no quote follows
    const char next = head.at(head.skip_blanks(head.skip_blanks(begin + 1) + 1));
    if (next == '"' || next == '}') return Shape::array;
    return Shape::no_json;
  }
  if (std::string_view("[]\"-0123456789tfn").find(first) == std::string_view::npos || first == '\0')
    return Shape::no_json;
  bool in_string = false;
  size_t end = std::string_view::npos, looked = 0;
  while (end == std::string_view::npos && looked < head.size()) {
    looked = head.size();
    end = value_end(head.text(), begin, in_string);
    if (end == std::string_view::npos) head.at(looked);
  }
  if (end == std::string_view::npos) return head.limited() ? Shape::array : Shape::no_json;
  // Text may follow a number in brackets, "[1984]", but no more than other values follow an array.
  const size_t next = head.skip_blanks(end);
  if (next < head.size() && head.at(next) != '[' && head.at(next) != '{') return Shape::no_json;
  return nlohmann::json::accept(head.text().substr(begin, end - begin)) ? Shape::array : Shape::no_json;
}

Shape shape_of(Head& head, size_t begin, bool stream) {
  if (head.at(begin) == '[') return array_shape(head, begin);
  if (head.at(begin) != '{') return Shape::no_json;
  // Templates and code may begin with a brace, too, but no quote follows. (Single quotes: a dict printed by Python.)
  const char next = head.at(head.skip_blanks(begin + 1));
  const bool object = next == '"' || next == '\'' || next == '}';
  return object || stream ? object_shape(head, begin) : Shape::no_json;
}

// Throws if a file is hardly text: its beginning has a NUL byte and is not UTF-8, or has many control characters.
void refuse_binary(std::string_view head, const std::string& name) {
  const size_t valid = utf8_prefix(head), null = head.find('\0');
  if (null != std::string_view::npos && valid < head.size() && !is_cut_character(head.substr(valid)))
    fail("{}: no text: at offset {} is a NUL byte, at offset {} what is no UTF-8 (--format text takes it all the same)",
         name, null, valid);
  const auto is_control = [](unsigned char c) {
    return (c > 0 && c < 0x20 && !std::isspace(c) && c != 0x08 && c != 0x1b) || c == 0x7f;
  };
  const auto controls = std::count_if(head.begin(), head.end(), is_control);
  constexpr int64_t kFew = 4, kShare = 50;
  if (controls >= kFew && controls * kShare > static_cast<int64_t>(head.size()))
    fail("{}: no text: {} of its first {} bytes are control characters (--format text takes it all the same)", name,
         controls, head.size());
}

}  // namespace

Content content_of(TextInput& input, TextFormat format) {
  const std::string& name = input.name();
  if (format == TextFormat::text) return Content::text;  // TextInput has refused packed_format()
  Head head(input);
  if (is_shard_head(head.text())) fail("{} is a token shard, not text", name);
  if (const std::string_view foreign = foreign_format(head.text().substr(0, kFormatBytes)); !foreign.empty())
    fail("{}: is {}, no text: plain text and JSONL are read", name, foreign);
  const Named by_name = format == TextFormat::jsonl ? Named::jsonl : named(name);
  const size_t begin = head.skip_blanks(head.begin());
  if (begin == head.size()) return by_name == Named::jsonl ? Content::jsonl : Content::text;
  refuse_binary(head.text().substr(0, kHeadBytes), name);
  const Shape shape = shape_of(head, begin, is_stream(input.path()));
  if (by_name == Named::jsonl && head.at(begin) == '<')
    fail("{}: is HTML or XML, no JSONL: the page of an error in place of the file?", name);
  switch (shape) {
    case Shape::lines:
      return Content::jsonl;
    case Shape::single:
      if (by_name == Named::json) fail("{}: a document a line, or one document? {}", name, kSays);
      return Content::jsonl;
    case Shape::several_lines:
      fail("{}: is JSON over several lines: JSONL, a record a line, is read (jq -c . writes it){}", name,
           by_name == Named::jsonl ? "" : "; --format text takes it as text");
    case Shape::array:
      fail("{}: is a JSON array: JSONL, a record a line, is read (jq -c '.[]' writes it){}", name,
           by_name == Named::jsonl ? "" : "; --format text takes it as text");
    case Shape::unclear:
      if (by_name == Named::json) fail("{}: a document a line, or one document? {}", name, kSays);
      return Content::jsonl;
    case Shape::no_json:
      break;
  }
  if (by_name == Named::json) fail("{}: named as JSON, but begins with no object: {}", name, kSays);
  return by_name == Named::jsonl ? Content::jsonl : Content::text;
}

Content content_of(const std::string& path, TextFormat format) {
  if (!is_stream(path) && is_shard(path)) return Content::shard;
  TextInput input(path);
  return content_of(input, format);
}

}  // namespace triad
