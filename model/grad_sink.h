// GradSink: receives each gradient when backward has finished it, so that its reduction can overlap the rest of
// backward.
#pragma once
#include "engine/stream.h"
#include "engine/tensor.h"

namespace triad {

class GradSink {
 public:
  virtual ~GradSink() = default;
  // grad: the part of Params::grads() of one parameter, or of several that are stored contiguously. It is final once
  // the work queued so far on stream `on` is done.
  virtual void ready(ConstTensor grad, const Stream& on) = 0;
};

}  // namespace triad
