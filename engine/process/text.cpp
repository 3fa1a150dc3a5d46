#include "engine/process/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace triad {

namespace {

// Length of a UTF-8 character in bytes, from its first byte; 0 if no character begins with this byte.
int length_by_lead(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xc2) return 0;  // a continuation byte, or the first byte of an overlong form
  return lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
}

// Whether `byte` may be byte number i of a UTF-8 character whose first byte is `lead`. The rule for byte 1 excludes
// overlong forms, surrogates and code points above U+10FFFF.
bool continues(uint8_t lead, int i, uint8_t byte) {
  uint8_t least = 0x80, most = 0xbf;
  if (i == 1) {
    if (lead == 0xe0) least = 0xa0;
    if (lead == 0xed) most = 0x9f;
    if (lead == 0xf0) least = 0x90;
    if (lead == 0xf4) most = 0x8f;
  }
  return byte >= least && byte <= most;
}

// Whether a character could disguise a line of text: direction marks and overrides, line and paragraph separators.
bool disguises(uint32_t point) {
  return point == 0x61c || (point >= 0x200e && point <= 0x200f) || (point >= 0x2028 && point <= 0x202e) ||
         (point >= 0x2066 && point <= 0x2069);
}

// Removes the first character from `text` and returns its printable form.
std::string take_printable(std::string_view& text) {
  const size_t whole = utf8_prefix(text.substr(0, 4)) > 0 ? character_bytes(text, 0) : 0;
  const uint32_t point = whole > 0 ? point_at(text, 0) : 0;
  const bool shows = whole > 0 && point >= 0x20 && !(point >= 0x7f && point < 0xa0) && !disguises(point);
  std::string piece(text.substr(0, std::max<size_t>(1, whole)));
  if (!shows) piece = fmt::format("\\x{:02x}", static_cast<uint8_t>(text[0]));
  text.remove_prefix(shows ? whole : 1);
  return piece;
}

}  // namespace

size_t utf8_prefix(std::string_view text) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  const size_t size = text.size();
  size_t at = 0;
  while (at < size) {
    uint64_t eight = 0;
    while (at + 8 <= size) {  // skips ASCII, 8 bytes at a time
      std::memcpy(&eight, bytes + at, 8);
      if ((eight & 0x8080808080808080) != 0) break;
      at += 8;
    }
    if (at == size) break;
    const int length = length_by_lead(bytes[at]);
    if (length == 0 || at + static_cast<size_t>(length) > size) return at;
    for (int i = 1; i < length; ++i)
      if (!continues(bytes[at], i, bytes[at + static_cast<size_t>(i)])) return at;
    at += static_cast<size_t>(length);
  }
  return at;
}

bool is_cut_character(std::string_view text) {
  if (text.empty()) return false;
  const auto lead = static_cast<uint8_t>(text[0]);
  if (length_by_lead(lead) <= static_cast<int>(text.size())) return false;
  for (size_t i = 1; i < text.size(); ++i)
    if (!continues(lead, static_cast<int>(i), static_cast<uint8_t>(text[i]))) return false;
  return true;
}

size_t character_bytes(std::string_view text, size_t at) {
  return static_cast<size_t>(length_by_lead(static_cast<uint8_t>(text[at])));
}

uint32_t point_at(std::string_view text, size_t at) {
  const size_t bytes = character_bytes(text, at);
  const auto lead = static_cast<uint8_t>(text[at]);
  if (bytes == 1) return lead;
  uint32_t point = lead & (0x7f >> bytes);
  for (size_t i = 1; i < bytes; ++i) point = point << 6 | (static_cast<uint8_t>(text[at + i]) & 0x3f);
  return point;
}

size_t previous_character(std::string_view text, size_t at) {
  do --at;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xc0) == 0x80);
  return at;
}

std::string shortened(std::string_view text, size_t bytes) {
  std::string out;
  while (!text.empty()) {
    const std::string piece = take_printable(text);
    if (out.size() + piece.size() > bytes) return out + "...";
    out += piece;
  }
  return out;
}

std::string printable(std::string_view text) { return shortened(text, std::string::npos); }

std::string printable_lines(std::string_view text) {
  std::string out;
  for (size_t end; (end = text.find('\n')) != std::string_view::npos; text.remove_prefix(end + 1))
    out += printable(text.substr(0, end)) + "\n";
  return out + printable(text);
}

std::string shell_word(const std::string& text) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./=:@%+,-";
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string::npos) return text;
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'')
      out += "'\\''";
    else
      out += c;
  }
  return out + "'";
}

}  // namespace triad
