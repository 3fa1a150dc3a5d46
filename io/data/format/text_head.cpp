#include "io/data/format/text_head.h"

#include <algorithm>

#include "io/data/record.h"

namespace triad {

namespace {
constexpr size_t kLongestBlank = 3;  // bytes of a blank character
}

size_t blank_bytes(std::string_view text, size_t at) {
  if (at >= text.size()) return 0;
  size_t bytes = 1;
  while (bytes < kLongestBlank && at + bytes < text.size() && (text[at + bytes] & 0xc0) == 0x80) ++bytes;
  return is_blank_line(text.substr(at, bytes)) ? bytes : 0;
}

bool TextHead::has(size_t i) {
  if (i >= text_.size()) grow(i + 1);
  return i < text_.size();
}

std::string_view TextHead::up_to(size_t bytes) {
  if (bytes > text_.size()) grow(bytes);
  return text_.substr(0, bytes);
}

size_t TextHead::skip_blanks(size_t i) {
  while (has(i)) {
    has(i + kLongestBlank);
    const size_t bytes = blank_bytes(text_, i);
    if (bytes == 0) break;
    i += bytes;
  }
  return std::min(i, text_.size());
}

size_t TextHead::line_end(size_t i) {
  while (has(i) && text_[i] != '\n') ++i;
  return std::min(i, text_.size());
}

void TextHead::grow(size_t bytes) {
  if (ended_ || limited_) return;
  const size_t wanted = std::max(bytes, text_.size() * 2);
  limited_ = wanted > kMostBytes;
  text_ = look_(std::min(wanted, kMostBytes));
  ended_ = text_.size() < std::min(wanted, kMostBytes);
}

}  // namespace triad
