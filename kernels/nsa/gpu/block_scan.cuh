// The exclusive prefix sum over a CTA, by CUB.
#pragma once
#include <cub/block/block_scan.cuh>

namespace triad::cuda {

// The sum of `mine` over the threads before this one; total: over all kThreads threads. plus(a, b) adds two values, and
// T{} is zero. Called by all threads of the CTA.
template <int kThreads, class T, class Plus>
__device__ __forceinline__ T exclusive_scan(const T& mine, T& total, Plus&& plus) {
  using Scan = cub::BlockScan<T, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage storage;
  T before;
  Scan(storage).ExclusiveScan(mine, before, T{}, plus, total);
  __syncthreads();  // all threads have read `storage` before the next call overwrites it
  return before;
}

}  // namespace triad::cuda
