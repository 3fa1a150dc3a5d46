#include "io/chat/lexer.h"

#include <algorithm>
#include <utility>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/tokenizer/unicode.h"

namespace triad::chat {

namespace {

using Kind = Token::Kind;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool begins_name(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

class Lexer {
 public:
  Lexer(std::string_view source, const std::string& name) : name_(name) {
    if (const size_t valid = utf8_prefix(source); valid < source.size())
      fail("{}: the byte 0x{:02x} at offset {} is not UTF-8", name, static_cast<unsigned char>(source[valid]), valid);
    // Line ends become line feeds, and one at the end is left out.
    for (size_t i = 0; i < source.size(); ++i) {
      source_ += source[i] == '\r' ? '\n' : source[i];
      if (source[i] == '\r' && i + 1 < source.size() && source[i + 1] == '\n') ++i;
    }
    if (source_.ends_with('\n')) source_.pop_back();
  }

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      const size_t begin = find_tag();
      if (begin == std::string::npos) {
        text(source_.substr(at_));
        break;
      }
      const char tag = source_[begin + 1];
      const char sign = begin + 2 < source_.size() ? source_[begin + 2] : '\0';
      text(text_before(begin, tag, sign));
      advance(begin);
      advance(begin + (sign == '-' || sign == '+' ? 3 : 2));
      if (tag == '#')
        comment();
      else
        inside(tag == '%');
    }
    add(Kind::end, "");
    return std::move(tokens_);
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail("{}: line {}: {}", name_, line_, shortened(fmt::format(format, std::forward<Args>(args)...), 400));
  }

  size_t find_tag() const {
    for (size_t at = source_.find('{', at_); at != std::string::npos; at = source_.find('{', at + 1))
      if (at + 1 < source_.size() && std::string_view("{%#").find(source_[at + 1]) != std::string_view::npos) return at;
    return std::string::npos;
  }

  // The text before a tag, without the white space that the tag takes: with `-` all of it, and before a block or a
  // comment without `+` the line's indentation.
  std::string text_before(size_t begin, char tag, char sign) const {
    std::string before = source_.substr(at_, begin - at_);
    if (sign == '-') {
      before.resize(length_without_trailing_space(before));
    } else if (sign != '+' && tag != '{') {
      const size_t feed = before.rfind('\n'), line = feed == std::string::npos ? 0 : feed + 1;
      if ((line > 0 || line_starts_) && length_without_trailing_space(std::string_view(before).substr(line)) == 0)
        before.resize(line);
    }
    return before;
  }

  void add(Kind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }
  void text(std::string text) {
    if (!text.empty()) add(Kind::text, std::move(text));
  }

