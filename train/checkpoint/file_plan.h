// FilePlan: into how many files a run's parameters are divided, which file holds which, and which rank writes it. Each
// file holds whole tensors. Pure.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "model/params.h"

namespace triad {

// A model's parameters [begin, end), in spec order.
struct ParamRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool contains(int64_t i) const { return i >= begin && i < end; }
};

// Divides items with these sizes, in order, into `parts` ranges, so that the largest is as small as possible. No range
// is empty: with fewer items than parts there are as many ranges as items.
std::vector<ParamRange> split_evenly(std::span<const int64_t> sizes, int64_t parts);

// What one kind of file holds for each parameter NAME: tensors PREFIX + NAME from a StatePart's buffers.
struct NamedBuffer {
  std::string prefix;
  int buffer = 0;
  // Whether the files hold it for a parameter; empty: for all.
  std::function<bool(const ParamSpec&)> holds = {};
  bool has(const ParamSpec& spec) const { return !holds || holds(spec); }
};

class FilePlan {
 public:
  // files: 1 gives whole files, such as model.safetensors; more give parts and an index (io/weight_index.h).
  FilePlan(const Params&, int64_t files);

  int64_t files() const { return static_cast<int64_t>(ranges_.size()); }
  bool whole() const { return files() == 1; }
  // A file's parameters; an empty range if there are fewer files.
  ParamRange params(int64_t file) const;
  std::string name(const std::string& stem, int64_t file) const;
  // The index file's text (io/weight_index.h): in which of the plan's files each tensor is, one tensor per parameter
  // and buffer.
  std::string index(const Params&, const std::string& stem, const std::vector<NamedBuffer>&, DType) const;

 private:
  std::vector<ParamRange> ranges_;
};

}  // namespace triad
