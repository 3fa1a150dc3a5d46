#include "io/tokenizer/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cctype>
#include <initializer_list>

#include "engine/check.h"
#include "io/tokenizer/unicode.h"

namespace triad {

namespace {

// The characters of Unicode's property White_Space. PCRE2's \s also includes U+180E, which has not been white space
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

  // Writes a set of characters. A negated set inside a class is refused, because PCRE2 has no \P{L} that excludes the
  // letters of newer Unicode versions.
  void put_set(std::string_view set, bool negated) {
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
      out_ += "\\x0b";
    } else if (c == 'u' || c == 'x') {
      return code_point(c);
    } else if (c == 'r' || c == 'n' || c == 't' || c == 'f' || c == 'a' || c == 'e' ||
               std::isalnum(static_cast<unsigned char>(c)) == 0) {
      return copy(2);
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
    out_ += fmt::format("\\x{{{}}}", digits);
    at_ = end + (begin == at_ + 3 ? 1 : 0);
  }

  void open_class() {
    if (in_class_) refuse("a [ inside a class");  // Oniguruma: begins a nested class; PCRE2: is a plain [
    in_class_ = true;
    copy(from_.substr(at_ + 1, 1) == "^" ? 2 : 1);
    if (at_ < from_.size() && from_[at_] == ']') refuse("an empty class");
  }
  void close_class() {
    in_class_ = false;
    copy(1);
  }
  void in_class(char c) {
    if (c == '&' && from_.substr(at_, 2) == "&&") refuse("&&");
    copy(1);
  }

  void outside(char c) {
    if (c == '^' || c == '$') refuse(std::string(1, c));  // Oniguruma: matches at a line's ends; PCRE2: at the text's
    if (c == '(' && from_.substr(at_, 2) == "(*") refuse("(*");
    if (c == '(' && from_.substr(at_, 2) == "(?") {
      for (const std::string_view group : {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!", "(?i:"})
        if (from_.substr(at_).starts_with(group)) return copy(group.size());
      // Elsewhere in a pattern Oniguruma and PCRE2 end the scope of (?i) at different places.
      if (at_ == 0 && from_.starts_with("(?i)")) return copy(4);
      refuse("a group that is none of (?: (?= (?! (?> (?<= (?<! (?i:");
    }
    // {,n} is refused because PCRE2 reads it as plain text, and {n}? because it means "n or none" in Oniguruma but n in
    // PCRE2.
    if (c == '{' && from_.substr(at_, 2) == "{,") refuse("{,");
    if (c == '}' && from_.substr(at_, 2) == "}?" && from_.substr(0, at_).find_last_of("{,") != std::string_view::npos &&
        from_[from_.substr(0, at_).find_last_of("{,")] == '{')
      refuse("}?");
    // {n,m}+ is refused: it is a repeated repetition in Oniguruma, but possessive in PCRE2.
    if (c == '}' && from_.substr(at_, 2) == "}+") refuse("}+");
    copy(1);
  }

  std::string_view from_;
  const std::string& where_;
  size_t at_ = 0;
  bool in_class_ = false;
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
  uint32_t behind = 0;
  pcre2_pattern_info(code_of(code_), PCRE2_INFO_MAXLOOKBEHIND, &behind);
  looks_behind_ = behind > 0;
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
  // Limit on the number of PCRE2's match steps: proportional to the remaining text, several times what a sound pattern
  // needs. A pattern with exponential backtracking fails here instead of running for hours. The limit applies to each
  // match, so a pattern with a long lookahead at each position still takes quadratic time.
  constexpr size_t kLeastSteps = 20'000, kStepsPerByte = 4;
  const size_t steps = kLeastSteps + kStepsPerByte * (text.size() - from);
  pcre2_set_match_limit(context, static_cast<uint32_t>(std::min<size_t>(steps, UINT32_MAX)));
  const uint32_t options = PCRE2_NO_UTF_CHECK | (more_follows ? PCRE2_PARTIAL_HARD : 0);
  int rc = compiled_ ? pcre2_jit_match(code_of(code_), subject, text.size(), from, options, data, context)
                     : pcre2_match(code_of(code_), subject, text.size(), from, options, data, context);
  std::shared_ptr<pcre2_match_data> on_heap;  // freed after this match, because PCRE2 would not release its memory
  if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {     // the stack was too small: each iteration of a group uses some of it
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
