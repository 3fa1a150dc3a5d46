#include "io/chat/strings.h"

#include <algorithm>
#include <limits>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/tokenizer/unicode.h"

namespace triad::chat {

namespace {

template <class F>
std::string change_case(std::string_view text, const char* what, F&& change) {
  std::string out(text);
  for (char& c : out) {
    if (static_cast<unsigned char>(c) >= 0x80)
      fail("{} of \"{}\" is not supported, only of ASCII", what, shortened(text, 40));
    c = change(c);
  }
  return out;
}

char to_lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c; }
char to_upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - ('a' - 'A')) : c; }

std::vector<Value> to_values(const std::vector<std::string_view>& parts, Budget& budget) {
  std::vector<Value> values;
  for (const std::string_view part : parts) {
    budget.spend(part.size() + sizeof(Value));
    values.emplace_back(std::string(part));
  }
  return values;
}

// split() and rsplit() at a separator.
std::vector<std::string_view> split_at(std::string_view text, std::string_view separator, size_t most, bool from_end) {
  std::vector<std::string_view> parts;
  while (parts.size() < most) {
    const size_t at = from_end ? text.rfind(separator) : text.find(separator);
    if (at == std::string_view::npos) break;
    parts.push_back(from_end ? text.substr(at + separator.size()) : text.substr(0, at));
    text = from_end ? text.substr(0, at) : text.substr(at + separator.size());
  }
  parts.push_back(text);
  if (from_end) std::reverse(parts.begin(), parts.end());
  return parts;
}

// split() without a separator: at runs of white space.
std::vector<std::string_view> split_words(std::string_view text, size_t most) {
  std::vector<std::string_view> parts;
  size_t at = 0;
  const auto skip = [&](bool space) {
    while (at < text.size() && is_python_space(point_at(text, at)) == space) at += character_bytes(text, at);
  };
  for (skip(true); at < text.size(); skip(true)) {
    const size_t begin = at;
    if (parts.size() == most) {
      const std::string_view rest = text.substr(begin);
      parts.push_back(rest.substr(0, length_without_trailing_space(rest)));
      break;
    }
    skip(false);
    parts.push_back(text.substr(begin, at - begin));
  }
  return parts;
}

std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const uint32_t point = point_at(text, at);
    const size_t bytes = character_bytes(text, at);
    const bool ends = (point >= 0x0a && point <= 0x0d) || (point >= 0x1c && point <= 0x1e) || point == 0x85 ||
                      point == 0x2028 || point == 0x2029;
    size_t next = at + bytes;
    if (point == '\r' && next < text.size() && text[next] == '\n') ++next;
    if (ends) {
      lines.push_back(text.substr(begin, (keep_ends ? next : at) - begin));
      begin = next;
    }
    at = next;
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return lines;
}

// Whether the text begins, or ends, with a string or with one of a tuple's.
bool has_affix(std::string_view text, const Value& affix, bool at_end) {
  if (affix.is_list() && affix.list().kind == List::Kind::tuple)
    return std::any_of(affix.list().items.begin(), affix.list().items.end(),
                       [&](const Value& one) { return has_affix(text, one, at_end); });
  if (!affix.is_string()) fail("{} is {}: a string is needed", at_end ? "endswith" : "startswith", affix.kind());
  return at_end ? text.ends_with(affix.string()) : text.starts_with(affix.string());
}

Value split(const std::string& text, bool from_end, Arguments args, Budget& budget) {
  const Value separator = args.take("sep", Value::none());
  const int64_t limit = args.take_integer("maxsplit", -1);
  args.done();
  const size_t most = limit < 0 ? std::numeric_limits<size_t>::max() : static_cast<size_t>(limit);
  if (separator.is_none()) {
    if (from_end && limit >= 0) fail("rsplit with maxsplit at white space is not supported");
    return Value::list(to_values(split_words(text, most), budget));
  }
  if (!separator.is_string()) fail("split: the separator is {}: a string is needed", separator.kind());
  if (separator.string().empty()) fail("split: the separator is empty");
  return Value::list(to_values(split_at(text, separator.string(), most, from_end), budget));
}

Value searched(const std::string& text, const std::string& name, Arguments args) {
  const std::string what = args.take_string("sub");
  args.done();
  if (name == "count") {
    if (what.empty()) return static_cast<int64_t>(count_characters(text) + 1);
    int64_t count = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + what.size())) ++count;
    return count;
  }
  const size_t at = name == "rfind" || name == "rindex" ? text.rfind(what) : text.find(what);
  if (at == std::string::npos) {
    if (name == "index" || name == "rindex") fail("{}: the string is not in the text", name);
    return int64_t{-1};
  }
  return static_cast<int64_t>(count_characters(std::string_view(text).substr(0, at)));
}

