// WeightGate: for sharded weights, which are gathered from all ranks. It makes a forward's or backward's stream wait
// until a segment's weights (Segments in params.h) are gathered, before they are read.
#pragma once
#include "engine/stream.h"
#include "engine/tensor.h"

namespace triad {

class WeightGate {
 public:
  virtual ~WeightGate() = default;
  // Call when a forward begins. It reads the segments in this order: the small parameters (Segments::rest), the
  // embedding, the layers, the head.
  virtual void begin_forward() = 0;
  // Call when a backward begins. It reads the small parameters, the head, then the layers from the last to the first.
  virtual void begin_backward() = 0;
  // Work that is queued on stream `on` after this call reads the segment's gathered values. All work that reads
  // segments needed earlier in the pass, except the small parameters, is queued on the stream already.
  virtual void need(int64_t segment, const Stream& on) = 0;
};

}  // namespace triad
