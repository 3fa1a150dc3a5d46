// StatePart: the values of some parameters in host memory: what one file of a checkpoint holds. It is filled on the
// device's stream from buckets of the flat buffers, so that no rank needs room for the values of all parameters.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "engine/context.h"
#include "engine/memory.h"
#include "model/params.h"
#include "train/checkpoint/file_plan.h"
#include "train/flat_buffer.h"

namespace triad {

// Receives values f32 [elements.size()] of these elements of the flat parameter buffer. They may change after the call,
// but not before the work that it queues on ctx.stream.
using BucketVisitor = std::function<void(const ElementRange& elements, const Tensor& values)>;

class StatePart {
 public:
  // buffers: how many values of each parameter are held. The memory is pinned if device is a GPU.
  StatePart(const Params&, const ParamRange&, Device, int buffers);

  const ParamRange& params() const { return range_; }
  int64_t bytes() const { return elements_ * static_cast<int64_t>(sizeof(float)); }  // of one buffer
  // Queues the copy of those elements that belong to this part.
  void copy(Context&, int buffer, const ElementRange& elements, const Tensor& values) const;
  // The values of a parameter without padding. The copies must have been completed.
  std::span<const float> values(int buffer, int64_t param) const;

 private:
  Tensor room(int buffer, int64_t param) const;  // f32 [elements without padding]

  const Params& params_;
  ParamRange range_;
  std::vector<int64_t> offset_;  // of each parameter of the range, in a buffer
  int64_t elements_ = 0;         // of a buffer
  PinnedMemory memory_;
};

// Writes a file of a part: every buffer's values of each parameter, as tensors PREFIX + NAME.
void write_part(const StatePart&, const Params&, const std::vector<NamedBuffer>&, DType, const std::string& path);

}  // namespace triad
