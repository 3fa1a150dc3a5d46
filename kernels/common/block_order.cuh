// block_from_end() lets a kernel process the rows of a tensor from the last row to the first.
//
// Suppose one kernel writes a tensor from its first row to its last, and the next kernel reads the tensor. If the
// tensor is larger than the L2 cache, L2 then holds the last rows only. A kernel that begins with the last rows finds
// them in L2; a kernel that begins with the first rows finds nothing, and replaces the last rows before it gets to
// them. So kernels that memory bandwidth limits begin with the last rows. GPUs start the CTAs of a grid in the order of
// blockIdx.x in practice; results do not depend on it. Measurements are in tests/baselines/notes/step.md.
#pragma once
#include <cstdint>

namespace triad::cuda {

// Returns the index of this CTA along x, counted from the end of the grid. The last CTA has index 0.
__device__ __forceinline__ uint32_t block_from_end() { return gridDim.x - 1 - blockIdx.x; }

}  // namespace triad::cuda