Value joined(const std::string& between, Arguments args, Budget& budget) {
  std::string out;
  bool first = true;
  for (const Value& item : items_of(args.take("iterable"), budget)) {
    if (!item.is_string()) fail("join needs strings, not {}", item.kind());
    budget.spend(between.size() + item.string().size());
    if (!first) out += between;
    first = false;
    out += item.string();
  }
  args.done();
  return out;
}

Value without_affix(const std::string& text, bool suffix, Arguments args) {
  const std::string affix = args.take_string(suffix ? "suffix" : "prefix");
  args.done();
  if (suffix ? !text.ends_with(affix) : !text.starts_with(affix)) return text;
  return suffix ? text.substr(0, text.size() - affix.size()) : text.substr(affix.size());
}

// isdigit and the like: whether the text is not empty and all its characters are of a kind.
Value is_all(const std::string& text, const std::string& name) {
  const auto is = [&](char c) {
    const bool digit = c >= '0' && c <= '9', letter = to_lower(c) != c || to_upper(c) != c;
    return name == "isalpha" ? letter : name == "isalnum" ? letter || digit : digit;
  };
  if (std::any_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) >= 0x80; }))
    fail("{} of \"{}\" is not supported, only of ASCII", name, shortened(text, 40));
  return !text.empty() && std::all_of(text.begin(), text.end(), is);
}

}  // namespace

std::string strip(std::string_view text, std::string_view characters, bool left, bool right) {
  const auto removes = [&](size_t at) {
    if (characters.empty()) return is_python_space(point_at(text, at));
    const std::string_view character = text.substr(at, character_bytes(text, at));
    for (size_t i = 0; i < characters.size(); i += character_bytes(characters, i))
      if (characters.substr(i, character_bytes(characters, i)) == character) return true;
    return false;
  };
  while (left && !text.empty() && removes(0)) text.remove_prefix(character_bytes(text, 0));
  while (right && !text.empty()) {
    const size_t at = previous_character(text, text.size());
    if (!removes(at)) break;
    text = text.substr(0, at);
  }
  return std::string(text);
}

std::string stripped_characters(const Value& value) {
  constexpr size_t kMost = 100;  // each character of the text is compared with each of these
  if (value.is_none()) return {};
  if (!value.is_string()) fail("strip needs a string of characters, not {}", value.kind());
  if (value.string().empty() || value.string().size() > kMost)
    fail("strip of {} bytes of characters is not supported, only of 1 to {}", value.string().size(), kMost);
  return value.string();
}

std::string replaced(std::string_view text, std::string_view old, std::string_view with, int64_t most, Budget& budget) {
  if (old.empty()) fail("replace of an empty string is not supported");
  std::string out;
  size_t from = 0;
  for (; most != 0; --most) {
    const size_t at = text.find(old, from);
    if (at == std::string_view::npos) break;
    budget.spend(at - from + with.size());
    out += text.substr(from, at - from);
    out += with;
    from = at + old.size();
  }
  budget.spend(text.size() - from);
  out += text.substr(from);
  return out;
}

std::string lower_case(std::string_view text, const char* what) { return change_case(text, what, to_lower); }
std::string upper_case(std::string_view text, const char* what) { return change_case(text, what, to_upper); }
std::string capitalized(std::string_view text) {
  std::string out = lower_case(text, "capitalize");
  if (!out.empty()) out[0] = to_upper(out[0]);
  return out;
}

Value call_string_method(const std::string& text, const std::string& name, Arguments args, Budget& budget) {
  budget.spend(text.size());
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const Value characters = args.take("chars", Value::none());
    args.done();
    return strip(text, stripped_characters(characters), name != "rstrip", name != "lstrip");
  }
  if (name == "split" || name == "rsplit") return split(text, name == "rsplit", std::move(args), budget);
  if (name == "startswith" || name == "endswith") {
    const Value affix = args.take("prefix");
    args.done();
    return has_affix(text, affix, name == "endswith");
  }
  if (name == "splitlines") {
    const bool keep_ends = args.take("keepends", false).truth();
    args.done();
    return Value::list(to_values(split_lines(text, keep_ends), budget));
  }
  if (name == "replace") {
    const std::string old = args.take_string("old"), with = args.take_string("new");
    const int64_t most = args.take_integer("count", -1);
    args.done();
    return replaced(text, old, with, most, budget);
  }
  if (name == "find" || name == "rfind" || name == "index" || name == "rindex" || name == "count")
    return searched(text, name, std::move(args));
  if (name == "join") return joined(text, std::move(args), budget);
  if (name == "removeprefix" || name == "removesuffix")
    return without_affix(text, name == "removesuffix", std::move(args));
  const bool kind = name == "isdigit" || name == "isalpha" || name == "isalnum";
  if (!kind && name != "lower" && name != "upper" && name != "capitalize")
    fail("the method {} of a string is not supported", shortened(name, 40));
  args.done();
  if (kind) return is_all(text, name);
  if (name == "lower") return lower_case(text, "lower");
  return name == "upper" ? upper_case(text, "upper") : capitalized(text);
}

}  // namespace triad::chat
