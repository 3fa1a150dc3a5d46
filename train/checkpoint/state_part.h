// StatePart: some parameters' values in host memory: what one checkpoint file holds. It is filled on the device's
// stream from buckets of the flat buffers, so no rank needs room for all parameters' values.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/context.h"
#include "engine/memory.h"
#include "model/params.h"
#include "train/checkpoint/file_plan.h"
#include "train/step/flat_buffer.h"

namespace triad {

// Receives values [elements.size()], f32 or bf16, for these elements of the flat parameter buffer. They may change
// after the call, but not before the work that it queues on ctx.stream.
using BucketVisitor = std::function<void(const ElementRange& elements, const Tensor& values)>;

class StatePart {
 public:
  // One kind of values, f32 or bf16, for all parameters or those that `has` chooses.
  struct Buffer {
    DType dtype;
    std::function<bool(const ParamSpec&)> has = {};
  };
  // The memory is pinned if device is a GPU.
  StatePart(const Params&, const ParamRange&, Device, std::vector<Buffer>);

  const ParamRange& params() const { return range_; }
  DType dtype(int buffer) const { return buffers_[static_cast<size_t>(buffer)].dtype; }
  // Queues a copy of those elements that belong to this part.
  void copy(Context&, int buffer, const ElementRange& elements, const Tensor& values) const;
  // A parameter's values [elements without padding], [0] if the buffer has none. The copies must have been completed
  // before they are read.
  Tensor values(int buffer, int64_t param) const;

 private:
  const Params& params_;
  ParamRange range_;
  std::vector<Buffer> buffers_;
  std::vector<std::vector<int64_t>> begin_;  // byte offsets by buffer and parameter in the range, and its end
  PinnedMemory memory_;
};

// Writes a part's file: every buffer's values for each parameter, as tensors PREFIX + NAME, in the part's dtypes or
// rounded to another one.
void write_part(const StatePart&, const Params&, const std::vector<NamedBuffer>&, const std::string& path,
                std::optional<DType> dtype = {});

}  // namespace triad
