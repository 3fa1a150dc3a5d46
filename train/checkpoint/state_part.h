// StatePart: the values of some parameters in host memory: what one file of a checkpoint holds. It is filled on the
// device's stream from buckets of the flat buffers, so that no rank needs room for the values of all parameters.
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

// Receives values [elements.size()], f32 or bf16, of these elements of the flat parameter buffer. They may change after
// the call, but not before the work that it queues on ctx.stream.
using BucketVisitor = std::function<void(const ElementRange& elements, const Tensor& values)>;

class StatePart {
 public:
  // The values of a kind, f32 or bf16, of all parameters or of those that `has` chooses.
  struct Buffer {
    DType dtype;
    std::function<bool(const ParamSpec&)> has = {};
  };
  // The memory is pinned if device is a GPU.
  StatePart(const Params&, const ParamRange&, Device, std::vector<Buffer>);

  const ParamRange& params() const { return range_; }
  DType dtype(int buffer) const { return buffers_[static_cast<size_t>(buffer)].dtype; }
  // Queues the copy of those elements that belong to this part.
  void copy(Context&, int buffer, const ElementRange& elements, const Tensor& values) const;
  // The values of a parameter [elements without padding], [0] if the buffer has none of it. The copies must have been
  // completed before they are read.
  Tensor values(int buffer, int64_t param) const;

 private:
  const Params& params_;
  ParamRange range_;
  std::vector<Buffer> buffers_;
  std::vector<std::vector<int64_t>> begin_;  // of each buffer and parameter of the range and its end, bytes
  PinnedMemory memory_;
};

// Writes a file of a part: every buffer's values of each parameter, as tensors PREFIX + NAME, in the part's dtypes or
// rounded to another one.
void write_part(const StatePart&, const Params&, const std::vector<NamedBuffer>&, const std::string& path,
                std::optional<DType> dtype = {});

}  // namespace triad
