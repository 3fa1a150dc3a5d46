// LentGrads: activations in gradient memory. Backward writes a layer's gradients after its last use of later layers'
// activations, so both may share memory if every backward overwrites all gradients, and no forward runs between a
// backward and the update. This saves almost as many bytes as the layers' gradients have.
#pragma once
#include <algorithm>

#include "engine/check.h"
#include "model/params.h"

namespace triad {

class LentGrads {
 public:
  // The gradients are whole, and passes call Params::open_grads(), as Model's do.
  explicit LentGrads(Params& params) : segments_(params.segments()), memory_(params.grads()), end_(memory_.bytes()) {
    params.lend_grads();
  }
  // Memory for a tensor that is last used in `layer`'s backward, or, if that is the layer count, before any layer's
  // backward. Call for layers in descending order. Empty if there is no room.
  Tensor take(DType dtype, const Shape& shape, int64_t layer) {
    TRIAD_CHECK(layer >= 0 && layer <= segments_.head(), "layer {} of {}", layer, segments_.head());
    // Layer segments are contiguous and ascending, so earlier layers' segments end where the layer's own begins.
    const int64_t first = segments_[0].begin * size_of(memory_.dtype),
                  last = (layer == 0 ? segments_[0].begin : segments_[layer - 1].end) * size_of(memory_.dtype);
    const int64_t bytes = shape.numel() * size_of(dtype), end = std::min(end_, last) / kMemAlign * kMemAlign;
    if (align_up(bytes) > end - align_up(first)) return {};
    end_ = end - align_up(bytes);
    return Tensor(memory_.data + end_, dtype, shape, memory_.device);
  }

 private:
  const Segments& segments_;
  Tensor memory_;
  int64_t end_;  // memory_ is free before this byte
};

}  // namespace triad
