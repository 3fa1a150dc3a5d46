// Parts of the flat buffers in which Params stores all parameters (or their gradients) one after the other: element
// ranges, a part's parameters, and which parameters' gradients a backward has reported.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "engine/check.h"
#include "model/params.h"

namespace triad {

// A buffer that holds parts of the flat buffer, one after the other: a rank's shards, or all elements as one part.
class Parts {
 public:
  struct Part {
    ElementRange elements;  // range in the flat buffer
    int64_t at = 0;         // where its first element is in a buffer with size() elements
  };
  static Parts whole(const Params& params) {
    Parts parts;
    parts.add({0, params.stored_elements()});
    return parts;
  }
  void add(const ElementRange& elements) {
    parts_.push_back({elements, size_});
    size_ += elements.size();
  }
  // Adds a part that is at the same place as in the flat buffer.
  void add_in_place(const ElementRange& elements) {
    parts_.push_back({elements, elements.begin});
    size_ = std::max(size_, elements.end);
  }

  int64_t size() const { return size_; }
  const std::vector<Part>& parts() const { return parts_; }
  auto begin() const { return parts_.begin(); }
  auto end() const { return parts_.end(); }
  const Part& operator[](size_t i) const { return parts_[i]; }
  size_t count() const { return parts_.size(); }
  // The part that holds a range; null if none does.
  const Part* find(const ElementRange& range) const {
    const auto it = std::find_if(begin(), end(), [&](const Part& part) { return part.elements.contains(range); });
    return it == end() ? nullptr : &*it;
  }
  // A range's elements in `buffer` [size()]; the range lies in one part.
  static Tensor of(const Tensor& buffer, const Part& part, const ElementRange& range) {
    const int64_t shift = part.at - part.elements.begin;
    return buffer.slice(0, range.begin + shift, range.end + shift);
  }
  static Tensor of(const Tensor& buffer, const Part& part) { return of(buffer, part, part.elements); }

 private:
  std::vector<Part> parts_;
  int64_t size_ = 0;
};

// The element range in which parameter i is stored, padding rows included.
ElementRange range_of(const Params&, int64_t i);
int64_t index_of_param(const Params&, const std::string& name);

// Finds the parameters whose gradients a part of Params::grads() contains.
class GradFinder {
 public:
  explicit GradFinder(const Params&);
  // Returns the indices of parameters whose gradients begin in `grad`, in storage order.
  std::vector<int64_t> find(ConstTensor grad) const;

 private:
  const Params& params_;
  std::vector<int64_t> by_offset_;  // parameter indices, sorted by offset in the flat buffer
};

// Thrown if a backward has not reported every gradient.
class MissingGradients : public Error {
 public:
  MissingGradients(std::vector<std::string> names, int64_t of);
  std::vector<std::string> names;
  int64_t of;  // parameter count
};

// GradArrivals: records which parameters' gradients the current backward has reported, that is, passed to
// GradSink::ready.
class GradArrivals {
 public:
  explicit GradArrivals(const Params&);

  void begin() { arrived_.assign(arrived_.size(), false); }
  // Records that backward has reported the gradients that begin in `grad`, a part of Params::grads(). Throws Error if
  // one was reported before.
  void add(ConstTensor grad);
  std::vector<std::string> missing() const;  // names of parameters without a reported gradient
  void require_all() const;                  // throws MissingGradients

 private:
  const Params& params_;
  GradFinder finder_;
  std::vector<bool> arrived_;  // whether a parameter's gradient was reported
};

}  // namespace triad
