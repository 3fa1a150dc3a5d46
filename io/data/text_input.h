// Reads a text file or standard input sequentially, and decompresses gzip and zstd data.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "io/file.h"

namespace triad {

inline constexpr const char* kStandardInput = "-";
// True for an input that can be read only once and has no known size: standard input, or a pipe such as bash's <(...).
bool is_stream(const std::string& path);

class TextInput {
 public:
  // path: a file, or kStandardInput. Compression is recognized by the first bytes, not by the name; compression other
  // than gzip and zstd throws. stopped: polled while the input has no data; if it returns true, the text ends.
  explicit TextInput(const std::string& path, std::function<bool()> stopped = {});
  ~TextInput();
  const std::string& name() const { return name_; }
  // Fills `to`; returns fewer bytes only at the end of the text. A cut or damaged compressed file throws.
  size_t read(std::span<char> to);
  // The next byte, which a later read() still returns; -1 at the end.
  int peek();
  int64_t bytes_taken() const { return taken_; }  // number of bytes read so far of the file as stored (compressed)

 private:
  class Unpacker;
  class Gzip;
  class Zstd;
  bool refill();  // reads more input into buffer_; false at the end of the file

  std::string name_;
  std::function<bool()> stopped_;
  FileHandle file_;
  std::string buffer_;
  size_t at_ = 0;  // index of the next byte in buffer_
  int64_t taken_ = 0;
  std::unique_ptr<Unpacker> unpacker_;
  int ahead_ = -1;  // the byte that peek() has read ahead, or -1
};

std::string read_whole_text(const std::string& path);  // path: as for TextInput's constructor

}  // namespace triad
