#include "io/tokenizer/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iterator>
#include <vector>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/tokenizer/unicode.h"

namespace triad {

namespace {

// The characters with Unicode's property White_Space. PCRE2's \s also includes U+180E, which has not been white space
// since Unicode 6.3.
constexpr std::string_view kSpaces =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

class Translator {
 public:
  Translator(std::string_view from, const std::string& where) : from_(from), where_(where) {}

  std::string run() {
    while (at_ < from_.size()) {
      const char c = from_[at_];
      if (c == '\\')
        escape();
      else if (c == '[')
        open_class();
      else if (c == ']' && in_class_)
        close_class();
      else if (in_class_)
        in_class(c);
      else
        outside(c);
    }
    if (in_class_) refuse("a [ that is not closed");
    return out_;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    fail("{}: the pattern {} has {} at offset {}, which is not understood here", where_, shortened(from_), what, at_);
  }
  void copy(size_t n) {
    out_ += from_.substr(at_, n);
    at_ += n;
  }
  // Copies the character at at_, which matches itself.
  void copy_character() {
    const size_t bytes = utf8_prefix(from_.substr(at_, 4)) > 0 ? character_bytes(from_, at_) : 0;
    if (bytes == 0) refuse("bytes that are not UTF-8");
    character(point_at(from_, at_), from_.substr(at_ + bytes));
    copy(bytes);
  }

  // Refuses a character for which the two fold case differently. Oniguruma folds ss to U+00DF and back, which PCRE2
  // does not. next: the pattern after the character.
  void character(uint32_t point, std::string_view next) {
    if (!ignores_case_) return separate();
    if (in_class_) {
      check_case_of(in_range_ ? range_begin_ : point, point);
      in_range_ = false;
      range_begin_ = point;
      return;
    }
    check_case_of(point, point);
    const uint32_t folded = case_fold(point).front();
    // Oniguruma repeats only the last of several characters before a quantifier, so the others do not join it.
    if (!next.empty() && std::string_view("?*+").find(next[0]) != std::string_view::npos) return separate();
    if (previous_ != kNone && begins_case_fold(previous_, folded))
      refuse(fmt::format("U+{:04X} and U+{:04X} in (?i), for which one character may stand,", previous_, folded));
    previous_ = folded;
  }
  void check_case_of(uint32_t first, uint32_t last) const {
    for (uint32_t point = first; point <= std::min(last, kLastCased); ++point) {
      if (case_fold(point).size() > 1)
        refuse(fmt::format("U+{:04X} in (?i), for which several characters may stand,", point));
      if (is_newly_cased(point)) refuse(fmt::format("U+{:04X} in (?i), which older versions of Unicode lack,", point));
    }
  }
  // The next character does not join the one before.
  void separate() {
    previous_ = range_begin_ = kNone;
    in_range_ = false;
  }

  // Writes a character set. A negated set inside a class is refused, because PCRE2 has no \P{L} that excludes newer
  // Unicode versions' letters.
  void put_set(std::string_view set, bool negated) {
    separate();
    if (in_class_ && negated) refuse("a negated set inside a class");
    if (in_class_)
      out_ += set;
    else
      out_ += fmt::format("[{}{}]", negated ? "^" : "", set);
  }

  void escape() {
    if (at_ + 1 == from_.size()) refuse("a \\ at its end");
    const char c = from_[at_ + 1];
    if (c == 's' || c == 'S') {
      put_set(kSpaces, c == 'S');
    } else if (c == 'd' || c == 'D') {
      put_set("\\p{Nd}" + new_characters("Nd"), c == 'D');
    } else if (c == 'p' || c == 'P') {
      return property(c == 'P');
    } else if (c == 'v') {
      separate();
      out_ += "\\x0b";
    } else if (c == 'u' || c == 'x') {
      return code_point(c);
    } else if (std::string_view("rntfae").find(c) != std::string_view::npos) {
      separate();
      return copy(2);
    } else if (std::isalnum(static_cast<unsigned char>(c)) == 0) {
      copy(1);
      return copy_character();
    } else {
      refuse(fmt::format("\\{}", c));
    }
    at_ += 2;
  }

  // Translates a property such as \p{L} or \p{^L}.
  void property(bool negated) {
    const size_t end = from_.find('}', at_);
    if (from_.substr(at_ + 2, 1) != "{" || end == std::string_view::npos) refuse("\\p without {...}");
    std::string_view name = from_.substr(at_ + 3, end - at_ - 3);
    if (name.starts_with("^")) name.remove_prefix(1), negated = !negated;
    constexpr std::string_view kCategories =
        " L Lu Ll Lt Lm Lo N Nd Nl No M Mn Mc Me P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp ";
    if (name.empty() || kCategories.find(fmt::format(" {} ", name)) == std::string_view::npos)
      refuse(fmt::format("\\p{{{}}}", shortened(name)));
    // Oniguruma folds the case of a set's characters, and PCRE2 does not: U+0345, a mark, is a letter's other form.
    if (ignores_case_ && (name[0] == 'L' || name[0] == 'M')) refuse(fmt::format("\\p{{{}}} in (?i)", name));
    put_set(fmt::format("\\p{{{}}}{}", name, new_characters(name)), negated);
    at_ = end + 1;
  }

