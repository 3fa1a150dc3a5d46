// Reads and writes token shards (io/data/README.md has the layouts). Written is llm.c's format: a header with 256 int32
// (magic number, version, token count), then the tokens, little-endian; 16-bit tokens with magic 20240520 and version
// 1, 32-bit tokens with magic 20240801 and version 7. Shards with a loss mask are written in llmq's format (BIN.TOK):
// a header, 32-bit tokens, then a bit for each token. Also read are llmq's shards without a mask, and nanoGPT's
// train.bin and val.bin, which are 16-bit tokens without a header.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/data/loss_mask.h"
#include "io/file.h"

namespace triad {

enum class TokenWidth { u16 = 2, u32 = 4 };  // bytes per token

// The layout for a shard to be written.
struct ShardLayout {
  TokenWidth width = TokenWidth::u16;
  bool masked = false;  // llmq's format with a loss mask; needs u32
  int64_t vocab = 0;    // vocabulary size; a masked shard's header has it
};

// Whether a file with this beginning is a shard with a header.
bool is_shard_head(std::string_view head);
// True if the file begins with a shard format's magic number, or is a nanoGPT file by name and content. False for a
// file too short for a magic number.
bool is_shard(const std::string& path);

// Shard: a shard that is open for reading. A file that has another format, is cut, without tokens, not as long as its
// header says, or with a damaged mask, throws an Error that names file, offset, and the expected and found values. If
// the file changes later, the next read throws.
class Shard {
 public:
  explicit Shard(const std::string& path);
  const std::string& path() const { return file_.path(); }
  TokenWidth width() const { return width_; }
  const char* format() const { return format_; }  // format name, for messages
  int64_t size() const { return size_; }          // token count
  int64_t bytes() const { return file_.size(); }
  // Reads the tokens [begin, begin + out.size()). If vocab is given, a token >= vocab throws as in scan().
  void read(int64_t begin, std::span<int32_t> out, int64_t vocab = kAnyToken) const;
  int64_t max_token() const;  // reads the whole shard
  // Reads the whole shard. A token >= vocab throws an Error that names file, offset and token. If `marks` is given, it
  // receives the positions of the token `mark`, ascending, after what it holds already. Returns the whole file's
  // CRC-32.
  uint32_t scan(int64_t vocab, int32_t mark = -1, std::vector<int64_t>* marks = nullptr) const;
  bool has_mask() const { return has_mask_; }
  LossMask mask() const;  // mask of all tokens; without a mask in the file, all are learned

 private:
  static constexpr int64_t kAnyToken = int64_t{1} << 32;
  int64_t mask_begin() const { return header_bytes_ + size_ * static_cast<int64_t>(width_); }  // offset in the file
  void check_length() const;
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
  bool has_mask_ = false;
};

// ShardWriter: writes a shard piece by piece. The file appears under its name only when it is complete.
class ShardWriter {
 public:
  // The state from which a later process continues a shard: how many tokens it has written so far, and the CRC-32 of
  // their bytes.
  struct Progress {
    int64_t tokens = 0;
    uint32_t crc32 = 0;
  };
  ShardWriter(const std::string& path, TokenWidth width) : ShardWriter(path, ShardLayout{.width = width}) {}
  ShardWriter(const std::string& path, const ShardLayout& layout) : ShardWriter(path, layout, Progress{}) {}
  ShardWriter(const std::string& path, const ShardLayout& layout, const Progress& from);
  // learned: empty, unless the shard has a loss mask; then a byte for each token: 1 if the token is a loss target, else
  // 0. Throws for a token that does not fit the shard's bytes per token.
  void append(std::span<const int32_t> tokens, std::span<const uint8_t> learned = {});
  int64_t size() const { return size_; }  // tokens written so far
  // Syncs all tokens to the file NAME.part, which the destructor then keeps, and the mask to NAME.mask.
  Progress pause();

  struct Written {
    int64_t tokens = 0, bytes = 0;
    uint32_t crc32 = 0;   // CRC-32 of the whole file
    int64_t learned = 0;  // tokens that the mask leaves
  };
  Written finish();  // throws if there are no tokens

 private:
  void flush();
  int64_t token_bytes() const { return static_cast<int64_t>(layout_.width); }

  std::string path_;
  ShardLayout layout_;
  LossMask mask_;  // mask of the tokens so far, if layout_.masked
  AtomicFile file_;
  std::vector<std::byte> buffer_;
  int64_t size_ = 0;
  uint32_t body_crc_ = 0;
};

}  // namespace triad
