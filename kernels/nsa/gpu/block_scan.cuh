// Exclusive prefix sum over a CTA's threads, computed by cub::BlockScan.
#pragma once
#include <cub/block/block_scan.cuh>

namespace triad::cuda {

// Returns `mine` summed over the CTA's threads with a lower index, and sets `total` to the sum over all kThreads
// threads. plus(a, b) adds two T values, whose zero is T{}. All the CTA's threads must call it.
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
