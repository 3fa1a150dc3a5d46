// block_from_end() lets a kernel process a tensor's rows from last to first.
//
// Suppose one kernel writes a tensor from its first row to its last, and the next kernel reads the tensor. If the
// tensor is larger than the L2 cache, L2 then holds the last rows only. A kernel that begins with the last rows finds
// them in L2; a kernel that begins with the first rows finds nothing, and replaces the last rows before it gets to
// them. So kernels that memory bandwidth limits begin with the last rows. GPUs start a grid's CTAs by ascending
// blockIdx.x in practice; results do not depend on it. Measurements are in tests/baselines/findings/step.md.
#pragma once
#include <cstdint>

namespace triad::cuda {

// This CTA's index along x, counted from the grid's end: the last CTA has index 0.
__device__ __forceinline__ uint32_t block_from_end() { return gridDim.x - 1 - blockIdx.x; }

}  // namespace triad::cuda
