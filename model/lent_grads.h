// LentGrads: activations in the memory of gradients. Backward writes the gradients of a layer after its last use of the
// activations of later layers, so both may have the same memory if every backward overwrites all gradients, and no
// forward runs between a backward and the update. This saves almost as many bytes as the gradients of the layers have.
#pragma once
#include "model/params.h"

namespace triad {

class LentGrads {
 public:
  // The gradients are whole, and passes call Params::open_grads(), as Model's do.
  explicit LentGrads(Params&);
  // Memory for a tensor that is last used in the backward of `layer`, or, if that is the number of layers, before the
  // backward of any layer. Call for layers in descending order. Empty if there is no room.
  Tensor take(DType, const Shape&, int64_t layer);

 private:
  const Segments& segments_;
  Tensor memory_;
  int64_t end_;  // bytes of memory_ before this one are free
};

}  // namespace triad
