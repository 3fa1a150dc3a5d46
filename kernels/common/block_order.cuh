// The order in which the CTAs of memory-bound kernels process rows: from the last row to the first.
//
// In practice a GPU starts the CTAs of a grid in the order of blockIdx.x; only speed depends on this. Most kernels
// write their rows in ascending order, and so leave the last rows in the L2 cache. A kernel that processes the last
// rows first reads them from L2. Such a kernel leaves the first rows in L2, and the matrix product that usually follows
// reads the first rows first. Measured (tests/baselines/notes/step.md), these kernels gain, and the products do not.
#pragma once
#include <cstdint>

namespace triad::cuda {

// Returns the index of this CTA along x, counted from the end of the grid: 0 for the last CTA.
__device__ __forceinline__ uint32_t block_from_end() { return gridDim.x - 1 - blockIdx.x; }

}  // namespace triad::cuda
