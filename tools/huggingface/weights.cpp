#include "tools/huggingface/weights.h"

#include <cmath>
#include <map>
#include <optional>

#include "engine/check.h"
#include "io/file.h"
#include "tools/work_progress.h"

namespace triad {

namespace {

// One tensor in memory: its values as f32, and its bytes as they are written.
class Conversion {
 public:
  explicit Conversion(DType dtype) : dtype_(dtype) {}

  std::span<const std::byte> convert(const ExportedTensor& tensor) {
    const SafetensorsFile& file = *tensor.file;
    const TensorEntry& entry = *tensor.entry;
    raw_ = file.read(entry);
    values_.resize(static_cast<size_t>(entry.numel()));
    const std::optional<DType> dtype = entry.engine_dtype();
    if (dtype == DType::f32)
      read_as<float>();
    else if (dtype == DType::bf16)
      read_as<bf16>();
    else if (dtype == DType::f64)
      read_as<double>();
    else if (entry.dtype == "F16")
      read_as<_Float16>();
    else
      fail("{}: tensor {} is {}: F32, BF16, F16 or F64 is needed", file.path(), entry.name, entry.str());
    if (tensor.change) tensor.change(values_);
    for (size_t i = 0; i < values_.size(); ++i)
      TRIAD_CHECK(std::isfinite(values_[i]), "{}: tensor {} holds {} at index {}: finite weights are needed",
                  file.path(), entry.name, values_[i], i);
    if (dtype_ == DType::f32) return std::as_bytes(std::span(values_));
    rounded_.resize(values_.size());
    for (size_t i = 0; i < values_.size(); ++i) {
      rounded_[i] = bf16(values_[i]);
      TRIAD_CHECK(std::isfinite(static_cast<float>(rounded_[i])),
                  "{}: tensor {} holds {} at index {}, which is too large for bf16: --dtype f32 keeps it", file.path(),
                  entry.name, values_[i], i);
    }
    return std::as_bytes(std::span(rounded_));
  }

 private:
  template <class T>
  void read_as() {
    const T* from = reinterpret_cast<const T*>(raw_.data());
    for (size_t i = 0; i < values_.size(); ++i) values_[i] = static_cast<float>(from[i]);
  }

  DType dtype_;
  std::vector<std::byte> raw_;
  std::vector<float> values_;
  std::vector<bf16> rounded_;
};

// Splits the tensors into groups with at most most_bytes bytes, one per file.
std::vector<std::span<const ExportedTensor>> split(std::span<const ExportedTensor> tensors, DType dtype,
                                                   int64_t most_bytes) {
  std::vector<std::span<const ExportedTensor>> groups;
  size_t begin = 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t more = tensors[i].entry->numel() * size_of(dtype);
    if (i > begin && bytes + more > most_bytes) {
      groups.push_back(tensors.subspan(begin, i - begin));
      begin = i;
      bytes = 0;
    }
    bytes += more;
  }
  groups.push_back(tensors.subspan(begin));
  return groups;
}

}  // namespace

WrittenWeights write_weights(std::span<const ExportedTensor> tensors, DType dtype, int64_t most_bytes,
                             const std::string& folder, const std::string& stem) {
  const auto groups = split(tensors, dtype, most_bytes);
  WrittenWeights written{.files = groups.size()};
  for (const ExportedTensor& tensor : tensors) written.bytes += tensor.entry->numel() * size_of(dtype);
  constexpr int64_t kMiB = 1 << 20;
  WorkProgress progress("export", "MiB", written.bytes / kMiB);
  std::map<std::string, std::string> file_of;
  Conversion conversion(dtype);
  int64_t done = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::string name = groups.size() == 1
                                 ? whole_file_name(stem)
                                 : part_file_name(stem, static_cast<int64_t>(i), static_cast<int64_t>(groups.size()));
    std::vector<TensorSpec> specs;
    for (const ExportedTensor& tensor : groups[i]) specs.push_back({tensor.name, dtype, tensor.shape});
    SafetensorsWriter writer(folder + "/" + name, std::move(specs));
    for (const ExportedTensor& tensor : groups[i]) {
      const std::span<const std::byte> bytes = conversion.convert(tensor);
      writer.write(tensor.name, bytes);
      file_of[tensor.name] = name;
      done += static_cast<int64_t>(bytes.size());
      progress.show(done / kMiB);
    }
    writer.finish();
  }
  if (groups.size() > 1)
    write_file_atomically(folder + "/" + index_file_name(stem), weight_map_json(file_of, written.bytes));
  return written;
}

}  // namespace triad
