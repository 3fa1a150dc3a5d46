#include "io/data/shards.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "engine/check.h"
#include "io/crc32.h"
#include "io/data/data_files.h"
#include "io/foreign_format.h"

namespace triad {

namespace {

static_assert(std::endian::native == std::endian::little, "shards are read in place");

constexpr int64_t kHeaderWords = 256, kHeaderBytes = kHeaderWords * 4;

struct Format {
  TokenWidth width;
  int32_t magic, version;
};
constexpr std::array<Format, 2> kFormats = {Format{TokenWidth::u16, 20240520, 1}, Format{TokenWidth::u32, 20240801, 7}};
constexpr std::string_view kLlmqMagic = "BIN.TOK\n";
constexpr int32_t kLlmqVersion = 2;

constexpr int64_t kHeadBytes = 4096;  // bytes that suffice to recognize any format

int64_t mask_bytes(int64_t tokens) { return (tokens + 7) / 8; }

// An unfinished shard's mask file.
std::string mask_path(const std::string& shard) { return shard + ".mask"; }

// The mask for the first n tokens in a shard that an earlier process began. If it also finished the shard, but its
// state is from before, the mask may be in the shard alone.
LossMask paused_mask(const std::string& path, const ShardLayout& layout, int64_t n) {
  LossMask mask;
  if (!layout.masked || n == 0) return mask;
  const std::string kept = mask_path(path);
  if (!std::filesystem::exists(kept) && std::filesystem::exists(path)) {
    mask = Shard(path).mask();
    TRIAD_CHECK(mask.size() >= n, "{}: has {} tokens, {} were written to go on with", path, mask.size(), n);
    mask.cut(n);
    return mask;
  }
  const std::string bits = read_file(kept);
  TRIAD_CHECK(static_cast<int64_t>(bits.size()) >= mask_bytes(n), "{}: ends at offset {}: the mask of {} tokens has {}",
              kept, bits.size(), n, mask_bytes(n));
  mask.append_bits(std::as_bytes(std::span(bits)), n);
  return mask;
}

int32_t header_word(std::string_view head, int64_t index) {
  int32_t word = 0;
  std::memcpy(&word, head.data() + index * 4, sizeof word);
  return word;
}

// The largest token, found by a plain loop, which the compiler vectorizes.
template <class T>
T largest(std::span<const T> tokens) {
  T most = 0;
  for (const T token : tokens) most = std::max(most, token);
  return most;
}

// Appends to `marks` the positions of `mark` in the tokens; `first` is the first token's position. Counts piece by
// piece by a plain loop, which the compiler vectorizes, because separators are rare.
template <class T>
void find_marks(std::span<const T> tokens, T mark, int64_t first, std::vector<int64_t>& marks) {
  constexpr size_t kPiece = 256;
  for (size_t begin = 0; begin < tokens.size(); begin += kPiece) {
    const auto piece = tokens.subspan(begin, std::min(kPiece, tokens.size() - begin));
    int found = 0;
    for (const T token : piece) found += token == mark;
    for (size_t i = 0; found > 0; ++i)
      if (piece[i] == mark) marks.push_back(first + static_cast<int64_t>(begin + i)), --found;
  }
}

// Whether a file is nanoGPT's; those have no header and are recognized by their names, train.bin and val.bin. Excluded
// are text, which is recognized by its bytes, and u32 tokens, whose upper halves are mostly 0.
bool is_nanogpt(const std::string& path, std::string_view head) {
  const std::string name = std::filesystem::path(path).filename().string();
  if (name != "train.bin" && name != "val.bin") return false;
  const bool text = std::all_of(head.begin(), head.end(),
                                [](char c) { return (c >= 0x20 && c < 0x7f) || c == '\n' || c == '\r' || c == '\t'; });
  size_t upper = 0, empty = 0;
  for (size_t i = 2; i + 1 < head.size(); i += 4) {
    ++upper;
    empty += head[i] == 0 && head[i + 1] == 0;
  }
  constexpr size_t kFew = 16;  // with fewer 4-byte words, zero upper halves prove nothing
  return !head.empty() && !text && packed_format(head).empty() && (upper < kFew || empty * 10 < upper * 9);
}

}  // namespace

bool is_shard_head(std::string_view head) {
  if (head.starts_with(kLlmqMagic)) return true;
  return head.size() >= 4 && std::any_of(kFormats.begin(), kFormats.end(),
                                         [&](const Format& f) { return header_word(head, 0) == f.magic; });
}

bool is_shard(const std::string& path) {
  const std::string head = InputFile(path).text(0, kHeadBytes);
  return is_shard_head(head) || is_nanogpt(path, head);
}

Shard::Shard(const std::string& path) : file_(path) {
  TRIAD_CHECK(bytes() > 0, "{}: an empty file, no token shard: expected a header of {} bytes at offset 0, found 0",
              path, kHeaderBytes);
  const std::string head = file_.text(0, kHeadBytes);
  if (head.starts_with(kLlmqMagic)) {
    read_llmq_header(head);
  } else if (!is_shard_head(head) && is_nanogpt(path, head)) {
    size_ = bytes() / static_cast<int64_t>(width_), header_bytes_ = 0;
    format_ = "nanoGPT's u16 (no header)";
  } else {
    read_llmc_header(head);
  }
  TRIAD_CHECK(size_ > 0, "{}: expected a count of one or more tokens, found {}", path, size_);
  check_length();
}

void Shard::check_length() const {
  if (!has_mask_) {
    TRIAD_CHECK(bytes() == mask_begin(), "{}: {}: its {} tokens make {} bytes, the file ends at offset {}", path(),
                bytes() < mask_begin() ? "a truncated token shard" : "bytes behind the last token", size_, mask_begin(),
                bytes());
    return;
  }
  const int64_t expected = mask_begin() + mask_bytes(size_);
  TRIAD_CHECK(
      bytes() == expected,
      "{}: {}: its {} tokens and their mask, which begins at offset {}, make {} bytes, the file ends at offset {}",
      path(), bytes() < expected ? "a truncated token shard" : "bytes behind the mask", size_, mask_begin(), expected,
      bytes());
  if (size_ % 8 == 0) return;
  uint8_t last = 0;
  file_.read(expected - 1, std::as_writable_bytes(std::span(&last, 1)));
  TRIAD_CHECK(last >> (size_ % 8) == 0,
              "{}: damaged: at offset {}, the end of the mask of {} tokens, the upper {} bits are expected to be 0, "
              "found the byte {}",
              path(), expected - 1, size_, 8 - size_ % 8, last);
}

LossMask Shard::mask() const {
  LossMask mask;
  if (!has_mask_) {
    mask.append(true, size_);
    return mask;
  }
  std::vector<std::byte> bits(static_cast<size_t>(mask_bytes(size_)));
  file_.read(mask_begin(), bits);
  mask.append_bits(bits, size_);
  return mask;
}

void Shard::need_header(std::string_view head) const {
  TRIAD_CHECK(static_cast<int64_t>(head.size()) >= kHeaderBytes,
              "{}: a truncated token shard: expected a header of {} bytes, the file ends at offset {}", path(),
              kHeaderBytes, bytes());
}

void Shard::read_llmc_header(std::string_view head) {
  const int32_t magic = head.size() >= 4 ? header_word(head, 0) : 0;
  const auto format = std::find_if(kFormats.begin(), kFormats.end(), [&](const Format& f) { return f.magic == magic; });
  if (format == kFormats.end())
    if (const std::string_view foreign = foreign_format(head.substr(0, kFormatBytes)); !foreign.empty())
      fail("{}: is {}, no token shard", path(), foreign);
  TRIAD_CHECK(format != kFormats.end(),
              "{}: not a token shard: at offset 0 expected the magic number {} (u16) or {} (u32), or BIN.TOK, found {} "
              "(nanoGPT's tokens without a header are read from files called train.bin and val.bin)",
              path(), kFormats[0].magic, kFormats[1].magic, magic);
  need_header(head);
  TRIAD_CHECK(header_word(head, 1) == format->version,
              "{}: at offset 4 expected version {} of magic number {}, found {}", path(), format->version, magic,
              header_word(head, 1));
  width_ = format->width;
  format_ = width_ == TokenWidth::u16 ? "u16 (magic 20240520, version 1)" : "u32 (magic 20240801, version 7)";
  size_ = header_word(head, 2);
  TRIAD_CHECK(size_ > 0, "{}: at offset 8 expected a count of one or more tokens, found {}", path(), size_);
}

// Reads the header of llmq's format. After the magic number it holds: version, bytes per token, token count, vocabulary
// size, and whether a mask follows the tokens.
void Shard::read_llmq_header(std::string_view head) {
  need_header(head);
  constexpr int64_t kBytes = 4;
  TRIAD_CHECK(header_word(head, 2) == kLlmqVersion, "{}: at offset 8 expected version {} of BIN.TOK, found {}", path(),
              kLlmqVersion, header_word(head, 2));
  TRIAD_CHECK(header_word(head, 3) == kBytes, "{}: at offset 12 expected {} bytes a token, found {}", path(), kBytes,
              header_word(head, 3));
  width_ = TokenWidth::u32;
  format_ = "llmq's u32 (BIN.TOK, version 2)";
  size_ = header_word(head, 4);
  TRIAD_CHECK(size_ > 0, "{}: at offset 16 expected a count of one or more tokens, found {}", path(), size_);
  const int32_t flag = header_word(head, 6);
  TRIAD_CHECK(flag == 0 || flag == 1, "{}: at offset 24 expected 1 if a mask follows the tokens, else 0, found {}",
              path(), flag);
  has_mask_ = flag == 1;
  if (has_mask_) format_ = "llmq's u32 with a mask (BIN.TOK, version 2)";
}

// Calls f(first, tokens) for the tokens [begin, end), piece by piece, as spans of the type that the file stores,
// uint16_t or uint32_t.
template <class F>
void Shard::for_each_piece(int64_t begin, int64_t end, F&& f) const {
  constexpr int64_t kPieceTokens = 1 << 18;
  const auto pieces = [&]<class T>(std::vector<T> buffer) {
    buffer.resize(static_cast<size_t>(std::min(kPieceTokens, end - begin)));
    while (begin < end) {
      const auto piece = std::span(buffer).first(static_cast<size_t>(std::min(kPieceTokens, end - begin)));
      file_.read(header_bytes_ + begin * static_cast<int64_t>(sizeof(T)), std::as_writable_bytes(piece));
      f(begin, std::span<const T>(piece));
      begin += static_cast<int64_t>(piece.size());
    }
  };
  if (width_ == TokenWidth::u16)
    pieces(std::vector<uint16_t>());
  else
    pieces(std::vector<uint32_t>());
}

template <class T>
void Shard::check_piece(int64_t begin, std::span<const T> tokens, int64_t vocab) const {
  if (static_cast<int64_t>(largest(tokens)) < vocab) return;
  size_t i = 0;
  while (static_cast<int64_t>(tokens[i]) < vocab) ++i;
  const int64_t number = begin + static_cast<int64_t>(i);
  fail("{}: token {} at offset {} (token number {}) is not in the vocabulary: expected 0..{}", path(), tokens[i],
       header_bytes_ + number * static_cast<int64_t>(width_), number, vocab - 1);
}

void Shard::read(int64_t begin, std::span<int32_t> out, int64_t vocab) const {
  const auto n = static_cast<int64_t>(out.size());
  TRIAD_CHECK(begin >= 0 && n <= size_ && begin <= size_ - n, "{}: {} tokens from {} on were asked for, of {}", path(),
              n, begin, size_);
  for_each_piece(begin, begin + n, [&]<class T>(int64_t first, std::span<const T> tokens) {
    check_piece(first, tokens, vocab);
    std::transform(tokens.begin(), tokens.end(), out.begin() + (first - begin),
                   [](T token) { return static_cast<int32_t>(token); });
  });
}

int64_t Shard::max_token() const {
  int64_t most = 0;
  for_each_piece(0, size_, [&](int64_t, auto tokens) { most = std::max(most, static_cast<int64_t>(largest(tokens))); });
  return most;
}

uint32_t Shard::scan(int64_t vocab, int32_t mark, std::vector<int64_t>* marks) const {
  const std::string header = file_.text(0, header_bytes_), end = file_.text(mask_begin(), bytes() - mask_begin());
  uint32_t crc = crc32_of(std::as_bytes(std::span(header)));
  for_each_piece(0, size_, [&]<class T>(int64_t first, std::span<const T> tokens) {
    check_piece(first, tokens, vocab);
    crc = crc32_of(std::as_bytes(tokens), crc);
    if (marks != nullptr && std::in_range<T>(mark)) find_marks(tokens, static_cast<T>(mark), first, *marks);
  });
  return crc32_of(std::as_bytes(std::span(end)), crc);
}

ShardWriter::ShardWriter(const std::string& path, const ShardLayout& layout, const Progress& from)
    : path_(path),
      layout_(layout),
      mask_(paused_mask(path, layout, from.tokens)),
      file_(path, from.tokens > 0 ? kHeaderBytes + from.tokens * token_bytes() : 0),
      size_(from.tokens),
      body_crc_(from.crc32) {
  TRIAD_CHECK(!layout.masked || layout.width == TokenWidth::u32, "{}: a shard with a mask has tokens of 4 bytes", path);
  const std::array<std::byte, kHeaderBytes> placeholder{};  // reserves space for the header, which finish() writes
  if (from.tokens == 0) {
    file_.write(placeholder);
    return;
  }
  const InputFile begun(path + ".part");
  if (const uint32_t crc = checksum_of(begun, kHeaderBytes); crc != from.crc32)
    fail(
        "{}: has changed since it was written: the CRC-32 of its {} tokens was {:08x}, now {:08x}. Remove the folder, "
        "and call again",
        begun.path(), from.tokens, from.crc32, crc);
}

void ShardWriter::append(std::span<const int32_t> tokens, std::span<const uint8_t> learned) {
  constexpr size_t kFlushBytes = 1 << 20;
  const int64_t limit = layout_.width == TokenWidth::u16 ? INT64_C(1) << 16 : INT64_C(1) << 31;
  const auto bytes_each = static_cast<size_t>(layout_.width);
  TRIAD_CHECK(size_ + static_cast<int64_t>(tokens.size()) <= INT32_MAX, "{}: a shard holds at most {} tokens", path_,
              INT32_MAX);
  TRIAD_CHECK(learned.size() == (layout_.masked ? tokens.size() : 0), "{}: {} tokens with a mask of {}", path_,
              tokens.size(), learned.size());
  for (const int32_t token : tokens)
    TRIAD_CHECK(token >= 0 && token < limit, "{}: token {} does not fit {} bytes", path_, token, bytes_each);
  const size_t at = buffer_.size();
  buffer_.resize(at + tokens.size() * bytes_each);
  std::byte* to = buffer_.data() + at;
  for (const int32_t token : tokens) {
    std::memcpy(to, &token, bytes_each);  // little-endian: the low bytes are first
    to += bytes_each;
  }
  mask_.append(learned);
  size_ += static_cast<int64_t>(tokens.size());
  if (buffer_.size() >= kFlushBytes) flush();
}

ShardWriter::Progress ShardWriter::pause() {
  flush();
  file_.leave();
  if (layout_.masked) {
    const std::vector<std::byte> bits = mask_.bits();
    write_file_atomically(mask_path(path_), {reinterpret_cast<const char*>(bits.data()), bits.size()});
  }
  return {size_, body_crc_};
}

void ShardWriter::flush() {
  if (buffer_.empty()) return;
  body_crc_ = static_cast<uint32_t>(crc32_z(body_crc_, reinterpret_cast<const Bytef*>(buffer_.data()), buffer_.size()));
  file_.write(buffer_);
  buffer_.clear();
}

ShardWriter::Written ShardWriter::finish() {
  TRIAD_CHECK(size_ > 0, "{}: a shard without tokens is not written", path_);
  const std::vector<std::byte> bits = mask_.bits();
  buffer_.insert(buffer_.end(), bits.begin(), bits.end());
  flush();
  const Format& format = kFormats[layout_.width == TokenWidth::u16 ? 0 : 1];
  std::array<int32_t, kHeaderWords> header{};
  if (layout_.masked) {
    std::memcpy(header.data(), kLlmqMagic.data(), kLlmqMagic.size());
    header[2] = kLlmqVersion;
    header[3] = static_cast<int32_t>(token_bytes());
    header[4] = static_cast<int32_t>(size_);
    header[5] = static_cast<int32_t>(layout_.vocab);
    header[6] = 1;
  } else {
    header[0] = format.magic;
    header[1] = format.version;
    header[2] = static_cast<int32_t>(size_);
  }
  const auto bytes = std::as_bytes(std::span(header));
  file_.write_at(0, bytes);
  const uLong header_crc = crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size());
  const auto crc = static_cast<uint32_t>(crc32_combine(header_crc, body_crc_, file_.size() - kHeaderBytes));
  file_.commit();
  std::error_code ignored;
  if (layout_.masked) std::filesystem::remove(mask_path(path_), ignored);
  return {
      .tokens = size_, .bytes = file_.size(), .crc32 = crc, .learned = layout_.masked ? mask_.count(0, size_) : size_};
}

}  // namespace triad
