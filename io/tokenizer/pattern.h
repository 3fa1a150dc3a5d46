// The regular expressions of a tokenizer.json: written for Oniguruma, which the `tokenizers` library runs, translated
// for PCRE2, compiled to machine code. What the two do not understand alike is refused, not guessed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace triad {

class Pattern {
 public:
  // where: what the messages call it.
  Pattern(const std::string& oniguruma, const std::string& where);

  // What one thread needs to match.
  class Matcher {
   public:
    explicit Matcher(const Pattern&);

   private:
    friend class Pattern;
    std::shared_ptr<void> data_, stack_, context_;  // in the order of their making
  };

  enum class Found { none, match, cut };
  struct Span {
    size_t begin = 0, end = 0;
  };
  // The first match in the UTF-8 text at or after `from`. goes_on: the text has more that is not here; a match that
  // could depend on it is `cut`, and span.begin where it would begin.
  Found find(Matcher&, std::string_view text, size_t from, bool goes_on, Span& span) const;
  // A match may depend on what stands before it.
  bool looks_behind() const { return looks_behind_; }

 private:
  std::string where_;
  std::shared_ptr<void> code_;
  bool compiled_ = false, looks_behind_ = false;
};

// What Pattern hands to PCRE2.
std::string translate_pattern(const std::string& oniguruma, const std::string& where);
// A pattern that matches text alone.
std::string literal_pattern(std::string_view text);

}  // namespace triad