  void advance(size_t to) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(to), '\n'));
    if (to > at_) line_starts_ = source_[to - 1] == '\n';
    at_ = to;
  }

  // Goes past a tag's end and the white space that it takes: with `-` all of it, after a block or a comment without
  // `+` one line feed.
  void end_tag(size_t bytes, char sign, bool trims) {
    size_t to = at_ + bytes;
    if (sign == '-')
      while (to < source_.size() && is_python_space(point_at(source_, to))) to += character_bytes(source_, to);
    else if (sign != '+' && trims && to < source_.size() && source_[to] == '\n')
      ++to;
    advance(to);
  }

  void comment() {
    const size_t end = source_.find("#}", at_);
    if (end == std::string::npos) refuse("the comment {{# has no #}}");
    // The sign is part of the end, unless it belongs to the beginning, as in {#-#}.
    const char sign = end > at_ ? source_[end - 1] : '\0';
    const bool is_sign = sign == '-' || sign == '+';
    advance(is_sign ? end - 1 : end);
    end_tag(is_sign ? 3 : 2, is_sign ? sign : '\0', true);
  }

  // Returns the length of a tag's end at the current position, 0 if it is none.
  size_t tag_end(bool block, char& sign) const {
    const std::string_view rest = std::string_view(source_).substr(at_), end = block ? "%}" : "}}";
    sign = '\0';
    if (rest.starts_with(end)) return 2;
    if (rest.empty() || (rest[0] != '-' && (rest[0] != '+' || !block)) || !rest.substr(1).starts_with(end)) return 0;
    sign = rest[0];
    return 3;
  }

  void inside(bool block) {
    add(block ? Kind::block_begin : Kind::output_begin, "");
    const int first_line = line_;
    std::string open;  // brackets that are not closed
    while (at_ < source_.size()) {
      char sign;
      if (const size_t end = tag_end(block, sign); end > 0 && open.empty()) {
        add(block ? Kind::block_end : Kind::output_end, "");
        return end_tag(end, sign, block);
      }
      token(open);
    }
    line_ = first_line;
    refuse("the tag {} is not closed", block ? "{%" : "{{");
  }

  void token(std::string& open) {
    const char c = source_[at_];
    const uint32_t point = point_at(source_, at_);
    if (is_python_space(point)) return advance(at_ + character_bytes(source_, at_));
    if (begins_name(c)) {
      size_t end = at_;
      while (end < source_.size() && (begins_name(source_[end]) || is_digit(source_[end]))) ++end;
      add(Kind::name, source_.substr(at_, end - at_));
      return advance(end);
    }
    if (is_digit(c)) return number();
    if (c == '"' || c == '\'') return string(c);
    constexpr std::string_view kOperators[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[",
                                               "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ","};
    for (const std::string_view op : kOperators) {
      if (!std::string_view(source_).substr(at_).starts_with(op)) continue;
      if (op == "(" || op == "[" || op == "{") {
        open += op;
      } else if (op == ")" || op == "]" || op == "}") {
        const char opening = op == ")" ? '(' : op == "]" ? '[' : '{';
        if (open.empty() || open.back() != opening) refuse("`{}` without `{}`", op, opening);
        open.pop_back();
      }
      add(Kind::op, std::string(op));
      return advance(at_ + op.size());
    }
    refuse("the character `{}` is not supported",
           printable(std::string_view(source_).substr(at_, character_bytes(source_, at_))));
  }

  void number() {
    size_t end = at_;
    const auto digits = [&] {
      while (end < source_.size() && (is_digit(source_[end]) || source_[end] == '_')) ++end;
    };
    digits();
    bool real = false;
    if (end + 1 < source_.size() && source_[end] == '.' && is_digit(source_[end + 1])) {
      real = true;
      ++end;
      digits();
    }
    if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
      const size_t sign = end + 1 < source_.size() && (source_[end + 1] == '+' || source_[end + 1] == '-') ? 1 : 0;
      if (end + sign + 1 < source_.size() && is_digit(source_[end + sign + 1])) {
        real = true;
        end += sign + 1;
        digits();
      }
    }
    if (end < source_.size() && begins_name(source_[end]))
      refuse("the number {} is not supported", source_.substr(at_, end + 1 - at_));
    std::string text = source_.substr(at_, end - at_);
    std::erase(text, '_');
    add(real ? Kind::real : Kind::integer, text);
    advance(end);
  }

  void string(char quote) {
    const size_t begin = at_ + 1;
    size_t end = begin;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) refuse("the string that begins with {} has no end", quote);
    const std::string_view raw = std::string_view(source_).substr(begin, end - begin);
    std::string value;
    for (size_t i = 0; i < raw.size(); ++i) {
      if (raw[i] != '\\')
        value += raw[i];
      else
        i += escape(raw.substr(i), value) - 1;
    }
    add(Kind::string, std::move(value));
    advance(end + 1);
  }

  // Appends what an escape sequence stands for in Python, and returns its length.
  size_t escape(std::string_view raw, std::string& value) const {
    const char c = raw[1];
    constexpr std::pair<char, char> kSimple[] = {{'n', '\n'}, {'t', '\t'}, {'r', '\r'},  {'b', '\b'},  {'f', '\f'},
                                                 {'v', '\v'}, {'a', '\a'}, {'\\', '\\'}, {'\'', '\''}, {'"', '"'}};
    for (const auto& [letter, meaning] : kSimple)
      if (c == letter) return value += meaning, 2;
    if (c == '\n') return 2;
    if (c == 'N') refuse("the escape \\N in a string is not supported");
    size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0, base = 16, first = 2;
    if (c >= '0' && c <= '7') {
      base = 8, first = 1, digits = 1;
      while (digits < 3 && 1 + digits < raw.size() && raw[1 + digits] >= '0' && raw[1 + digits] <= '7') ++digits;
    }
    if (digits == 0) return value += raw.substr(0, 2), 2;  // no escape: the backslash stays
    uint64_t point = 0;
    for (size_t i = first; i < first + digits; ++i) {
      const char digit = i < raw.size() ? raw[i] : ' ';
      const size_t of = std::string_view("0123456789abcdef").find(digit >= 'A' && digit <= 'F' ? digit + 32 : digit);
      if (of == std::string_view::npos) refuse("the escape \\{} in a string needs {} digits", c, digits);
      point = point * base + of;
    }
    const std::string character = utf8_character(point);
    if (character.empty()) refuse("the escape {} in a string is no character", raw.substr(0, first + digits));
    value += character;
    return first + digits;
  }

  static std::string utf8_character(uint64_t point) {
    if (point > 0x10ffff || (point >= 0xd800 && point < 0xe000)) return {};
    const auto tail = [&](int shift) { return static_cast<char>(0x80 | (point >> shift & 0x3f)); };
    if (point < 0x80) return {static_cast<char>(point)};
    if (point < 0x800) return {static_cast<char>(0xc0 | point >> 6), tail(0)};
    if (point < 0x10000) return {static_cast<char>(0xe0 | point >> 12), tail(6), tail(0)};
    return {static_cast<char>(0xf0 | point >> 18), tail(12), tail(6), tail(0)};
  }

  const std::string& name_;
  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starts_ = true;  // what precedes the position is a line feed, or the beginning
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> lex(std::string_view source, const std::string& name) { return Lexer(source, name).run(); }

}  // namespace triad::chat