  // Translates a code point such as \uHHHH, \xHH or \x{H...}.
  void code_point(char kind) {
    size_t begin = at_ + 2, end = begin + (kind == 'u' ? 4 : 2);
    if (kind == 'x' && begin < from_.size() && from_[begin] == '{') end = from_.find('}', ++begin);
    if (end == std::string_view::npos || end > from_.size() || begin == end) refuse("a cut character code");
    const std::string_view digits = from_.substr(begin, end - begin);
    for (const char digit : digits)
      if (std::isxdigit(static_cast<unsigned char>(digit)) == 0) refuse("a character code that is no number");
    const size_t after = end + (begin == at_ + 3 ? 1 : 0);
    character(static_cast<uint32_t>(std::strtoul(std::string(digits).c_str(), nullptr, 16)), from_.substr(after));
    out_ += fmt::format("\\x{{{}}}", digits);
    at_ = after;
  }

  void open_class() {
    if (in_class_) refuse("a [ inside a class");  // Oniguruma: begins a nested class; PCRE2: is a plain [
    in_class_ = true;
    separate();
    copy(from_.substr(at_ + 1, 1) == "^" ? 2 : 1);
    if (at_ < from_.size() && from_[at_] == ']') refuse("an empty class");
  }
  void close_class() {
    in_class_ = false;
    separate();
    copy(1);
  }
  void in_class(char c) {
    if (c == '&' && from_.substr(at_, 2) == "&&") refuse("&&");
    if (c == '-' && range_begin_ != kNone && from_.substr(at_ + 1, 1) != "]") {
      in_range_ = true;
      return copy(1);
    }
    copy_character();
  }

