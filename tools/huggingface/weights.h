// Writes the weights of a checkpoint as safetensors files: one file, or several and the index that transformers reads.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "io/weight_index.h"

namespace triad {

struct ExportedTensor {
  const TensorEntry* entry;  // in the files that are read
  std::string name;          // in the files that are written
  Shape shape;
};

struct WrittenWeights {
  int64_t bytes = 0;  // of all tensors
  size_t files = 1;
};

// Writes the tensors as `dtype`, f32 or bf16, to folder/model.safetensors. If they have more than most_bytes bytes,
// they are split in their order into files of at most that many (a larger tensor has a file of its own), and
// model.safetensors.index.json names the file of each (io/weight_index.h). One tensor at a time is in memory. Throws an
// Error that names file, tensor and value if a value is not finite, or has no bf16 that is.
WrittenWeights write_weights(const WeightIndex& from, std::span<const ExportedTensor> tensors, DType dtype,
                             int64_t most_bytes, const std::string& folder);

}  // namespace triad
