// runtime.asserts: checks values on the device after each op in a pass and describes the first wrong one. A pass is a
// forward and its backward; its checks are numbered in queue order. All passes of one kind, dense or not, have the same
// checks (an evaluation has the first part), so a pass that is replayed from a graph, or is described after others were
// queued, has the recorded pass's numbers. A dense pass has odd numbers.
#pragma once
#include <initializer_list>
#include <string>
#include <vector>

#include "kernels/step/asserts.h"

namespace triad {

class Asserts {
 public:
  explicit Asserts(Arena&);

  // Clears earlier violations. Called before each optimizer step.
  void clear(Context&);
  // Called when a forward starts. dense: all layers attend densely (Model::attend_densely).
  void begin_pass(bool dense) { dense_ = dense, next_ = 0; }
  // Sets the pass's name in the following checks' messages: "forward", "backward", ...
  void enter(const char* pass) { pass_ = pass; }
  // A tensor to check and the op that wrote it; x may be empty.
  struct Written {
    const char *op, *name;
    ConstTensor x;
  };
  // Checks the tensors, in this order, for NaN and infinity. layer: layer index; -1: outside the layers.
  void finite(Context&, int64_t layer, std::initializer_list<Written>);
  void lists(Context&, int64_t layer, const char* op, const char* name, ConstTensor lists, int64_t l_sel,
             const Documents& documents = {});
  void range(Context&, const char* name, Tensor ids, int64_t least, int64_t end);

  // [1] i64 on the device: the first violation's key since clear(), or kNoViolation.
  Tensor first() const { return first_; }
  // Describes a violation, for example "forward of layer 3: nsa_attend_selected: o_sel[0,17,2,5] of [2,64,6,16] is
  // NaN".
  std::string describe(int64_t key) const;
  // Throws an error with the text "when: description" unless key is kNoViolation.
  void require_none(int64_t key, const std::string& when) const;
  // Waits for the device, then throws if its key first() is not kNoViolation.
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
  std::vector<Site> sites_[2];  // check sites: passes that aren't dense, and dense ones
  bool dense_ = false;
  size_t next_ = 0;  // the pass's next check, as an index into its sites
};

}  // namespace triad
