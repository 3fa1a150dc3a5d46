#include "io/tokenizer/unicode.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <set>
#include <utility>

#include "engine/check.h"
#include "engine/process/text.h"

namespace triad {

namespace {

bool is_own_character(int byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
}

constexpr int kOtherBytes = 256 - 188;

struct Addition {
  uint32_t first, last;
  const char* category;
};
// The characters in Unicode 16, which the `tokenizers` library uses, that are missing in Unicode 14, which PCRE2 10.42
// uses (Debian 12, Ubuntu 24.04). The list was made by comparing both for every character. Newer PCRE2 versions have
// them already.
constexpr Addition kAdditions[] = {
    {0x897, 0x897, "Mn"},     {0xcf3, 0xcf3, "Mc"},     {0xece, 0xece, "Mn"},     {0x1b4e, 0x1b4f, "Po"},
    {0x1b7f, 0x1b7f, "Po"},   {0x1c89, 0x1c89, "Lu"},   {0x1c8a, 0x1c8a, "Ll"},   {0x2427, 0x2429, "So"},
    {0x2ffc, 0x2fff, "So"},   {0x31e4, 0x31e5, "So"},   {0x31ef, 0x31ef, "So"},   {0xa7cb, 0xa7cc, "Lu"},
    {0xa7cd, 0xa7cd, "Ll"},   {0xa7da, 0xa7da, "Lu"},   {0xa7db, 0xa7db, "Ll"},   {0xa7dc, 0xa7dc, "Lu"},
    {0x105c0, 0x105f3, "Lo"}, {0x10d40, 0x10d49, "Nd"}, {0x10d4a, 0x10d4d, "Lo"}, {0x10d4e, 0x10d4e, "Lm"},
    {0x10d4f, 0x10d4f, "Lo"}, {0x10d50, 0x10d65, "Lu"}, {0x10d69, 0x10d6d, "Mn"}, {0x10d6e, 0x10d6e, "Pd"},
    {0x10d6f, 0x10d6f, "Lm"}, {0x10d70, 0x10d85, "Ll"}, {0x10d8e, 0x10d8f, "Sm"}, {0x10ec2, 0x10ec4, "Lo"},
    {0x10efc, 0x10eff, "Mn"}, {0x1123f, 0x11240, "Lo"}, {0x11241, 0x11241, "Mn"}, {0x11380, 0x11389, "Lo"},
    {0x1138b, 0x1138b, "Lo"}, {0x1138e, 0x1138e, "Lo"}, {0x11390, 0x113b5, "Lo"}, {0x113b7, 0x113b7, "Lo"},
    {0x113b8, 0x113ba, "Mc"}, {0x113bb, 0x113c0, "Mn"}, {0x113c2, 0x113c2, "Mc"}, {0x113c5, 0x113c5, "Mc"},
    {0x113c7, 0x113ca, "Mc"}, {0x113cc, 0x113cd, "Mc"}, {0x113ce, 0x113ce, "Mn"}, {0x113cf, 0x113cf, "Mc"},
    {0x113d0, 0x113d0, "Mn"}, {0x113d1, 0x113d1, "Lo"}, {0x113d2, 0x113d2, "Mn"}, {0x113d3, 0x113d3, "Lo"},
    {0x113d4, 0x113d5, "Po"}, {0x113d7, 0x113d8, "Po"}, {0x113e1, 0x113e2, "Mn"}, {0x116d0, 0x116e3, "Nd"},
    {0x1171e, 0x1171e, "Mc"}, {0x11b00, 0x11b09, "Po"}, {0x11bc0, 0x11be0, "Lo"}, {0x11be1, 0x11be1, "Po"},
    {0x11bf0, 0x11bf9, "Nd"}, {0x11f00, 0x11f01, "Mn"}, {0x11f02, 0x11f02, "Lo"}, {0x11f03, 0x11f03, "Mc"},
    {0x11f04, 0x11f10, "Lo"}, {0x11f12, 0x11f33, "Lo"}, {0x11f34, 0x11f35, "Mc"}, {0x11f36, 0x11f3a, "Mn"},
    {0x11f3e, 0x11f3f, "Mc"}, {0x11f40, 0x11f40, "Mn"}, {0x11f41, 0x11f41, "Mc"}, {0x11f42, 0x11f42, "Mn"},
    {0x11f43, 0x11f4f, "Po"}, {0x11f50, 0x11f59, "Nd"}, {0x11f5a, 0x11f5a, "Mn"}, {0x1342f, 0x1342f, "Lo"},
    {0x13440, 0x13440, "Mn"}, {0x13441, 0x13446, "Lo"}, {0x13447, 0x13455, "Mn"}, {0x13460, 0x143fa, "Lo"},
    {0x16100, 0x1611d, "Lo"}, {0x1611e, 0x16129, "Mn"}, {0x1612a, 0x1612c, "Mc"}, {0x1612d, 0x1612f, "Mn"},
    {0x16130, 0x16139, "Nd"}, {0x16d40, 0x16d42, "Lm"}, {0x16d43, 0x16d6a, "Lo"}, {0x16d6b, 0x16d6c, "Lm"},
    {0x16d6d, 0x16d6f, "Po"}, {0x16d70, 0x16d79, "Nd"}, {0x18cff, 0x18cff, "Lo"}, {0x1b132, 0x1b132, "Lo"},
    {0x1b155, 0x1b155, "Lo"}, {0x1cc00, 0x1ccef, "So"}, {0x1ccf0, 0x1ccf9, "Nd"}, {0x1cd00, 0x1ceb3, "So"},
    {0x1d2c0, 0x1d2d3, "No"}, {0x1df25, 0x1df2a, "Ll"}, {0x1e030, 0x1e06d, "Lm"}, {0x1e08f, 0x1e08f, "Mn"},
    {0x1e4d0, 0x1e4ea, "Lo"}, {0x1e4eb, 0x1e4eb, "Lm"}, {0x1e4ec, 0x1e4ef, "Mn"}, {0x1e4f0, 0x1e4f9, "Nd"},
    {0x1e5d0, 0x1e5ed, "Lo"}, {0x1e5ee, 0x1e5ef, "Mn"}, {0x1e5f0, 0x1e5f0, "Lo"}, {0x1e5f1, 0x1e5fa, "Nd"},
    {0x1e5ff, 0x1e5ff, "Po"}, {0x1f6dc, 0x1f6dc, "So"}, {0x1f774, 0x1f776, "So"}, {0x1f77b, 0x1f77f, "So"},
    {0x1f7d9, 0x1f7d9, "So"}, {0x1f8b2, 0x1f8bb, "So"}, {0x1f8c0, 0x1f8c1, "So"}, {0x1fa75, 0x1fa77, "So"},
    {0x1fa87, 0x1fa89, "So"}, {0x1fa8f, 0x1fa8f, "So"}, {0x1faad, 0x1faaf, "So"}, {0x1fabb, 0x1fabf, "So"},
    {0x1fac6, 0x1fac6, "So"}, {0x1face, 0x1facf, "So"}, {0x1fada, 0x1fadc, "So"}, {0x1fadf, 0x1fadf, "So"},
    {0x1fae8, 0x1fae9, "So"}, {0x1faf7, 0x1faf8, "So"}, {0x1fbcb, 0x1fbef, "So"}, {0x2b739, 0x2b739, "Lo"},
    {0x2ebf0, 0x2ee5d, "Lo"}, {0x31350, 0x323af, "Lo"},
};

// The category for one of these characters; "" for any other.
std::string_view category_of_addition(uint32_t point) {
  const auto* found = std::upper_bound(std::begin(kAdditions), std::end(kAdditions), point,
                                       [](uint32_t p, const Addition& a) { return p < a.first; });
  if (found == std::begin(kAdditions) || point > std::prev(found)->last) return "";
  return std::prev(found)->category;
}

// Characters that the `tokenizers` library leaves unchanged, because it normalizes by Unicode 9, although they have a
// decomposition or a combining class in later versions. The list was made by comparing both for every character.
constexpr std::pair<uint32_t, uint32_t> kNotNormalized[] = {
    {0x7fd, 0x7fd},     {0x898, 0x89f},     {0x8ca, 0x8d3},     {0x9fe, 0x9fe},     {0xc3c, 0xc3c},
    {0xd3b, 0xd3c},     {0xeba, 0xeba},     {0x1715, 0x1715},   {0x1abf, 0x1ace},   {0x1df6, 0x1dfa},
    {0x32ff, 0x32ff},   {0xa7f2, 0xa7f4},   {0xa82c, 0xa82c},   {0xab69, 0xab69},   {0x10781, 0x10785},
    {0x10787, 0x107b0}, {0x107b2, 0x107ba}, {0x10d24, 0x10d27}, {0x10eab, 0x10eac}, {0x10efd, 0x10eff},
    {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070}, {0x1133b, 0x1133b}, {0x1145e, 0x1145e},
    {0x11839, 0x1183a}, {0x11938, 0x11938}, {0x1193d, 0x1193e}, {0x11943, 0x11943}, {0x119e0, 0x119e0},
    {0x11a34, 0x11a34}, {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d42}, {0x11d44, 0x11d45},
    {0x11d97, 0x11d97}, {0x11f41, 0x11f42}, {0x16ff0, 0x16ff1}, {0x1e030, 0x1e06d}, {0x1e08f, 0x1e08f},
    {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef}, {0x1f16c, 0x1f16c},
    {0x1fbf0, 0x1fbf9},
};

bool is_normalized_by_none(uint32_t point) {
  if (point < kNotNormalized[0].first) return false;
  const auto* range = std::upper_bound(std::begin(kNotNormalized), std::end(kNotNormalized), point,
                                       [](uint32_t p, const auto& r) { return p < r.first; });
  return point <= std::prev(range)->second;
}

// Appends the normal form of a text without characters from kNotNormalized.
void append_normalized(int options, std::string_view text, std::string& out) {
  if (text.empty()) return;
  utf8proc_uint8_t* raw = nullptr;
  const utf8proc_ssize_t n =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &raw, static_cast<utf8proc_option_t>(options));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owned(raw, &std::free);
  TRIAD_CHECK(n >= 0, "{} bytes of text cannot be normalized: {}", text.size(), utf8proc_errmsg(n));
  out.append(reinterpret_cast<const char*>(raw), static_cast<size_t>(n));
}

}  // namespace

