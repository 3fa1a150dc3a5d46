// The order in which the CTAs of memory-bound kernels process rows: the last rows first.
//
// CUDA starts the CTAs of a grid in the order of blockIdx.x. The kernel before has usually written the rows in ascending
// order, so the L2 cache still holds the last ones. A kernel that begins with these reads them from L2. The rows that
// it writes last, and so leaves in L2, are the first ones, with which the matrix product after it begins.
#pragma once
#include <cstdint>

namespace triad::cuda {

// Returns the index of this CTA along x, counted from the end of the grid.
__device__ __forceinline__ int64_t block_from_end() { return int64_t{gridDim.x} - 1 - blockIdx.x; }

}  // namespace triad::cuda
