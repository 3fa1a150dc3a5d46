// The bytes of a text file or of standard input, one after the other; what gzip or zstd packed comes unpacked.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "io/file.h"

namespace triad {

inline constexpr const char* kStandardInput = "-";
// What is read once, from its beginning, and has no size: standard input, or a pipe such as bash's <(...).
bool is_stream(const std::string& path);

class TextInput {
 public:
  // kStandardInput, or a file. Whether it is packed shows in its first bytes, not in its name; packed otherwise than by
  // gzip or zstd it is an Error. stopped: asked while standard input lets wait; true ends the text.
  explicit TextInput(const std::string& path, std::function<bool()> stopped = {});
  ~TextInput();
  const std::string& name() const { return name_; }
  // Fills `to` as far as there is text: less only at the end. A packed file that is cut or damaged is an Error.
  size_t read(std::span<char> to);
  // The first byte, without taking it; -1: there is none.
  int peek();
  int64_t bytes_taken() const { return taken_; }  // of the file, packed as it is

 private:
  class Unpacker;
  class Gzip;
  class Zstd;
  bool refill();  // false at the end of the file

  std::string name_;
  std::function<bool()> stopped_;
  FileHandle file_;
  std::string buffer_;
  size_t at_ = 0;  // in buffer_
  int64_t taken_ = 0;
  std::unique_ptr<Unpacker> unpacker_;
  int ahead_ = -1;  // the byte that peek() unpacked
};

std::string read_whole_text(const std::string& path);  // what TextInput takes

}  // namespace triad
