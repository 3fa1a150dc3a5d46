#include "model/lent_grads.h"

#include <algorithm>

#include "engine/check.h"

namespace triad {

LentGrads::LentGrads(Params& params) : segments_(params.segments()), memory_(params.grads()), end_(memory_.bytes()) {
  params.lend_grads();
}

// Layer segments are contiguous and ascending, so earlier layers' segments end where the layer's own begins.
Tensor LentGrads::take(DType dtype, const Shape& shape, int64_t layer) {
  TRIAD_CHECK(layer >= 0 && layer <= segments_.head(), "layer {} of {}", layer, segments_.head());
  const int64_t first = segments_[0].begin * size_of(memory_.dtype),
                last = (layer == 0 ? segments_[0].begin : segments_[layer - 1].end) * size_of(memory_.dtype);
  const int64_t bytes = shape.numel() * size_of(dtype), end = std::min(end_, last) / kMemAlign * kMemAlign;
  if (align_up(bytes) > end - align_up(first)) return {};
  end_ = end - align_up(bytes);
  return Tensor(memory_.data + end_, dtype, shape, memory_.device);
}

}  // namespace triad
