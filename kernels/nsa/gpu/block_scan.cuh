// Exclusive prefix sum over the threads of a CTA, computed by cub::BlockScan.
#pragma once
#include <cub/block/block_scan.cuh>

namespace triad::cuda {

// Returns the sum of `mine` over the threads of the CTA with a lower index, and sets `total` to the sum over all
// kThreads threads. plus(a, b) adds two values of type T, whose zero is T{}. All threads of the CTA must call it.
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