size_t invalid_prefix(std::string_view text) {
  constexpr size_t kLongest = 4;  // bytes of a character
  size_t bytes = 0;
  while (bytes < text.size() && utf8_prefix(text.substr(bytes, kLongest)) == 0) ++bytes;
  return bytes;
}

bool is_white_space(uint32_t c) {
  return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
         c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

bool is_python_space(uint32_t c) { return is_white_space(c) || (c >= 0x1c && c <= 0x1f); }

bool is_printable(uint32_t c) {
  if (c == ' ') return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

size_t length_without_trailing_space(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    const size_t at = previous_character(text, end);
    if (!is_python_space(point_at(text, at))) break;
    end = at;
  }
  return end;
}

std::string normalize(NormalForm form, std::string_view text) {
  int options = UTF8PROC_STABLE;
  options |= form == NormalForm::nfc || form == NormalForm::nfkc ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (form == NormalForm::nfkc || form == NormalForm::nfkd) options |= UTF8PROC_COMPAT;
  std::string out;
  size_t done = 0;
  const auto keep = [&](size_t begin, size_t end) {  // copies the bytes [begin, end) unchanged
    append_normalized(options, text.substr(done, begin - done), out);
    out += text.substr(begin, end - begin);
    done = end;
  };
  for (size_t at = 0; at < text.size();) {
    const size_t bytes = character_bytes(text, at);
    if (bytes == 1) {  // ASCII is normalized already, except for its last character, which a combining mark may follow
      const size_t begin = at;
      while (at < text.size() && static_cast<uint8_t>(text[at]) < 0x80) ++at;
      if (at - begin > 1) keep(begin, at - 1);
      continue;
    }
    if (is_normalized_by_none(point_at(text, at))) keep(at, at + bytes);
    at += bytes;
  }
  append_normalized(options, text.substr(done), out);
  return out;
}

std::string spell_byte(uint8_t byte) {
  int point = byte;
  if (!is_own_character(byte)) {
    point = 256;
    for (int b = 0; b < byte; ++b) point += !is_own_character(b);
  }
  if (point < 0x80) return {static_cast<char>(point)};
  return {static_cast<char>(0xc0 | point >> 6), static_cast<char>(0x80 | (point & 0x3f))};
}

std::optional<std::string> unspell_bytes(std::string_view text) {
  static const std::array<int16_t, 256 + kOtherBytes> kByteOf = [] {
    std::array<int16_t, 256 + kOtherBytes> byte_of;
    byte_of.fill(-1);
    for (int byte = 0, other = 256; byte < 256; ++byte)
      byte_of[static_cast<size_t>(is_own_character(byte) ? byte : other++)] = static_cast<int16_t>(byte);
    return byte_of;
  }();
  std::string bytes;
  for (size_t i = 0; i < text.size(); ++i) {
    size_t point = static_cast<uint8_t>(text[i]);
    if (point >= 0x80) {
      if (character_bytes(text, i) != 2 || i + 1 == text.size()) return std::nullopt;
      point = (point & 0x1f) << 6 | (static_cast<uint8_t>(text[++i]) & 0x3f);
    }
    if (point >= kByteOf.size() || kByteOf[point] < 0) return std::nullopt;
    bytes += static_cast<char>(kByteOf[point]);
  }
  return bytes;
}

std::string new_characters(std::string_view category) {
  std::string ranges;
  for (const Addition& a : kAdditions)
    if (std::string_view(a.category).starts_with(category))
      ranges += fmt::format("\\x{{{:x}}}-\\x{{{:x}}}", a.first, a.last);
  return ranges;
}

std::vector<uint32_t> case_fold(uint32_t point) {
  std::array<utf8proc_int32_t, 4> folded{};
  int boundary = 0;
  const utf8proc_ssize_t n = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(point), folded.data(), folded.size(),
                                                     UTF8PROC_CASEFOLD, &boundary);
  if (n < 1) return {point};
  return {folded.begin(), folded.begin() + n};
}

