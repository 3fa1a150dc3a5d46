// Parts of the flat parameter buffers (Params): element ranges, and the parameters whose gradients a backward
// announces.
#pragma once
#include <string>
#include <vector>

#include "engine/check.h"
#include "model/params.h"

namespace triad {

// Elements [begin, end) of a flat buffer.
struct ElementRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool overlaps(const ElementRange& other) const { return begin < other.end && other.begin < end; }
};

// The elements that `part`, a view into the flat buffer `whole`, covers. Throws Error if it is no such view.
ElementRange range_in(ConstTensor whole, ConstTensor part);
// The stored elements of parameter i.
ElementRange range_of(const Params&, int64_t i);
int64_t index_of_param(const Params&, const std::string& name);

// Thrown if a backward has not announced every gradient.
class MissingGradients : public Error {
 public:
  MissingGradients(std::vector<std::string> names, int64_t of);
  std::vector<std::string> names;
  int64_t of;  // number of parameters
};

// GradArrivals: the parameters whose gradients the current backward has announced (GradSink::ready).
class GradArrivals {
 public:
  explicit GradArrivals(const Params&);

  void begin() { arrived_.assign(arrived_.size(), false); }
  // Marks the parameters whose gradients begin in grad, a part of Params::grads(), and returns their indices in the
  // order of storage. Throws Error if one of them was announced before.
  std::vector<int64_t> add(ConstTensor grad);
  std::vector<std::string> missing() const;  // names of the parameters that were not announced
  void require_all() const;                  // throws MissingGradients

 private:
  const Params& params_;
  std::vector<int64_t> by_offset_;  // parameters sorted by their offset in the flat buffer
  std::vector<bool> arrived_;       // by parameter
};

}  // namespace triad
