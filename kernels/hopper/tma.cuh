// Hopper's bulk tensor copies (TMA). One thread starts copying a box, a part of a tensor; the copy engine transfers it
// between global and shared memory, where it has the swizzled layout that wgmma reads (hopper/shared_memory.cuh).
// Elements outside the tensor are read as zeros and not written. A load reports its bytes to a barrier
// (hopper/mbarrier.cuh). Stores and bulk additions (hopper/reduce.cuh) form bulk groups, for which a thread can wait.
#pragma once
#include <cuda.h>

#include "kernels/common/tile_mma.cuh"
#include "kernels/hopper/mbarrier.cuh"
#include "kernels/hopper/shared_memory.cuh"

namespace triad::cuda {

// Loads the box at (column, row, head, batch) in the map's tensor to shared memory. Its bytes count at barrier b.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, int column, int row, int head, int batch,
                                         Barrier* b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(b)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
// The same for every cluster CTA whose bit is set in `ctas`, at the same offset in each CTA's shared memory and with
// the same barrier.
__device__ __forceinline__ void copy_box_multicast(void* to, const CUtensorMap& map, int column, int row, int head,
                                                   int batch, Barrier* b, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(b)), "r"(column), "r"(row), "r"(head), "r"(batch), "h"(ctas)
      : "memory");
}

// Stores a box from shared memory, as part of this thread's next bulk group. The threads that wrote `from` must call
// fence_async_proxy() before.
__device__ __forceinline__ void store_box(const CUtensorMap& map, const void* from, int column, int row, int head,
                                          int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
// Ends this thread's current bulk group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's bulk groups have yet to read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all of this thread's bulk groups are complete.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// What a map describes: sizes, and strides in bytes, innermost axis first.
struct BoxMapKey {
  const void* data;
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box_columns, box_rows, box_heads;
  friend bool operator==(const BoxMapKey&, const BoxMapKey&) = default;
  size_t hash() const {
    size_t h = reinterpret_cast<uintptr_t>(data) / 16 + box_rows + box_heads * 256;
    for (const cuuint64_t n : sizes) h = h * 31 + n;
    for (const cuuint64_t n : strides) h = h * 31 + n;
    return h ^ h / 64 ^ h / 4096;
  }
};

inline CUtensorMap encode_box_map(const BoxMapKey& k) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
    TRIAD_CHECK(found == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  const cuuint32_t box[4] = {k.box_columns, k.box_rows, k.box_heads, 1}, steps[4] = {1, 1, 1, 1};
  TRIAD_CHECK(k.box_columns == kPanel || k.box_columns == kPanel / 2, "boxes of {} columns", k.box_columns);
  const auto swizzle = k.box_columns == kPanel ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  CUtensorMap map;
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(k.data), k.sizes,
                                 k.strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TRIAD_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refuses: error {}", static_cast<int>(result));
  return map;
}

// Makes the map by which TMA copies boxes from or to a [batch, rows, heads, width] view. A box has box_columns columns
// (64, or 32 for tiles that wide), box_rows rows and box_heads heads. A map is a function of its key alone, so each
// thread keeps its last maps: a step calls the same kernels with the same addresses again and again, and encoding takes
// the host longer than finding a map.
inline CUtensorMap make_box_map(const View<const __nv_bfloat16>& v, int64_t batch, int64_t rows, int64_t heads,
                                int box_rows, int box_heads = 1, int box_columns = kPanel) {
  // A one-element axis may have any stride in a view, but the encoder rejects strides that the engine cannot use.
  const auto stride_bytes = [](int64_t stride, int64_t size) {
    return static_cast<cuuint64_t>(size > 1 ? stride * 2 : kPanelRowBytes);
  };
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(std::max<int64_t>(n, 1)); };
  const BoxMapKey key{v.data,
                      {size(v.width), size(rows), size(heads), size(batch)},
                      {stride_bytes(v.row, rows), stride_bytes(v.head, heads), stride_bytes(v.batch, batch)},
                      static_cast<cuuint32_t>(box_columns),
                      static_cast<cuuint32_t>(box_rows),
                      static_cast<cuuint32_t>(box_heads)};
  struct Kept {
    CUtensorMap map;
    BoxMapKey key;
  };
  constexpr size_t kKept = 64;
  static thread_local Kept kept[kKept];  // zeros at first: no key has box_rows = 0
  Kept& found = kept[key.hash() % kKept];
  if (!(found.key == key)) found = {encode_box_map(key), key};
  return found.map;
}

}  // namespace triad::cuda
