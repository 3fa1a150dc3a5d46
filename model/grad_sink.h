// GradSink: receives each gradient as soon as backward has finished it, so summing it over the ranks can overlap the
// rest of backward.
#pragma once
#include "engine/stream.h"
#include "engine/tensor.h"

namespace triad {

class GradSink {
 public:
  virtual ~GradSink() = default;
  // Backward is about to write a segment's gradients (Segments in params.h). Work queued on stream `on` after this call
  // may overwrite the memory that the segment shares in the layer ring.
  virtual void open(int64_t /*segment*/, const Stream& /*on*/) {}
  // grad: a part of Params::grads(): one parameter's gradient, or several that are stored contiguously. It is final
  // once the work queued so far on stream `on` is done.
  virtual void ready(ConstTensor grad, const Stream& on) = 0;
};

}  // namespace triad
