// Parts of the flat buffers in which Params stores all parameters (or their gradients) one after the other: element
// ranges, and the list of parameters whose gradients a backward has reported.
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
  // Records that backward has reported the gradients that begin in `grad`, a part of Params::grads(). Returns the
  // indices of their parameters in the order of storage. Throws Error if one of them was reported before.
  std::vector<int64_t> add(ConstTensor grad);
  std::vector<std::string> missing() const;  // names of the parameters whose gradients were not reported
  void require_all() const;                  // throws MissingGradients

 private:
  const Params& params_;
  std::vector<int64_t> by_offset_;  // indices of the parameters, sorted by their offset in the flat buffer
  std::vector<bool> arrived_;       // for each parameter: whether its gradient was reported
};

}  // namespace triad
