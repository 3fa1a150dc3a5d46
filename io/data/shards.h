// Reads and writes token shards (io/data/README.md has the layouts). Written is llm.c's format: a header of 256 int32
// (magic number, version, token count), then the tokens, little-endian; 16-bit tokens with magic 20240520 and version
// 1, 32-bit tokens with magic 20240801 and version 7. Two more formats can be read: llmq's (BIN.TOK, 32-bit) and
// nanoGPT's train.bin and val.bin, which are 16-bit tokens without a header.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.h"

namespace triad {

enum class TokenWidth { u16 = 2, u32 = 4 };  // bytes per token

// True if the file begins with a shard format's magic number, or is one of nanoGPT's files by name and content. False
// for a file that is too short for a magic number.
bool is_shard(const std::string& path);

// Shard: a shard that is open for reading. A file that is of another format, cut, without tokens, or not as long as its
// header says, throws an Error that names file, offset, and the expected and found values. If the file changes later,
// the next read throws.
class Shard {
 public:
  explicit Shard(const std::string& path);
  const std::string& path() const { return file_.path(); }
  TokenWidth width() const { return width_; }
  const char* format() const { return format_; }  // name of the format, for messages
  int64_t size() const { return size_; }          // number of tokens
  int64_t bytes() const { return file_.size(); }
  // Reads the tokens [begin, begin + out.size()). If vocab is given, a token >= vocab throws as in scan().
  void read(int64_t begin, std::span<int32_t> out, int64_t vocab = kAnyToken) const;
  int64_t max_token() const;  // reads the whole shard
  // Reads the whole shard. A token >= vocab throws an Error that names file, offset and token. If `marks` is given, it
  // receives the positions of the token `mark`, ascending, after what it holds already.
  void scan(int64_t vocab, int32_t mark = -1, std::vector<int64_t>* marks = nullptr) const;

 private:
  static constexpr int64_t kAnyToken = int64_t{1} << 32;
  void need_header(std::string_view head) const;
  void read_llmc_header(std::string_view head);
  void read_llmq_header(std::string_view head);
  template <class F>
  void for_each_piece(int64_t begin, int64_t end, F&& f) const;
  template <class T>
  void check_piece(int64_t begin, std::span<const T> tokens, int64_t vocab) const;

  InputFile file_;
  const char* format_ = "";
  TokenWidth width_ = TokenWidth::u16;
  int64_t header_bytes_ = 1024;  // bytes before the tokens
  int64_t size_ = 0;
};

// ShardWriter: writes a shard piece by piece. The file appears under its name only when it is complete.
class ShardWriter {
 public:
  // The state from which a later process continues a shard: the number of tokens written so far, and the CRC-32 of
  // their bytes.
  struct Progress {
    int64_t tokens = 0;
    uint32_t crc32 = 0;
  };
  ShardWriter(const std::string& path, TokenWidth width) : ShardWriter(path, width, Progress{}) {}
  ShardWriter(const std::string& path, TokenWidth width, const Progress& from);
  void append(std::span<const int32_t> tokens);  // throws for a token that does not fit the width
  int64_t size() const { return size_; }         // number of tokens written so far
  Progress pause();  // syncs all tokens to the file NAME.part, which the destructor then keeps

  struct Written {
    int64_t tokens = 0, bytes = 0;
    uint32_t crc32 = 0;  // CRC-32 of the whole file
  };
  Written finish();  // throws if there are no tokens

 private:
  void flush();

  std::string path_;
  TokenWidth width_;
  AtomicFile file_;
  std::vector<std::byte> buffer_;
  int64_t size_ = 0;
  uint32_t body_crc_ = 0;
};

}  // namespace triad