bool begins_case_fold(uint32_t first, uint32_t second) {
  static const std::set<std::pair<uint32_t, uint32_t>> kBeginnings = [] {
    constexpr uint32_t kPlanes = 0x20000;  // no later character has a case
    std::set<std::pair<uint32_t, uint32_t>> beginnings;
    for (uint32_t point = 0x80; point < kPlanes; ++point)
      if (const std::vector<uint32_t> folded = case_fold(point); folded.size() > 1)
        beginnings.emplace(folded[0], folded[1]);
    return beginnings;
  }();
  return kBeginnings.contains({first, second});
}

bool is_word(uint32_t point) {
  constexpr std::string_view kCategories[] = {"L", "M", "Nd", "Nl", "Pc"};
  std::string_view category = category_of_addition(point);
  if (category.empty()) category = utf8proc_category_string(static_cast<utf8proc_int32_t>(point));
  for (const std::string_view word : kCategories)
    if (category.starts_with(word)) return true;
  // The remaining word characters: join controls, and circled letters, which are symbols that Unicode counts as
  // alphabetic.
  return point == 0x200c || point == 0x200d || (point >= 0x24b6 && point <= 0x24e9) ||
         (point >= 0x1f130 && point <= 0x1f149) || (point >= 0x1f150 && point <= 0x1f169) ||
         (point >= 0x1f170 && point <= 0x1f189);
}

bool is_newly_cased(uint32_t point) {
  // Two small letters that had been without a capital.
  if (point == 0x19b || point == 0x264) return true;
  const std::string_view category = category_of_addition(point);
  return category == "Lu" || category == "Ll";
}

}  // namespace triad
