// Reads a text file or standard input sequentially, and decompresses gzip and zstd data.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "io/file.h"

namespace triad {

inline constexpr const char* kStandardInput = "-";
// True for an input that can be read only once and has no known size: standard input, or a pipe such as bash's <(...).
bool is_stream(const std::string& path);
// Throws if one of the files is a stream: for data that are read more than once.
void refuse_streams(std::span<const std::string> files);

class TextInput {
 public:
  // path: a file, or kStandardInput. Compression is recognized by the first bytes, not by the name; what needs another
  // program throws (packed_format() in io/foreign_format.h). stopped: polled while the input has no data; if it returns
  // true, the text ends.
  explicit TextInput(const std::string& path, std::function<bool()> stopped = {});
  ~TextInput();
  const std::string& path() const { return path_; }
  const std::string& name() const { return name_; }
  // Fills `to`; returns fewer bytes only at the text's end. A cut or damaged compressed file throws.
  size_t read(std::span<char> to);
  // The text's next `bytes` bytes, which later reads still return; fewer only at the end. Valid until the next call.
  std::string_view look(size_t bytes);
  int64_t bytes_taken() const { return taken_; }  // bytes read so far from the file as stored (compressed)

 private:
  class Unpacker;
  class Gzip;
  class Zstd;
  bool refill();                      // reads more input into buffer_; false at the file's end
  size_t unpack(std::span<char> to);  // like read(), after what look() has taken

  std::string path_, name_;
  std::function<bool()> stopped_;
  FileHandle file_;
  std::string buffer_;
  size_t at_ = 0;  // index of the next byte in buffer_
  int64_t taken_ = 0;
  std::unique_ptr<Unpacker> unpacker_;
  std::string ahead_;  // text that look() has read ahead
};

std::string read_to_end(TextInput& input);
std::string read_whole_text(const std::string& path);  // path: as for TextInput's constructor

}  // namespace triad
