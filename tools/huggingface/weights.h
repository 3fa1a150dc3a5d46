// Writes a checkpoint's weights as safetensors files: one file, or several and the index that transformers reads.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "io/weight_index.h"

namespace triad {

struct ExportedTensor {
  const TensorEntry* entry;  // tensor in the files read
  std::string name;          // name in the files written
  Shape shape;
};

struct WrittenWeights {
  int64_t bytes = 0;  // all tensors together
  size_t files = 1;
};

// Writes the tensors as `dtype`, f32 or bf16, to folder/model.safetensors. If they have more than most_bytes bytes,
// they are split in order into files with at most that many (a larger tensor has its own file), and
// model.safetensors.index.json names each tensor's file (io/weight_index.h). One tensor at a time is in memory. Throws
// an Error that names file, tensor and value if a value is not finite, or has no finite bf16.
WrittenWeights write_weights(const WeightIndex& from, std::span<const ExportedTensor> tensors, DType dtype,
                             int64_t most_bytes, const std::string& folder);

}  // namespace triad
