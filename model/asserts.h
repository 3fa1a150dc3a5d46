// runtime.asserts: checks values after each op of a pass and describes the first wrong one. A pass (a forward and its
// backward) numbers its checks in the order in which it queues them. All passes of a run have the same checks, and an
// evaluation has their first part, so a pass that is replayed from a graph has the numbers of the recorded pass.
#pragma once
#include <initializer_list>
#include <string>
#include <vector>

#include "kernels/step/asserts.h"

namespace triad {

class Asserts {
 public:
  explicit Asserts(Arena&);

  // Forgets earlier violations; called before an optimizer step.
  void clear(Context&);
  // Begins a forward; its checks are numbered from 0.
  void begin_pass() { next_ = 0; }
  // The name of the following checks' pass in messages: "forward", "backward", ...
  void enter(const char* pass) { pass_ = pass; }
  // A tensor and the op that wrote it; x may be empty.
  struct Written {
    const char *op, *name;
    ConstTensor x;
  };
  // Checks, in this order, that the tensors hold no NaN or infinity. layer -1: outside the layers.
  void finite(Context&, int64_t layer, std::initializer_list<Written>);
  void lists(Context&, int64_t layer, const char* op, const char* name, ConstTensor lists, int64_t l_sel);
  void range(Context&, const char* name, Tensor ids, int64_t least, int64_t end);

  // [1] i64 on the device: key of the first violation since clear(), or kNoViolation.
  Tensor first() const { return first_; }
  // "forward of layer 3: nsa_attend_selected: o_sel[0,17,2,5] of [2,64,6,16] is NaN"
  std::string describe(int64_t key) const;
  // Throws "when: description" unless key is kNoViolation.
  void require_none(int64_t key, const std::string& when) const;
  // The same for the device's current value; synchronizes.
  void require_none(Context&, const std::string& when) const;

 private:
  struct Site {
    enum class Kind { floats, lists, ids } kind;
    const char* pass;
    int64_t layer;
    const char *op, *name;
    Shape shape;
  };
  int64_t add(Site::Kind kind, int64_t layer, const char* op, const char* name, const ConstTensor& x);

  Tensor first_;
  const char* pass_ = "forward";
  std::vector<Site> sites_;
  size_t next_ = 0;  // number of the next check
};

}  // namespace triad
