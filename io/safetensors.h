// Reads and writes safetensors files: a JSON header with each tensor's name, dtype, shape and offsets, then the
// tensors' bytes, little-endian. Files written here hold every tensor's CRC-32 in `__metadata__` (key "crc32/NAME",
// eight hex digits). Files without checksums can be read too.
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

// A tensor in an opened file. `dtype` is the format's word ("F32", "BF16", "F16", ...), which the engine may not
// support.
struct TensorEntry {
  std::string name, dtype;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // the tensor's byte range, counted from the start of the file

  int64_t bytes() const { return end - begin; }
  int64_t numel() const;
  std::optional<DType> engine_dtype() const;  // the engine's dtype; nullopt if the engine has no such type
  std::string str() const;                    // dtype and shape, such as "F32[2,3]"
};

// SafetensorsFile: a file that is read tensor by tensor. The constructor checks the whole header: length, JSON, dtypes,
// shapes against offsets, unique names, no holes, no overlaps, no bytes after the last tensor. Every Error names the
// file, and the offset or the tensor.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<TensorEntry>& entries() const { return entries_; }  // order: as stored
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const TensorEntry* find(std::string_view name) const;  // nullptr if absent
  const TensorEntry& at(std::string_view name) const;    // throws an Error with tensor and file if there is none
  // Fills `out`, whose size must be the tensor's, with the tensor's bytes. If the file has the tensor's checksum, it is
  // verified; a mismatch throws an Error that names the tensor.
  void read(const TensorEntry&, std::span<std::byte> out) const;
  std::vector<std::byte> read(const TensorEntry&) const;
  // Fills `out` with the tensor's bytes from byte `first` on, unchecked. To check a tensor that was read in pieces,
  // pass the CRC-32 over all its bytes to verify(), which does nothing if the file has no checksum for it.
  void read_bytes(const TensorEntry&, int64_t first, std::span<std::byte> out) const;
  bool has_checksum(const TensorEntry&) const;
  void verify(const TensorEntry&, uint32_t crc) const;
  // The whole content's checksum, computed from the header alone: from the tensors' names, dtypes, shapes and
  // checksums, in any order. nullopt if the file lacks a tensor's checksum.
  std::optional<uint32_t> checksum() const;

 private:
  void parse_header(int64_t header_bytes);

  InputFile file_;
  std::vector<TensorEntry> entries_;
  std::map<std::string, size_t, std::less<>> index_;
  std::map<std::string, std::string> metadata_;
};

// True if the file begins as a safetensors file does, even if the rest is missing: an allowed header length, then '{'.
bool is_safetensors(const std::string& path);

struct TensorSpec {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;  // rank 0: a scalar
};

// SafetensorsWriter: writes a file tensor by tensor, so that no second copy of a model is needed: declare all tensors,
// pass each one's bytes in pieces, finish. Tensors are ordered by descending alignment, then by name, so that each is
// aligned in a mapped file. Equal tensors and metadata give equal bytes, in any call order.
class SafetensorsWriter {
 public:
  // metadata: added to the header's metadata, next to "format": "pt" and the checksums.
  SafetensorsWriter(const std::string& path, std::vector<TensorSpec> tensors,
                    const std::map<std::string, std::string>& metadata = {});
  // Appends the next piece of a tensor. Pieces of different tensors may alternate.
  void write(std::string_view name, std::span<const std::byte> piece);
  // Renames the finished file to its path. Throws an Error that names a tensor if its bytes are incomplete.
  void finish();

 private:
  struct Place {
    TensorSpec spec;
    int64_t begin = 0, bytes = 0, written = 0;
    uint32_t crc = 0;
  };
  std::string header() const;  // padded to a multiple of 8 bytes; its length does not depend on the checksums

  std::string path_;
  std::map<std::string, std::string> metadata_;
  std::vector<Place> places_;  // order: as stored
  std::map<std::string, size_t, std::less<>> index_;
  AtomicFile file_;
};

// Writes a whole safetensors file from tensors in host memory.
struct HostTensor {
  TensorSpec spec;
  const void* data = nullptr;
};
void write_safetensors(const std::string& path, std::span<const HostTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace triad
