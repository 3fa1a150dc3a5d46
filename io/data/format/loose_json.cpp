#include "io/data/format/loose_json.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

namespace triad {

namespace {

using Ending = LooseValue::Ending;

// Whether a word is a number of JSON, of any size.
bool is_number(std::string_view word) {
  const auto take_digits = [&] {
    const size_t digits = std::min(word.find_first_not_of("0123456789"), word.size());
    word.remove_prefix(digits);
    return digits;
  };
  if (word.starts_with('-')) word.remove_prefix(1);
  const bool zero = word.starts_with('0');
  const size_t whole = take_digits();
  if (whole == 0 || (zero && whole > 1)) return false;
  if (word.starts_with('.')) {
    word.remove_prefix(1);
    if (take_digits() == 0) return false;
  }
  if (word.starts_with('e') || word.starts_with('E')) {
    word.remove_prefix(1);
    if (word.starts_with('-') || word.starts_with('+')) word.remove_prefix(1);
    if (take_digits() == 0) return false;
  }
  return word.empty();
}

class Reader {
 public:
  Reader(std::string_view text, size_t at) : text_(text), at_(at) {}

  LooseValue value() {
    do {
      if (const Ending ending = next(); ending != Ending::whole) return {ending, at_};
    } while (!open_.empty());
    return {Ending::whole, at_};
  }

 private:
  bool ended() const { return at_ >= text_.size(); }
  void skip_space() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }

  // Reads an opening or closing bracket or a value without brackets, the key before it and the comma after it.
  Ending next() {
    if (!open_.empty()) skip_space();
    if (ended()) return Ending::cut;
    if (!open_.empty() && text_[at_] == open_.back()) {
      open_.pop_back();
      ++at_;
      return separator();
    }
    if (!open_.empty() && open_.back() == '}')
      if (const Ending ending = key(); ending != Ending::whole) return ending;
    if (ended()) return Ending::cut;
    const char c = text_[at_];
    if (c == '[' || c == '{') {
      open_ += c == '[' ? ']' : '}';
      ++at_;
      return Ending::whole;
    }
    const Ending ending = c == '"' || (c == '\'' && !open_.empty()) ? string() : word();
    return ending == Ending::whole ? separator() : ending;
  }

  Ending key() {
    if (text_[at_] != '"' && text_[at_] != '\'') return Ending::broken;
    if (const Ending ending = string(); ending != Ending::whole) return ending;
    skip_space();
    if (ended()) return Ending::cut;
    if (text_[at_] != ':') return Ending::broken;
    ++at_;
    skip_space();
    return Ending::whole;
  }

  // Reads the comma after a value. A closing bracket is left to next().
  Ending separator() {
    if (open_.empty()) return Ending::whole;
    skip_space();
    if (ended()) return Ending::cut;
    if (text_[at_] != ',' && text_[at_] != open_.back()) return Ending::broken;
    if (text_[at_] == ',') ++at_;
    return Ending::whole;
  }

  Ending string() {
    const char quote = text_[at_++];
    for (; !ended(); ++at_) {
      const char c = text_[at_];
      if (c == '\n') return Ending::broken;
      if (c == '\\' && at_ + 1 < text_.size() && text_[at_ + 1] != '\n') ++at_;
      if (c == quote) {
        ++at_;
        return Ending::whole;
      }
    }
    return quote == '"' ? Ending::cut : Ending::broken;  // a single one may be an apostrophe
  }

  // A number, or a word without quotes.
  Ending word() {
    constexpr std::array<std::string_view, 10> kWords = {"null", "true", "false", "NaN",      "nan",
                                                         "inf",  "None", "True",  "Infinity", "False"};
    const auto in_word = [](char c) {
      return (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') || c == '.' || c == '+' || c == '-';
    };
    size_t end = at_;
    while (end < text_.size() && in_word(text_[end])) ++end;
    std::string_view word = text_.substr(at_, end - at_);
    if (word.empty()) return Ending::broken;
    bool known = is_number(word), begun = word.find_first_not_of("+-.eE0123456789") == word.npos;
    if (word[0] == '-') word.remove_prefix(1);
    for (const std::string_view one : kWords) {
      known = known || word == one;
      begun = begun || one.starts_with(word);
    }
    if (!known) return begun && end == text_.size() ? Ending::cut : Ending::broken;
    at_ = end;
    return Ending::whole;
  }

  std::string_view text_;
  size_t at_;
  std::string open_;  // the closing brackets of what is open, the innermost last
};

}  // namespace

LooseValue read_loose_json(std::string_view text, size_t at) { return Reader(text, at).value(); }

size_t end_by_brackets(std::string_view text, size_t at, bool& in_string) {
  int64_t depth = 0;
  in_string = false;
  for (size_t i = at; i < text.size(); ++i) {
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

}  // namespace triad
