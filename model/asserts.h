// runtime.asserts: where in a pass values are checked, and what to say of the first that is wrong. A pass (one forward,
// and the backward behind it) numbers its checks as it queues them. All passes of a run have the same, an evaluation
// the first of them; so one that is replayed from a graph has the numbers of the pass that was recorded.
#pragma once
#include <string>
#include <vector>

#include "kernels/step/asserts.h"

namespace triad {

class Asserts {
 public:
  explicit Asserts(Arena&);

  // What was found is forgotten: before an optimizer step.
  void clear(Context&);
  // A forward begins; its checks are numbered from 0.
  void begin_pass() { next_ = 0; }
  // What follows is "forward", "backward", ...
  void enter(const char* pass) { pass_ = pass; }
  // The tensor `name` that `op` has written, in a layer (-1: outside of them).
  void finite(Context&, int64_t layer, const char* op, const char* name, ConstTensor x);
  void lists(Context&, int64_t layer, const char* op, const char* name, ConstTensor lists, int64_t l_sel);
  void range(Context&, const char* name, Tensor ids, int64_t least, int64_t end);

  // [1] i64 on the device: the key of the first violation since clear(), or kNoViolation.
  Tensor first() const { return first_; }
  // "forward of layer 3: nsa_attend_selected: o_sel[0,17,2,5] of [2,64,6,16] is NaN"
  std::string describe(int64_t key) const;
  // Throws that, behind `when`, unless key is kNoViolation.
  void require_none(int64_t key, const std::string& when) const;
  // The same of what the device holds now; waits for it.
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
