// Token shards. Written as llm.c does: 256 int32 of header (magic, version, token count), then the tokens,
// little-endian. u16: magic 20240520, version 1. u32: magic 20240801, version 7. Read too: llmq's (BIN.TOK, u32), and
// nanoGPT's train.bin and val.bin, which are u16 tokens alone.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.h"

namespace triad {

enum class TokenWidth { u16 = 2, u32 = 4 };  // bytes a token

// True if the file begins with the magic number of a shard, or is one of nanoGPT's by its name. A file too short for a
// magic number is none.
bool is_shard(const std::string& path);

// A shard, open for reading (InputFile). A file that is foreign, cut, without tokens, or not exactly as long as its
// header says is an Error that names file, offset, and what was expected and found there. What becomes of the file
// afterwards is an Error of the read that meets it.
class Shard {
 public:
  explicit Shard(const std::string& path);
  const std::string& path() const { return file_.path(); }
  TokenWidth width() const { return width_; }
  const char* format() const { return format_; }  // for a person
  int64_t size() const { return size_; }          // tokens
  int64_t bytes() const { return file_.size(); }
  // Tokens [begin, begin + out.size()). If vocab is given, the first token >= vocab is an Error as in scan().
  void read(int64_t begin, std::span<int32_t> out, int64_t vocab = kAnyToken) const;
  int64_t max_token() const;  // reads the whole shard
  // The first token >= vocab is an Error that names file, offset and token. Reads the whole shard.
  void scan(int64_t vocab) const;

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
  int64_t header_bytes_ = 1024;  // before the tokens
  int64_t size_ = 0;
};

// Writes a shard piece by piece; it appears whole or not at all.
class ShardWriter {
 public:
  // What a later process needs to go on with a shard: its tokens so far, and the CRC-32 of their bytes.
  struct Progress {
    int64_t tokens = 0;
    uint32_t crc32 = 0;
  };
  ShardWriter(const std::string& path, TokenWidth width) : ShardWriter(path, width, Progress{}) {}
  ShardWriter(const std::string& path, TokenWidth width, const Progress& from);
  void append(std::span<const int32_t> tokens);  // a token that does not fit the width is an Error
  int64_t size() const { return size_; }         // tokens so far
  Progress pause();  // all of them are on disk beside the file, and stay there if this is the end

  struct Written {
    int64_t tokens = 0, bytes = 0;
    uint32_t crc32 = 0;  // of the whole file
  };
  Written finish();  // a shard without tokens is an Error

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
