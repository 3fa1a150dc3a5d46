// Parts of the flat buffers in which Params stores all parameters (or their gradients) one after the other: element
// ranges, the parameters of a part, and the list of parameters whose gradients a backward has reported.
#pragma once
#include <string>
#include <vector>

#include "engine/check.h"
#include "model/params.h"

namespace triad {

// The elements [begin, end) of a flat buffer.
struct ElementRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool overlaps(const ElementRange& other) const { return begin < other.end && other.begin < end; }
};

// The range of elements of the flat buffer `whole` that its view `part` covers. Throws Error if `part` is not inside
// `whole`.
ElementRange range_in(ConstTensor whole, ConstTensor part);
// The range of elements in which parameter i is stored, padding rows included.
ElementRange range_of(const Params&, int64_t i);
int64_t index_of_param(const Params&, const std::string& name);

// Finds the parameters whose gradients a part of Params::grads() contains.
class GradFinder {
 public:
  explicit GradFinder(const Params&);
  // Returns the indices of the parameters whose gradients begin in `grad`, in the order of storage.
  std::vector<int64_t> find(ConstTensor grad) const;

 private:
  const Params& params_;
  std::vector<int64_t> by_offset_;  // indices of the parameters, sorted by their offset in the flat buffer
};

// Thrown if a backward has not reported every gradient.
class MissingGradients : public Error {
 public:
  MissingGradients(std::vector<std::string> names, int64_t of);
  std::vector<std::string> names;
  int64_t of;  // number of parameters
};

// GradArrivals: records which parameters' gradients the current backward has reported, that is, passed to
// GradSink::ready.
class GradArrivals {
 public:
  explicit GradArrivals(const Params&);

  void begin() { arrived_.assign(arrived_.size(), false); }
  // Records that backward has reported the gradients that begin in `grad`, a part of Params::grads(). Throws Error if
  // one of them was reported before.
  void add(ConstTensor grad);
  std::vector<std::string> missing() const;  // names of the parameters whose gradients were not reported
  void require_all() const;                  // throws MissingGradients

 private:
  const Params& params_;
  GradFinder finder_;
  std::vector<bool> arrived_;  // for each parameter: whether its gradient was reported
};

}  // namespace triad
