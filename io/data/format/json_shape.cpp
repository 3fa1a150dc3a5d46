#include "io/data/format/json_shape.h"

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "io/data/format/loose_json.h"
#include "io/data/format/text_head.h"

namespace triad {

namespace {

using Ending = LooseValue::Ending;

constexpr std::string_view kSpace = " \t\r\n";
constexpr size_t kHeadBytes = 4096;
constexpr size_t kWindow = size_t{1} << 20;  // if so many bytes are nothing but JSON, the text is

char char_at(std::string_view text, size_t i) { return i < text.size() ? text[i] : '\0'; }
size_t skip_space(std::string_view text, size_t at) {
  return std::min(text.find_first_not_of(kSpace, at), text.size());
}

size_t skip_blanks(std::string_view text, size_t at) {
  while (const size_t bytes = blank_bytes(text, at)) at += bytes;
  return at;
}
size_t line_end(std::string_view text, size_t at) { return std::min(text.find('\n', at), text.size()); }

// Whether an object begins at text[at]. Templates, code and prose may begin with a brace, too, but then no quote
// follows, or after what is in quotes no colon.
bool begins_object(std::string_view text, size_t at) {
  if (char_at(text, at) != '{') return false;
  at = skip_space(text, at + 1);
  const char quote = char_at(text, at);
  if (quote == '}') {  // an empty one; its name may begin a sentence
    const size_t next = skip_space(text, at + 1);
    return next == text.size() || text[next] == '{';
  }
  if (quote != '"' && quote != '\'') return false;
  for (++at; at < text.size() && text[at] != quote; ++at) {
    if (text[at] == '\n') return quote == '"';  // damaged
    if (text[at] == '\\') ++at;
  }
  if (at >= text.size()) return quote == '"';
  const size_t next = std::min(text.find_first_not_of(" \t\r", at + 1), text.size());
  const char c = next == text.size() ? '\n' : text[next];
  return c == ':' || (quote == '"' && (c == '}' || c == '\n'));
}

// Whether a line, without the space around it, is an object.
bool is_object(std::string_view line) {
  bool in_string = false;
  return begins_object(line, 0) && end_by_brackets(line, 0, in_string) == line.size();
}

// The first line of a text, without the space around it; removes it from the text.
std::string_view take_line(std::string_view& text) {
  const size_t end = line_end(text, 0);
  std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  line.remove_prefix(skip_space(line, 0));
  return line.substr(0, line.find_last_not_of(kSpace) + 1);
}

// Whether lines hold an object each. Array elements are not meant: commas follow them, or the array's last line.
bool has_records(std::string_view text) {
  bool found = false;
  while (!text.empty()) {
    const std::string_view line = take_line(text);
    if (line == "]" || (line.ends_with(',') && is_object(line.substr(0, line.size() - 1)))) return false;
    found = found || is_object(line);
  }
  return found;
}
bool has_records(TextHead& head, size_t begin) {
  const std::string_view text = head.up_to(begin + kWindow);
  return has_records(text.substr(std::min(begin, text.size())));
}

JsonShape object_shape(TextHead& head, size_t begin) {
  const size_t end = head.line_end(begin);
  bool in_string = false;
  const size_t value = end_by_brackets(head.text().substr(0, end), begin, in_string);
  if (value != std::string_view::npos)
    return head.skip_blanks(value) == head.size() ? JsonShape::single : JsonShape::lines;
  if (end == head.size() && head.limited()) return JsonShape::unclear;
  // A damaged line gets its error when the records are read.
  const size_t next = head.skip_blanks(end);
  if (in_string || next == head.size()) return JsonShape::lines;
  const size_t whole = end_by_brackets(head.up_to(begin + kWindow), begin, in_string);
  return has_records(head, whole == std::string_view::npos ? next : whole) ? JsonShape::lines
                                                                           : JsonShape::several_lines;
}

// The shape of a text that begins with an array or another value, if it holds nothing else but JSON.
JsonShape values_shape(TextHead& head, size_t begin) {
  const bool limited = head.has(begin + kWindow);
  const std::string_view text = head.up_to(begin + kWindow);
  const bool arrays = text[begin] == '[';
  bool one_line = true, only_word = true;
  int64_t values = 0;
  for (size_t at = begin, end = begin; at < text.size(); at = skip_blanks(text, end), ++values) {
    if (begins_object(text, at)) return JsonShape::lines;
    const bool array = text[at] == '[';
    const LooseValue value = read_loose_json(text, at);
    const bool first = values == 0;
    if (value.ending == Ending::broken) return JsonShape::none;
    if (value.ending == Ending::cut) {
      // A text may begin with an open quote, but no line of it is that long.
      if (first && !array) return limited && text[at] == '"' ? JsonShape::values : JsonShape::none;
      if (first) return has_records(head, line_end(text, begin)) ? JsonShape::lines : JsonShape::array;
      break;
    }
    // Only arrays share a line with other values; numbers that do are a table.
    const bool begins_line = first || text.substr(end, at - end).find('\n') != std::string_view::npos;
    const size_t rest = std::min(text.find_first_not_of(" \t\r", value.end), text.size());
    if (!array && (!begins_line || (rest < text.size() && text[rest] != '\n'))) return JsonShape::none;
    one_line = one_line && text.substr(at, value.end - at).find('\n') == std::string_view::npos;
    only_word = only_word && text[at] != '"' && !array;
    end = value.end;
  }
  if (arrays) return one_line ? JsonShape::array_lines : JsonShape::array;
  return only_word && values == 1 ? JsonShape::none : JsonShape::values;
}

// What a text is that begins with an array and, in it, an object, whatever is after them.
JsonShape records_array_shape(TextHead& head, size_t begin) {
  const std::string_view text = head.up_to(begin + kWindow);
  if (!begins_object(text, std::min(text.find_first_not_of("[ \t\r\n", begin), text.size()))) return JsonShape::none;
  const size_t end = line_end(text, begin);
  const LooseValue value = read_loose_json(text, begin);
  if (has_records(head, end)) return JsonShape::lines;
  return value.ending == Ending::whole && value.end <= end ? JsonShape::array_lines : JsonShape::array;
}

// Whether a text is records after a few other lines. A text with records at its end, or among its lines, is none.
bool records_follow(TextHead& head) {
  constexpr int64_t kFewest = 3, kShare = 10;  // the other lines are at most a tenth of the text
  if (head.up_to(kHeadBytes).find("\n{\"") == std::string_view::npos) return false;
  std::string_view text = head.up_to(kWindow);
  const auto total = static_cast<int64_t>(text.size());
  text.remove_prefix(text.find("\n{\"") + 1);
  if ((total - static_cast<int64_t>(text.size())) * kShare > total) return false;
  int64_t records = 0;
  while (!text.empty()) {
    const std::string_view line = take_line(text);
    if (is_object(line))
      ++records;
    else if (!line.empty() && !(text.empty() && begins_object(line, 0)))  // the last one may be cut
      return false;
  }
  return records >= kFewest;
}

}  // namespace

JsonShape json_shape(TextHead& head, size_t begin) {
  JsonShape shape = JsonShape::none;
  const char first = head.at(begin);
  if (first == '{') {
    if (begins_object(head.up_to(begin + kHeadBytes), begin)) shape = object_shape(head, begin);
  } else if (std::string_view("[\"-0123456789tfnNITF").find(first) != std::string_view::npos) {
    shape = values_shape(head, begin);
    if (shape == JsonShape::none && first == '[') shape = records_array_shape(head, begin);
  }
  return shape == JsonShape::none && records_follow(head) ? JsonShape::lines : shape;
}

}  // namespace triad
