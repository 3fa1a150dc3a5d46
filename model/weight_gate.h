// WeightGate: for sharded weights, which each forward gathers from all ranks. It makes the forward's stream wait until
// each weight is gathered, before the weight is read.
#pragma once
#include "engine/stream.h"
#include "engine/tensor.h"

namespace triad {

class WeightGate {
 public:
  virtual ~WeightGate() = default;
  virtual void begin() = 0;  // call when a forward begins
  // weight: a part of Params::weights(). Work that is queued on stream `on` after this call reads gathered values.
  virtual void need(ConstTensor weight, const Stream& on) = 0;
};

}  // namespace triad
