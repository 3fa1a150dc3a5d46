// A model's tensors, or an optimizer's moments, in one safetensors file or several. The layout is that of Hugging
// Face's transformers: STEM.safetensors, or files STEM-00001-of-0000N.safetensors and STEM.safetensors.index.json,
// which says in which file each tensor is.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/safetensors.h"

namespace triad {

inline constexpr const char* kWeightsStem = "model";
inline constexpr const char* kMomentsStem = "optimizer";

std::string whole_file_name(const std::string& stem);                           // model.safetensors
std::string part_file_name(const std::string& stem, int64_t part, int64_t of);  // part counts from 0
std::string index_file_name(const std::string& stem);                           // model.safetensors.index.json
// Whether a file has one of these names, for any number of parts.
bool is_tensor_file_name(const std::string& name, const std::string& stem);

// The path of a folder's tensors, for WeightIndex: STEM.safetensors, unless the folder has only
// STEM.safetensors.index.json. If it has both, the first is read, as by transformers.
std::string tensors_path(const std::string& folder, const std::string& stem = kWeightsStem);
bool has_tensors(const std::string& folder, const std::string& stem = kWeightsStem);

// Throws if the folder holds an adapter (PEFT's adapter_config.json), which changes a model, without the model itself.
void refuse_adapter(const std::string& folder);

// Each tensor's file, from an index file: {"weight_map": {"TENSOR": "FILE", ...}}. A FILE is a name in the index's
// folder, without a path. Throws an Error with the index's path, and the tensor or file, for anything else.
std::map<std::string, std::string> read_weight_map(const std::string& path);
// An index file's text. total_bytes: all tensors, without headers.
std::string weight_map_json(const std::map<std::string, std::string>& file_of, int64_t total_bytes);

// WeightIndex: all tensors at a path. The constructor reads the headers of all files, so that a missing or truncated
// file, a tensor that the index names and its file lacks, and a tensor that the index does not name are Errors before
// any tensor is read. No tensor data is kept in memory.
class WeightIndex {
 public:
  // path: a safetensors file, an index file, or a folder with model.safetensors or its index.
  explicit WeightIndex(const std::string& path);

  const std::string& path() const { return path_; }                     // path of the file or the index
  const std::vector<SafetensorsFile>& files() const { return files_; }  // sorted by name
  size_t count() const { return file_of_.size(); }                      // tensor count
  int64_t bytes() const;                                                // all tensors' size
  // A tensor's entry, nullptr if there is none; at() throws an Error if there is none.
  const TensorEntry* find(std::string_view name) const;
  const TensorEntry& at(std::string_view name) const;
  const SafetensorsFile& file_of(std::string_view name) const;  // throws an Error if there is no such tensor
  // Calls f for each tensor, file by file, in the order in which the tensors are stored.
  void for_each(const std::function<void(const SafetensorsFile&, const TensorEntry&)>& f) const;

 private:
  void open_indexed();

  std::string path_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t, std::less<>> file_of_;  // index into files_
};

}  // namespace triad
