#include "io/foreign_format.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iterator>

namespace triad {

namespace {

using namespace std::literals;

struct Format {
  std::string_view magic, what;
};
constexpr Format kPacked[] = {
    {"version https://git-lfs.github.com/spec/v1\noid "sv,
     "a git-lfs pointer (git lfs pull fetches the file itself)"sv},
    {"version https://hawser.github.com/spec/"sv, "a git-lfs pointer (git lfs pull fetches the file itself)"sv},
    {"\xfd"
     "7zXZ"sv,
     "xz"sv},
    {"]\0\0\x80\0\xff\xff\xff\xff"sv, "lzma"sv},
    {"PK\x03\x04"sv, "zip (as torch.save, numpy.savez and archives write it)"sv},
    {"PK\x05\x06"sv, "zip (an empty archive)"sv},
    {"PAR1"sv, "parquet (tools/fineweb.py reads it)"sv},
    {"\x04\x22\x4d\x18"sv, "lz4"sv},
    {"\xff\x06\0\0sNaPpY"sv, "snappy"sv},
    {"\x1f\x9d\x90"sv, "compress (.Z)"sv},
    {"7z\xbc\xaf\x27\x1c"sv, "7z"sv},
    {"Rar!\x1a\x07"sv, "rar"sv},
};
constexpr Format kForeign[] = {
    {"ARROW1"sv, "an Arrow file"sv},
    {"\xff\xfe\0\0"sv, "UTF-32 text (UTF-8 is read)"sv},
    {"\0\0\xfe\xff"sv, "UTF-32 text (UTF-8 is read)"sv},
    {"\xff\xfe"sv, "UTF-16 text (UTF-8 is read)"sv},
    {"\xfe\xff"sv, "UTF-16 text (UTF-8 is read)"sv},
    {"%PDF-"sv, "a PDF document"sv},
    {"\x89PNG\r\n"sv, "a PNG image"sv},
    {"\xff\xd8\xff"sv, "a JPEG image"sv},
    {"GIF8"sv, "a GIF image"sv},
    {"\x93NUMPY"sv, "a NumPy array (.npy)"sv},
    {"SQLite format 3\0"sv, "an SQLite database"sv},
    {"\x89HDF\r\n"sv, "an HDF5 file"sv},
    {"\x7f"
     "ELF"sv,
     "an ELF program"sv},
    {"GGUF"sv, "GGUF weights"sv},
    {"Obj\x01"sv, "an Avro file"sv},
    {"ORC\x0a"sv, "an ORC file"sv},
    {"MMIDIDX\0"sv, "an index of Megatron-LM"sv},
};

template <size_t N>
std::string_view find_magic(const Format (&formats)[N], std::string_view head) {
  for (const Format& format : formats)
    if (head.starts_with(format.magic)) return format.what;
  return {};
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

}  // namespace

std::string_view packed_format(std::string_view head) {
  // bzip2: three letters that a text may begin with, too, a digit, and the first bytes of a block or the end.
  if (head.starts_with("BZh") && (head.substr(4).starts_with("1AY") || head.substr(4).starts_with("\x17rE")))
    return "bzip2";
  return find_magic(kPacked, head);
}

std::string_view foreign_format(std::string_view head) {
  if (const std::string_view packed = packed_format(head); !packed.empty()) return packed;
  if (const std::string_view found = find_magic(kForeign, head); !found.empty()) return found;
  if (is_tar(head)) return "a tar archive";
  if (is_pickle(head)) return "a pickle of Python (as torch.save wrote it)";
  if (is_arrow_stream(head)) return "an Arrow stream (as Hugging Face's datasets write it)";
  if (is_safetensors_head(head)) return "a safetensors file";
  if (is_utf16(head)) return "UTF-16 text without a byte-order mark (UTF-8 is read)";
  return {};
}

}  // namespace triad
