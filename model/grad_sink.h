// GradSink: who wants to know, while a backward runs, which gradients are final.
#pragma once
#include "engine/stream.h"
#include "engine/tensor.h"

namespace triad {

class GradSink {
 public:
  virtual ~GradSink() = default;
  // grad: a part of Params::grads() that holds one parameter's gradient, or those of parameters stored behind one
  // another. It is final when the stream gets to where it is now.
  virtual void ready(ConstTensor grad, const Stream& on) = 0;
};

}  // namespace triad