  void open_group() {
    std::string_view group = from_.substr(at_, 1);
    if (from_.substr(at_, 2) == "(*") refuse("(*");
    if (from_.substr(at_, 2) == "(?") {
      constexpr std::string_view kGroups[] = {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!", "(?i:"};
      const auto* found = std::find_if(std::begin(kGroups), std::end(kGroups),
                                       [&](std::string_view g) { return from_.substr(at_).starts_with(g); });
      if (found == std::end(kGroups)) refuse("a group that is none of (?: (?= (?! (?> (?<= (?<! (?i:");
      group = *found;
    }
    outer_ignores_case_.push_back(ignores_case_);
    if (group == "(?i:") ignores_case_ = true;
    if (group != "(?:" && group != "(?i:") separate();
    copy(group.size());
  }
  void close_group() {
    if (outer_ignores_case_.empty()) refuse("a ) without its (");
    ignores_case_ = outer_ignores_case_.back();
    outer_ignores_case_.pop_back();
    copy(1);
  }

  void outside(char c) {
    if (c == '^' || c == '$') refuse(std::string(1, c));  // Oniguruma: matches at a line's ends; PCRE2: at the text's
    if (at_ == 0 && from_.starts_with("(?i)")) {          // the two end its scope at different places elsewhere
      ignores_case_ = true;
      return copy(4);
    }
    if (c == '(') return open_group();
    if (c == ')') return close_group();
    // {,n} is refused because PCRE2 reads it as plain text, and {n}? because it means "n or none" in Oniguruma but n in
    // PCRE2.
    if (c == '{' && from_.substr(at_, 2) == "{,") refuse("{,");
    if (c == '}' && from_.substr(at_, 2) == "}?" && from_.substr(0, at_).find_last_of("{,") != std::string_view::npos &&
        from_[from_.substr(0, at_).find_last_of("{,")] == '{')
      refuse("}?");
    // {n,m}+ is refused: it is a repeated repetition in Oniguruma, but possessive in PCRE2.
    if (c == '}' && from_.substr(at_, 2) == "}+") refuse("}+");
    if (c == '{') return copy(std::min(from_.find_first_not_of("0123456789,", at_ + 1), from_.size()) - at_);
    if (c == '}') return copy(1);
    if (std::string_view("|*+?.").find(c) == std::string_view::npos) return copy_character();
    separate();
    copy(1);
  }

  static constexpr uint32_t kNone = UINT32_MAX;
  // No character above has an upper and a lower case.
  static constexpr uint32_t kLastCased = 0x1ffff;

  std::string_view from_;
  const std::string& where_;
  size_t at_ = 0;
  bool in_class_ = false, ignores_case_ = false;
  std::vector<bool> outer_ignores_case_;  // ignores_case_ outside each open group
  uint32_t previous_ = kNone;             // folded character that the next one may join; kNone: none
  uint32_t range_begin_ = kNone;          // last character in a class
  bool in_range_ = false;                 // whether a - follows it
  std::string out_;
};

std::string error_text(int error) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

pcre2_code* code_of(const std::shared_ptr<void>& code) { return static_cast<pcre2_code*>(code.get()); }

}  // namespace

std::string translate_pattern(const std::string& oniguruma, const std::string& where) {
  return Translator(oniguruma, where).run();
}

std::string literal_pattern(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (std::ispunct(static_cast<unsigned char>(c)) != 0) out += '\\';
    out += c;
  }
  return out;
}

Pattern::Pattern(const std::string& oniguruma, const std::string& where) : where_(where) {
  const std::string pattern = translate_pattern(oniguruma, where);
  const std::shared_ptr<pcre2_compile_context> context(pcre2_compile_context_create(nullptr),
                                                       pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  code_ = std::shared_ptr<void>(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, context.get()),
      [](void* code) { pcre2_code_free(static_cast<pcre2_code*>(code)); });
  TRIAD_CHECK(code_ != nullptr, "{}: the pattern {} cannot be compiled: {} (offset {} of {})", where,
              shortened(oniguruma), error_text(error), offset, shortened(pattern));
  compiled_ = pcre2_jit_compile(code_of(code_), PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD) == 0;
  uint32_t lookbehind = 0, empty = 0;
  pcre2_pattern_info(code_of(code_), PCRE2_INFO_MATCHEMPTY, &empty);
  TRIAD_CHECK(
      empty == 0,
      "{}: the pattern {} can match an empty text, after which other programs search on in other ways: a pattern "
      "is needed that takes a character with each match",
      where, shortened(oniguruma));
  pcre2_pattern_info(code_of(code_), PCRE2_INFO_MAXLOOKBEHIND, &lookbehind);
  looks_behind_ = lookbehind > 0;
}

Pattern::Matcher::Matcher(const Pattern& pattern)
    : data_(pcre2_match_data_create_from_pattern(code_of(pattern.code_), nullptr),
            [](void* p) { pcre2_match_data_free(static_cast<pcre2_match_data*>(p)); }),
      stack_(pcre2_jit_stack_create(size_t{32} << 10, size_t{16} << 20, nullptr),
             [](void* p) { pcre2_jit_stack_free(static_cast<pcre2_jit_stack*>(p)); }),
      context_(pcre2_match_context_create(nullptr),
               [](void* p) { pcre2_match_context_free(static_cast<pcre2_match_context*>(p)); }) {
  TRIAD_CHECK(data_ && context_, "{}: no memory to match", pattern.where_);
  // 1 GiB of heap memory for a match whose stack is full: some five million iterations of a group.
  constexpr uint32_t kHeapKiB = 1 << 20;
  pcre2_set_heap_limit(static_cast<pcre2_match_context*>(context_.get()), kHeapKiB);
  if (stack_) pcre2_jit_stack_assign(static_cast<pcre2_match_context*>(context_.get()), nullptr, stack_.get());
}

Pattern::Found Pattern::find(Matcher& m, std::string_view text, size_t from, bool more_follows, Span& span) const {
  auto* data = static_cast<pcre2_match_data*>(m.data_.get());
  auto* context = static_cast<pcre2_match_context*>(m.context_.get());
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  // Limit on PCRE2's match steps: proportional to the remaining text, several times what a sound pattern needs. A
  // pattern with exponential backtracking fails here instead of running for hours. The limit applies to each match, so
  // a pattern with a long lookahead at each position still takes quadratic time.
  constexpr size_t kLeastSteps = 20'000, kStepsPerByte = 4;
  const size_t steps = kLeastSteps + kStepsPerByte * (text.size() - from);
  pcre2_set_match_limit(context, static_cast<uint32_t>(std::min<size_t>(steps, UINT32_MAX)));
  const uint32_t options = PCRE2_NO_UTF_CHECK | (more_follows ? PCRE2_PARTIAL_HARD : 0);
  int rc = compiled_ ? pcre2_jit_match(code_of(code_), subject, text.size(), from, options, data, context)
                     : pcre2_match(code_of(code_), subject, text.size(), from, options, data, context);
  std::shared_ptr<pcre2_match_data> on_heap;  // freed after this match, because PCRE2 would not release its memory
  if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {     // the stack was too small: each group iteration uses some
    on_heap.reset(pcre2_match_data_create_from_pattern(code_of(code_), nullptr), pcre2_match_data_free);
    TRIAD_CHECK(on_heap, "{}: no memory to match", where_);
    data = on_heap.get();
    rc = pcre2_match(code_of(code_), subject, text.size(), from, options | PCRE2_NO_JIT, data, context);
  }
  if (rc == PCRE2_ERROR_NOMATCH) return Found::none;
  if (rc < 0 && rc != PCRE2_ERROR_PARTIAL)
    fail("{}: the pattern cannot be matched at offset {} of {} bytes: {}", where_, from, text.size(), error_text(rc));
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(data);
  span = {offsets[0], offsets[1]};
  return rc == PCRE2_ERROR_PARTIAL ? Found::cut : Found::match;
}

}  // namespace triad
