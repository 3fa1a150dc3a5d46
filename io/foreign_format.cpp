#include "io/foreign_format.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iterator>

#include "engine/process/text.h"

namespace triad {

namespace {

using namespace std::literals;

struct Format {
  std::string_view magic, what;
};
constexpr Format kPacked[] = {
    {"\xfd"
     "7zXZ"sv,
     "xz"sv},
    {"]\0\0\x80\0\xff\xff\xff\xff"sv, "lzma"sv},
    {"PK\x03\x04"sv, "zip (as torch.save, numpy.savez and archives write it)"sv},
    {"PK\x05\x06"sv, "zip (an empty archive)"sv},
    {"\x04\x22\x4d\x18"sv, "lz4"sv},
    {"\xff\x06\0\0sNaPpY"sv, "snappy"sv},
    {"\x1f\x9d\x90"sv, "compress (.Z)"sv},
    {"7z\xbc\xaf\x27\x1c"sv, "7z"sv},
    {"Rar!\x1a\x07"sv, "rar"sv},
    {"LZIP\x01"sv, "lzip"sv},
};
constexpr std::string_view kParquet = "PAR1"sv;
constexpr Format kForeign[] = {
    {"ARROW1\0\0"sv, "an Arrow file"sv},
    {"\xff\xfe\0\0"sv, "UTF-32 text (UTF-8 is read)"sv},
    {"\0\0\xfe\xff"sv, "UTF-32 text (UTF-8 is read)"sv},
    {"\xff\xfe"sv, "UTF-16 text (UTF-8 is read)"sv},
    {"\xfe\xff"sv, "UTF-16 text (UTF-8 is read)"sv},
    {"\x89PNG\r\n"sv, "a PNG image"sv},
    {"\xff\xd8\xff"sv, "a JPEG image"sv},
    {"\x93NUMPY"sv, "a NumPy array (.npy)"sv},
    {"SQLite format 3\0"sv, "an SQLite database"sv},
    {"\x89HDF\r\n"sv, "an HDF5 file"sv},
    {"\x7f"
     "ELF"sv,
     "an ELF program"sv},
    {"Obj\x01"sv, "an Avro file"sv},
    {"MMIDIDX\0"sv, "an index of Megatron-LM"sv},
};
// Beginnings of git-lfs pointers, with the line feed of Unix or Windows after them.
constexpr std::string_view kPointers[] = {"version https://git-lfs.github.com/spec/v1"sv,
                                          "version https://hawser.github.com/spec/v1"sv};
// Letters that a text may begin with, too: what follows decides.
constexpr Format kLetters[] = {
    {"GIF87a"sv, "a GIF image"sv},
    {"GIF89a"sv, "a GIF image"sv},
    {"GGUF"sv, "GGUF weights"sv},
    {"ORC"sv, "an ORC file"sv},
};

template <size_t N>
std::string_view find_magic(const Format (&formats)[N], std::string_view head) {
  for (const Format& format : formats)
    if (head.starts_with(format.magic)) return format.what;
  return {};
}

// Whether bytes hold what no text does: control characters, or no UTF-8.
bool has_binary(std::string_view bytes) {
  const auto is_control = [](unsigned char c) { return c < 0x20 && (c < 0x08 || c > 0x0d) && c != 0x1b; };
  const size_t valid = utf8_prefix(bytes);
  return std::any_of(bytes.begin(), bytes.end(), is_control) ||
         (valid < bytes.size() && !is_cut_character(bytes.substr(valid)));
}

bool is_lfs_pointer(std::string_view head) {
  return std::any_of(std::begin(kPointers), std::end(kPointers), [&](std::string_view pointer) {
    if (!head.starts_with(pointer)) return false;
    const std::string_view rest = head.substr(pointer.size());
    return rest.starts_with("\noid "sv) || rest.starts_with("\r\noid "sv);
  });
}

// A PDF document: its version, then a comment or the first object.
bool is_pdf(std::string_view head) {
  constexpr size_t kVersion = 8;  // length of "%PDF-1.7"
  if (!head.starts_with("%PDF-"sv) || head.size() < kVersion) return false;
  const std::string_view rest = head.substr(kVersion);
  const size_t next = rest.find_first_not_of(" \r\n"sv);
  if (next == 0 || next == rest.npos || rest.substr(0, next).find_first_of("\r\n"sv) == rest.npos) return false;
  return rest[next] == '%' || (rest[next] >= '0' && rest[next] <= '9' && rest.find(" obj"sv) != rest.npos);
}

// A tar header: its checksum sums its 512 bytes, in which the checksum's own 8 bytes count as blanks.
bool is_tar(std::string_view head) {
  constexpr size_t kHeader = 512, kSum = 148, kSumBytes = 8;
  if (head.size() < kHeader || head[0] == '\0') return false;
  int64_t sum = 0, stored = 0;
  bool digits = false;
  for (size_t i = 0; i < kHeader; ++i)
    sum += i >= kSum && i < kSum + kSumBytes ? ' ' : static_cast<unsigned char>(head[i]);
  for (const char c : head.substr(kSum, kSumBytes)) {
    if (c >= '0' && c <= '7')
      stored = stored * 8 + (c - '0'), digits = true;
    else if (c != ' ' && c != '\0')
      return false;
  }
  return digits && sum == stored;
}

// A pickle with protocol 2 or later: the protocol, then an opcode with which pickles of dicts, lists, tuples, classes
// and torch.save begin.
bool is_pickle(std::string_view head) {
  if (head.size() < 3 || head[0] != '\x80' || head[1] < 2 || head[1] > 5) return false;
  return "\x95\x8a}])(cXK\x8c"sv.find(head[2]) != std::string_view::npos;
}

// An Arrow message stream, as Hugging Face's datasets write it: a continuation mark, then the message's length.
bool is_arrow_stream(std::string_view head) {
  return head.size() >= 8 && head.starts_with("\xff\xff\xff\xff"sv) && head[6] == '\0' && head[7] == '\0';
}

// A safetensors header's length is at most 100,000,000, so its upper four bytes are zero.
bool is_safetensors_head(std::string_view head) {
  return head.size() > 8 && head.substr(4, 4) == "\0\0\0\0"sv && head[8] == '{';
}

// UTF-16 without a byte-order mark, from its bytes at even or odd places: in Latin text these are mostly NUL, in other
// alphabets nearly always one of two values, which are NUL at blanks and line ends. The bytes at the other places vary.
bool is_utf16(std::string_view head) {
  const size_t units = head.size() / 2;
  if (units < 2 || (head.size() < kFormatBytes && head.size() % 2 != 0)) return false;
  size_t counts[2][256] = {};
  for (size_t i = 0; i < 2 * units; ++i) ++counts[i % 2][static_cast<unsigned char>(head[i])];
  for (const size_t parity : {0, 1}) {
    const auto& uppers = counts[parity];
    const auto& lowers = counts[1 - parity];
    const size_t nul = uppers[0];
    if (nul == 0 || lowers[0] * 8 > nul) continue;
    if (nul * 4 >= units * 3) return true;
    constexpr size_t kFewest = 16;  // spread of values says little with fewer units
    const auto top_two = [](const size_t(&values)[256]) {
      size_t sorted[256];
      std::copy(std::begin(values), std::end(values), sorted);
      std::partial_sort(std::begin(sorted), std::begin(sorted) + 2, std::end(sorted), std::greater<>());
      return sorted[0] + sorted[1];
    };
    if (units >= kFewest && top_two(uppers) * 100 >= units * 95 && top_two(lowers) * 100 < units * 60) return true;
  }
  return false;
}

// UTF-32 without a byte-order mark: every four bytes are a character.
bool is_utf32(std::string_view head) {
  constexpr size_t kUnit = 4;
  const size_t units = head.size() / kUnit;
  if (units < 2 || (head.size() < kFormatBytes && head.size() % kUnit != 0)) return false;
  for (const bool big_endian : {false, true}) {
    size_t characters = 0;
    for (size_t i = 0; i < units; ++i) {
      uint32_t point = 0;
      for (size_t j = 0; j < kUnit; ++j) {
        const size_t byte = big_endian ? kUnit - 1 - j : j;
        point |= uint32_t{static_cast<unsigned char>(head[kUnit * i + byte])} << (8 * j);
      }
      constexpr uint32_t kLast = 0x10ffff, kFirstSurrogate = 0xd800, kLastSurrogate = 0xdfff;
      characters += point > 0 && point <= kLast && (point < kFirstSurrogate || point > kLastSurrogate) ? 1 : 0;
    }
    if (characters == units) return true;
  }
  return false;
}

}  // namespace

std::string_view packed_format(std::string_view head) {
  if (is_lfs_pointer(head)) return "a git-lfs pointer (git lfs pull fetches the file itself)";
  // bzip2: three letters that a text may begin with, too, a digit, and the first bytes of a block or the end.
  if (head.starts_with("BZh") && (head.substr(4).starts_with("1AY") || head.substr(4).starts_with("\x17rE")))
    return "bzip2";
  if (head.starts_with(kParquet) && has_binary(head.substr(kParquet.size())))
    return "parquet (tools/fineweb.py reads it)";
  return find_magic(kPacked, head);
}

std::string_view foreign_format(std::string_view head) {
  if (const std::string_view packed = packed_format(head); !packed.empty()) return packed;
  if (const std::string_view found = find_magic(kForeign, head); !found.empty()) return found;
  if (const std::string_view found = find_magic(kLetters, head); !found.empty() && has_binary(head)) return found;
  if (is_pdf(head)) return "a PDF document";
  if (is_tar(head)) return "a tar archive";
  if (is_pickle(head)) return "a pickle of Python (as torch.save wrote it)";
  if (is_arrow_stream(head)) return "an Arrow stream (as Hugging Face's datasets write it)";
  if (is_safetensors_head(head)) return "a safetensors file";
  if (is_utf32(head)) return "UTF-32 text without a byte-order mark (UTF-8 is read)";
  if (is_utf16(head)) return "UTF-16 text without a byte-order mark (UTF-8 is read)";
  return {};
}

}  // namespace triad
