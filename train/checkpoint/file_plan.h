// FilePlan: into how many files the parameters of a run are divided, which file holds which, and which rank writes it.
// Each file holds whole tensors. Pure.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "model/params.h"

namespace triad {

// The parameters [begin, end) of a model, in the order of its specs.
struct ParamRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool contains(int64_t i) const { return i >= begin && i < end; }
};

// Divides items of these sizes, in their order, into `parts` ranges, so that the largest is as small as possible. No
// range is empty: with fewer items than parts there are as many ranges as items.
std::vector<ParamRange> split_evenly(std::span<const int64_t> sizes, int64_t parts);

// What the files of one kind hold of each parameter NAME: tensors PREFIX + NAME from buffers of a StatePart.
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
  // The parameters of a file; an empty range if there are fewer files.
  ParamRange params(int64_t file) const;
  std::string name(const std::string& stem, int64_t file) const;
  // The text of the index file (io/weight_index.h): in which file of this plan each tensor is, for a tensor of each
  // parameter and buffer.
  std::string index(const Params&, const std::string& stem, const std::vector<NamedBuffer>&, DType) const;

 private:
  std::vector<ParamRange> ranges_;
};

}  // namespace triad
