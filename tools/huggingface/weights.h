// Writes a checkpoint's weights as safetensors files: one file, or several and the index that transformers reads.
#pragma once
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "io/weight_index.h"

namespace triad {

struct ExportedTensor {
  const SafetensorsFile* file;  // the file read
  const TensorEntry* entry;     // its tensor
  std::string name;             // name in the files written
  Shape shape;
  std::function<void(std::span<float>)> change = {};  // changes the whole tensor's values before they are written
};

struct WrittenWeights {
  int64_t bytes = 0;  // all tensors together
  size_t files = 1;
};

// Writes the tensors as `dtype`, f32 or bf16, to folder/STEM.safetensors. If they have more than most_bytes bytes,
// they are split in order into files with at most that many (a larger tensor has its own file), and
// STEM.safetensors.index.json names each tensor's file (io/weight_index.h). One tensor at a time is in memory. Throws
// an Error that names file, tensor and value if a value is not finite, or has no finite bf16.
WrittenWeights write_weights(std::span<const ExportedTensor> tensors, DType dtype, int64_t most_bytes,
                             const std::string& folder, const std::string& stem = kWeightsStem);

}  // namespace triad
