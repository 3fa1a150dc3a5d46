// The tensors of a model folder that Hugging Face's transformers has written: model.safetensors, or several files and
// model.safetensors.index.json, which says in which file each tensor is.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/safetensors.h"

namespace triad {

// The file of each tensor, from an index file: {"weight_map": {"TENSOR": "FILE", ...}}. A FILE is a name in the index's
// folder, without a path. Throws an Error with the index's path, and the tensor or file, for anything else.
std::map<std::string, std::string> read_weight_map(const std::string& path);

// WeightIndex: all tensors of a folder. The constructor reads the headers of all files, so that a missing or truncated
// file, a tensor that the index names and its file lacks, and a tensor that the index does not name are Errors before
// any tensor is read. No tensor data is kept in memory.
class WeightIndex {
 public:
  explicit WeightIndex(const std::string& folder);

  const std::vector<SafetensorsFile>& files() const { return files_; }  // sorted by name
  size_t count() const { return file_of_.size(); }                      // number of tensors
  // The entry of a tensor, nullptr if there is none; and its file.
  const TensorEntry* find(std::string_view name) const;
  const SafetensorsFile& file_of(std::string_view name) const;  // throws an Error if there is no such tensor
  // Calls f for each tensor, file by file, in the order in which the tensors are stored.
  void for_each(const std::function<void(const SafetensorsFile&, const TensorEntry&)>& f) const;

 private:
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t, std::less<>> file_of_;  // index into files_
};

}  // namespace triad
