// Hopper's bulk tensor copies (TMA): one thread asks for a box of a tensor, the copy engine lays it into shared memory
// swizzled as wgmma reads it (hopper/wgmma.cuh), rows outside the tensor as zeros, and counts the bytes on a barrier in
// shared memory. A barrier completes a phase when its arrivals and bytes have all come; waiting names the parity of the
// phase, 0 for the first.
#pragma once
#include <cuda.h>

#include "kernels/common/tile_mma.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace triad::cuda {

using Barrier = uint64_t;

__device__ __forceinline__ void barrier_init(Barrier* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
// After the inits, before a barrier of the threads: the copy engine sees them too.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// Arrives, and announces bytes to come.
__device__ __forceinline__ void barrier_expect(Barrier* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(Barrier* b, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra arrived;\nbra again;\narrived:\n}" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}

// The box at (column, row, head, batch) of the map's tensor into shared memory.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, int column, int row, int head, int batch,
                                         Barrier* b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(b)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Boxes of 64 columns (128 bytes) and box_rows rows of box_heads heads of a [batch, rows, heads, width] view.
inline CUtensorMap make_box_map(const View<const __nv_bfloat16>& v, int64_t batch, int64_t rows, int64_t heads,
                                int box_rows, int box_heads = 1) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
    TRIAD_CHECK(found == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  // An axis of one element may have any stride; the engine wants one that it could take.
  const auto stride_bytes = [](int64_t stride, int64_t size) {
    return static_cast<cuuint64_t>(size > 1 ? stride * 2 : kPanelRowBytes);
  };
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(std::max<int64_t>(n, 1)); };
  const cuuint64_t sizes[4] = {size(v.width), size(rows), size(heads), size(batch)};
  const cuuint64_t strides[3] = {stride_bytes(v.row, rows), stride_bytes(v.head, heads), stride_bytes(v.batch, batch)};
  const cuuint32_t box[4] = {kPanel, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(box_heads), 1},
                   steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<__nv_bfloat16*>(v.data), sizes,
                                 strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TRIAD_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refuses: error {}", static_cast<int>(result));
  return map;
}

}  // namespace triad::cuda
