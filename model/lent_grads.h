// LentGrads: activations in gradient memory. Backward writes a layer's gradients after its last use of later layers'
// activations, so both may share memory if every backward overwrites all gradients, and no forward runs between a
// backward and the update. This saves almost as many bytes as the layers' gradients have.
#pragma once
#include "model/params.h"

namespace triad {

class LentGrads {
 public:
  // The gradients are whole, and passes call Params::open_grads(), as Model's do.
  explicit LentGrads(Params&);
  // Memory for a tensor that is last used in `layer`'s backward, or, if that is the layer count, before any layer's
  // backward. Call for layers in descending order. Empty if there is no room.
  Tensor take(DType, const Shape&, int64_t layer);

 private:
  const Segments& segments_;
  Tensor memory_;
  int64_t end_;  // memory_ is free before this byte
};

}  // namespace triad
