// The beginning of a text, as much of it as a decision needs.
#pragma once
#include <cstddef>
#include <functional>
#include <string_view>
#include <utility>

namespace triad {

// Number of bytes of the blank character at text[at], 0 if another one is there. Blank is what a blank line may hold
// (is_blank_line).
size_t blank_bytes(std::string_view text, size_t at);

class TextHead {
 public:
  static constexpr size_t kMostBytes = size_t{1} << 26;
  // look(bytes): as TextInput::look.
  explicit TextHead(std::function<std::string_view(size_t)> look) : look_(std::move(look)) {}

  char at(size_t i) { return has(i) ? text_[i] : '\0'; }
  bool has(size_t i);
  // The first `bytes` bytes, fewer only at the end. Views of the text are valid until more of it is read.
  std::string_view up_to(size_t bytes);
  size_t skip_blanks(size_t i);  // position of the first nonblank character from `i` on, or size()
  size_t line_end(size_t i);     // position of the line feed at `i` or after it, or size()
  size_t begin() const { return text_.starts_with("\xef\xbb\xbf") ? 3 : 0; }
  size_t size() const { return text_.size(); }
  std::string_view text() const { return text_; }
  bool limited() const { return limited_; }  // the text is longer than kMostBytes

 private:
  void grow(size_t bytes);

  std::function<std::string_view(size_t)> look_;
  std::string_view text_;
  bool ended_ = false, limited_ = false;
};

}  // namespace triad
