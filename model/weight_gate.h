// WeightGate: who knows which weights are still on their way. A forward asks before it reads any.
#pragma once
#include "engine/stream.h"
#include "engine/tensor.h"

namespace triad {

class WeightGate {
 public:
  virtual ~WeightGate() = default;
  virtual void begin() = 0;  // a forward begins
  // weight: a part of Params::weights(), whole for whatever `on` does from here on.
  virtual void need(ConstTensor weight, const Stream& on) = 0;
};

}  // namespace triad
