// safetensors files: a JSON header that lists name, type, shape and place of each tensor, then their bytes,
// little-endian. Files written here carry a CRC-32 of every tensor in `__metadata__` ("crc32/NAME": eight hex digits);
// files without load.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tensor.h"
#include "io/file.h"

namespace triad {

// One tensor of a file that was read. The type keeps the format's word ("F32", "BF16", "F16", ...): not all are ours.
struct TensorEntry {
  std::string name, dtype;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // bytes, from the start of the file

  int64_t bytes() const { return end - begin; }
  int64_t numel() const;
  std::optional<DType> engine_dtype() const;  // nullopt where the engine has no such type
  std::string str() const;                    // "F32[2,3]"
};

// A file that is read tensor by tensor. Opening checks all of its header: length, JSON, types, shapes against offsets,
// no tensor twice, no holes, no overlaps, nothing behind the last. Every Error names the file, and the offset or the
// tensor.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<TensorEntry>& entries() const { return entries_; }  // as they lie in the file
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const TensorEntry* find(std::string_view name) const;  // nullptr: no such tensor
  const TensorEntry& at(std::string_view name) const;    // Error that names tensor and file: no such tensor
  // Fills out, which has the tensor's size, with its bytes. If the file has a checksum for it, read() verifies it: a
  // wrong one is an Error that names the tensor.
  void read(const TensorEntry&, std::span<std::byte> out) const;
  std::vector<std::byte> read(const TensorEntry&) const;

 private:
  void parse_header(int64_t header_bytes);

  InputFile file_;
  std::vector<TensorEntry> entries_;
  std::map<std::string, size_t, std::less<>> index_;
  std::map<std::string, std::string> metadata_;
};

// True if the file begins like a safetensors file, whole or cut: an allowed header length, then '{'.
bool is_safetensors(const std::string& path);

struct TensorSpec {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;  // rank 0: a single number
};

// Writes a file tensor by tensor, so that nobody need hold a second copy of a model: declare all, give each one's bytes
// in pieces, finish. Laid out by alignment, descending, then by name, and padded so that every tensor is aligned in a
// mapped file. Equal tensors and metadata make equal bytes, whatever the order of the calls.
class SafetensorsWriter {
 public:
  // metadata is added to "format": "pt" and the checksums.
  SafetensorsWriter(const std::string& path, std::vector<TensorSpec> tensors,
                    const std::map<std::string, std::string>& metadata = {});
  // The next piece of a tensor. Tensors in any order, the pieces of each in theirs.
  void write(std::string_view name, std::span<const std::byte> piece);
  // Throws, naming it, if a tensor is not complete. Only now the file appears.
  void finish();

 private:
  struct Place {
    TensorSpec spec;
    int64_t begin = 0, bytes = 0, written = 0;
    uint32_t crc = 0;
  };
  std::string header() const;  // padded; as long whatever the checksums are

  std::string path_;
  std::map<std::string, std::string> metadata_;
  std::vector<Place> places_;  // in the file's order
  std::map<std::string, size_t, std::less<>> index_;
  AtomicFile file_;
};

// All at once, from host memory.
struct HostTensor {
  TensorSpec spec;
  const void* data = nullptr;
};
void write_safetensors(const std::string& path, std::span<const HostTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace triad
