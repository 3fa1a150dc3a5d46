// Reads ranges of float tensors from safetensors files as f32, with several threads: each range is cut into pieces,
// which the threads read, convert and checksum in their own buffers. So host memory holds a few pieces and no whole
// model, and large tensors and several files are read in parallel.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/tensor.h"
#include "io/safetensors.h"

namespace triad {

// A tensor's elements [begin, end) in a file, both of which must outlive the call.
struct TensorRange {
  const SafetensorsFile* file = nullptr;
  const TensorEntry* entry = nullptr;
  int64_t begin = 0, end = 0;
};

// What some of a tensor's ranges contribute to its CRC-32. A CRC-32 is linear: if ranges, read by one process or by
// several, cover a tensor exactly once, their PartialSums add up to the tensor's, in any order.
struct PartialSum {
  int64_t bytes = 0;
  uint32_t crc = 0;
  PartialSum& operator+=(const PartialSum& other) {
    bytes += other.bytes;
    crc ^= other.crc;
    return *this;
  }
};
// Throws an Error that names the tensor if the file has its checksum and the sum is another. A sum over less or more
// than the tensor's bytes passes: nothing is known about it.
void check_sum(const SafetensorsFile&, const TensorEntry&, const PartialSum&);

// Receives elements in range number `range`, from the tensor's element `first` on.
using FloatSink = std::function<void(size_t range, int64_t first, std::span<const float> values)>;

struct ReadOptions {
  Device device = Device::cpu();  // a GPU: the pieces are in pinned memory, for copies to that GPU
  int threads = 0;                // 0: one for each core, at most 8
  int64_t piece_elements = 1 << 21;
};

// Passes every element of the ranges to the sink once, in any piece order, on the calling thread. The values are valid
// until the sink returns. Verifies a tensor's checksum if a range covers it from begin to end; the results, one
// PartialSum for each range, are for the others. Throws Error for a tensor that is not F32, BF16, F16 or F64, for a
// failed read, and what the sink throws.
std::vector<PartialSum> read_ranges(std::span<const TensorRange>, const FloatSink&, const ReadOptions& = {});

}  // namespace triad
