// add_dq(): the part of the portable backward kernel (nsa/gpu/dkdv.cu) that adds to dq. A CTA of that kernel keeps some
// keys k, and takes some query rows in each of its steps. From the gradient ds of the scores of these rows and keys,
// add_dq() computes the product ds k, and adds it to dq of the rows.
#pragma once
#include "kernels/common/tile_mma.cuh"
#include "kernels/nsa/gpu/attend.cuh"

namespace triad::cuda {
namespace {

// If `exists` is true, adds the N floats of x to to[0 .. N - 1] in global memory. L2 performs the additions. The
// instruction is predicated on `exists`, because a branch around it would make the kernel 3% slower.
template <int N>
__device__ __forceinline__ void add_columns(float* to, const float (&x)[N], bool exists) {
  static_assert(N == 1 || N == 4);
  if constexpr (N == 4)
    asm volatile(R"({
        .reg .pred exists;
        setp.ne.s32 exists, %5, 0;
        @exists red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};
        })" ::"l"(to),
                 "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(static_cast<int>(exists))
                 : "memory");
  else
    asm volatile(R"({
        .reg .pred exists;
        setp.ne.s32 exists, %2, 0;
        @exists red.relaxed.gpu.global.add.f32 [%0], %1;
        })" ::"l"(to),
                 "f"(x[0]), "r"(static_cast<int>(exists))
                 : "memory");
}

// Adds scale * ds k to dq. Each warp of the CTA does this for 32 query rows of the step and 32 columns. dq_group is the
// address, in global memory, of dq of the first query row of the CTA's sequence and group. The other arrays are in
// shared memory:
//   ds    the gradient of the scores, transposed: it has a row for each key of the CTA, and a column for each query row
//         of the step
//   k     the CTA's keys
//   sums  4 KiB for the products of this warp
//   rows  two numbers for each query row of the step. dq_offset: dq of the row begins at dq_group + 4 * dq_offset. If
//         dq_offset is negative, nothing is added to the row. rounding_unit: a number r. Every term is rounded to a
//         multiple of r / 2^23 before it is added, so that all additions are exact (nsa/gpu/rounding_unit.cu).
// After the product, a lane has a few columns of each of several rows. If the warp added them from these registers, one
// instruction would add to eight rows, which takes longer. So the warp stores the products to `sums` and loads them in
// another order: one instruction then adds to all 32 columns, 128 contiguous bytes, of each of its rows.
template <class Tile, class Rows>
__device__ __forceinline__ void add_dq(const __nv_bfloat16* ds, int stride_ds, const __nv_bfloat16* k, int stride_k,
                                       float* sums, const Rows& rows, float* dq_group, float scale) {
  constexpr int kSide = 32, kRowTiles = Tile::kKeys / kSide;
  static_assert(Tile::kThreads / 32 / kRowTiles * kSide == Tile::kColumns);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row0 = warp % kRowTiles * kSide, column0 = warp / kRowTiles * kSide;
  const __nv_bfloat16* ds_at = ds + (lane % 8 + lane / 16 * 8) * stride_ds + row0 + lane / 8 % 2 * 8;
  const __nv_bfloat16* k_at = k + lane % 16 * stride_k + column0 + lane / 16 * 8;
  float dq[2][kSide / 8][4] = {};  // dq[i] has the rows 16 i to 16 i + 15 of the warp's 32
#pragma unroll
  for (int key = 0; key < Tile::kRows; key += 16) {
    uint32_t a_fragment[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) load_matrices_transposed(a_fragment[i], ds_at + key * stride_ds + 16 * i);
#pragma unroll
    for (int j = 0; j < kSide / 8; j += 2) {
      uint32_t b_fragment[4];
      load_matrices_transposed(b_fragment, k_at + key * stride_k + 8 * j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma_m16n8k16(dq[i][j], a_fragment[i], b_fragment[0], b_fragment[1]);
        mma_m16n8k16(dq[i][j + 1], a_fragment[i], b_fragment[2], b_fragment[3]);
      }
    }
  }
  // `sums` has kSide floats per row. Column c of row r is at place c ^ (r % 4 * 8) of the row. Without this
  // permutation, one column of all rows would be in the same bank of shared memory, and the stores below would
  // conflict.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = fragment_row() + 8 * i;
    const float unit = rows.rounding_unit[row0 + row];
    const auto rounded = [&](float x) { return round_to_unit(x, scale, unit); };
#pragma unroll
    for (int j = 0; j < kSide / 8; ++j) {
      const float(&x)[4] = dq[i / 2][j];
      *reinterpret_cast<float2*>(sums + row * kSide + ((8 * j + fragment_column()) ^ row % 4 * 8)) =
          make_float2(rounded(x[i % 2 * 2]), rounded(x[i % 2 * 2 + 1]));
    }
  }
  __syncwarp();
#if __CUDA_ARCH__ >= 900
  constexpr int kAdded = 4;  // columns that a thread adds at a time
#else
  constexpr int kAdded = 1;
#endif
  // One instruction of the warp adds kAdded rows. The warp loads the sums of kBatch instructions before it adds them,
  // so as not to wait for each load.
  constexpr int kBatch = 8;
  const int lane_row = lane * kAdded / kSide, column = lane * kAdded % kSide;
#pragma unroll
  for (int first = 0; first < kSide; first += kBatch * kAdded) {
    float x[kBatch][kAdded];
    int offset[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kAdded + lane_row;
      const float* from = sums + row * kSide + (column ^ row % 4 * 8);
      offset[i] = rows.dq_offset[row0 + row];
      if constexpr (kAdded == 4)
        *reinterpret_cast<float4*>(x[i]) = *reinterpret_cast<const float4*>(from);
      else
        x[i][0] = *from;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      add_columns(dq_group + 4 * static_cast<int64_t>(offset[i]) + column0 + column, x[i], offset[i] >= 0);
  }
}

}  // namespace
}  // namespace triad::cuda
