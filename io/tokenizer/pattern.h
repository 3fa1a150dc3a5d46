// The regular expressions in a tokenizer.json. They are written for Oniguruma, which the `tokenizers` library uses.
// Here they are translated to PCRE2 and compiled to machine code. A construct that means different things in the two is
// refused.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace triad {

class Pattern {
 public:
  // oniguruma: the pattern. where: names the tokenizer.json entry that holds it, for error messages.
  Pattern(const std::string& oniguruma, const std::string& where);

  // The memory that matching needs, for one thread.
  class Matcher {
   public:
    explicit Matcher(const Pattern&);

   private:
    friend class Pattern;
    std::shared_ptr<void> data_, stack_, context_;  // declared in construction order
  };

  enum class Found { none, match, cut };
  struct Span {
    size_t begin = 0, end = 0;
  };
  // Finds the first match in the UTF-8 text at or after `from`. more_follows: more text follows after `text`. A match
  // that might change with that text returns `cut`, with its beginning in span.begin.
  Found find(Matcher&, std::string_view text, size_t from, bool more_follows, Span& span) const;
  // Whether a match may depend on the text before it.
  bool looks_behind() const { return looks_behind_; }

 private:
  std::string where_;
  std::shared_ptr<void> code_;
  bool compiled_ = false, looks_behind_ = false;
};

// Translates a pattern from Oniguruma's syntax to PCRE2's. Throws for a construct that means different things in the
// two.
std::string translate_pattern(const std::string& oniguruma, const std::string& where);
// A pattern that matches exactly this text.
std::string literal_pattern(std::string_view text);

}  // namespace triad
