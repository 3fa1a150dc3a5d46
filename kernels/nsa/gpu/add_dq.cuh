// add_dq(): the part of the portable backward kernel (nsa/gpu/dkdv.cu) that adds to dq. A CTA in that kernel keeps some
// keys k, and takes some query rows in each step. From their score gradient ds, add_dq() computes the product ds k, and
// adds it to the rows' dq in global memory.
//
// A warp adds faster if it covers 128 contiguous bytes per row than if it covers 64 bytes in each of twice as many
// rows. After the product, however, a lane has two neighbouring columns in several rows. Two functions bring the
// products into the faster order. Both use shared memory bandwidth; shuffles use it too.
//   - add_from_registers() needs 16 shuffles for 32 rows and 32 columns. It is used for head width 64, and only if the
//     code is compiled for sm_90 or later, where one instruction adds four floats per thread. Before the first product,
//     interleave_columns() has reordered k's columns, so that a lane has four neighbouring dq columns.
//   - add_through_shared() stores the products to shared memory and loads them again, which takes as long as 64
//     shuffles. It is used everywhere else.
#pragma once
#include "kernels/common/tile_mma.cuh"
#include "kernels/nsa/gpu/attend.cuh"

namespace triad::cuda {
namespace {

// Whether the architecture that this code is compiled for has an instruction that adds four floats per thread to global
// memory.
#if __CUDA_ARCH__ >= 900
constexpr bool kAddsVectors = true;
#else
constexpr bool kAddsVectors = false;
#endif
constexpr int kDqSide = 32;  // a warp computes this many dq rows and this many columns in add_dq()

// Adds x's N floats to to[0 .. N - 1] in global memory. L2 performs the additions.
template <int N>
__device__ __forceinline__ void add_columns(float* to, const float (&x)[N]) {
  static_assert(N == 1 || N == 4);
  if constexpr (N == 4)
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
  else
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x[0]) : "memory");
}

// Reorders the columns in 16 rows of k in shared memory, 64 columns each. One warp calls it for its rows. Every 16
// columns are reordered alike. With columns numbered from 0, places 0 to 7 get columns 0 1 4 5 8 9 12 13, and places 8
// to 15 get columns 2 3 6 7 10 11 14 15. In a product ds k, a lane has the places 2 c, 2 c + 1, 8 + 2 c and 9 + 2 c in
// every 16, where c = lane % 4. With the new order these are dq's columns 4 c to 4 c + 3.
__device__ __forceinline__ void interleave_columns(__nv_bfloat16* k, int stride) {
  __syncwarp();  // the warp has read k in the old order
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    auto* at = reinterpret_cast<uint4*>(k + threadIdx.x % 16 * stride + 16 * (threadIdx.x % 32 / 16 + 2 * i));
    const uint4 x = at[0], y = at[1];
    at[0] = make_uint4(x.x, x.z, y.x, y.z);
    at[1] = make_uint4(x.y, x.w, y.y, y.w);
  }
}

// The next two functions add scale * dq to a step's 32 query rows, in 32 columns. Each term is rounded to a multiple of
// the row's rounding_unit / 2^23 before it is added, so that all additions are exact (nsa/gpu/rounding_unit.cu). The
// parameters:
//   dq     the calling warp's product ds k. dq[i] has the rows 16 i to 16 i + 15 of the 32, in the register layout from
//          common/tile_mma.cuh
//   rows   the step's StageRows (nsa/gpu/dkdv.cu); rounding_unit and dq_place are used
//   row0   the index in the step where the 32 rows begin
//   to     the address where the 32 columns begin, in dq's first query row for the CTA's sequence and group
//   scale  1 / sqrt(dk)

// interleave_columns() must have reordered k's columns. Let c = lane % 4. In each of its rows, a lane then has columns
// 4 c to 4 c + 3 (left part) and 16 + 4 c to 16 + 4 c + 3 (right part). Lanes with the same c in rows 2 i and 2 i + 1
// exchange values: the even row's lane gives its right part and gets the odd row's left part. Then one warp instruction
// adds all 32 columns for four even rows, and a second one for four odd rows.
template <class Rows>
__device__ __forceinline__ void add_from_registers(const float (&dq)[2][kDqSide / 8][4], const Rows& rows, int row0,
                                                   float* to, float scale) {
  constexpr int kNextRow = 4;  // the distance from a lane to the one that has the next row's same columns
  const bool odd = fragment_row() % 2 != 0;
  auto* const dq_lane = reinterpret_cast<float4*>(to + 4 * (threadIdx.x % 4) + (odd ? 16 : 0));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = row0 + fragment_row() + 8 * i;
    const float unit = rows.rounding_unit[row];
    float even_row[4], odd_row[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const auto rounded = [&](int j) { return round_to_unit(dq[i / 2][j + e / 2][i % 2 * 2 + e % 2], scale, unit); };
      // left and right: the elements in columns 4 c + e and 16 + 4 c + e of this lane's row. other: the element that
      // this lane gets from the neighbouring row's lane.
      const float left = rounded(0), right = rounded(2);
      const float other = __shfl_xor_sync(kFullWarp, odd ? left : right, kNextRow);
      even_row[e] = odd ? other : left;
      odd_row[e] = odd ? right : other;
    }
    const uint2 place = *reinterpret_cast<const uint2*>(&rows.dq_place[row & ~1]);
    add_columns(reinterpret_cast<float*>(dq_lane + place.x), even_row);
    add_columns(reinterpret_cast<float*>(dq_lane + place.y), odd_row);
  }
}

// k's columns must be in their original order. sums: 4 KiB of shared memory that only this warp uses.
template <class Rows>
__device__ __forceinline__ void add_through_shared(const float (&dq)[2][kDqSide / 8][4], const Rows& rows, int row0,
                                                   float* to, float scale, float* sums) {
  // `sums` has kDqSide floats per row. Column c of row r is at place c ^ (r % 4 * 8) in the row. Without this
  // permutation, all rows' column c would be in the same shared memory bank, and the stores below would conflict.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = fragment_row() + 8 * i;
    const float unit = rows.rounding_unit[row0 + row];
    const auto rounded = [&](float x) { return round_to_unit(x, scale, unit); };
#pragma unroll
    for (int j = 0; j < kDqSide / 8; ++j) {
      const float(&x)[4] = dq[i / 2][j];
      *reinterpret_cast<float2*>(sums + row * kDqSide + ((8 * j + fragment_column()) ^ row % 4 * 8)) =
          make_float2(rounded(x[i % 2 * 2]), rounded(x[i % 2 * 2 + 1]));
    }
  }
  __syncwarp();
  // In one instruction, each thread adds kAdded columns in one row, so the warp adds 32 columns in kAdded rows. To hide
  // latency, the warp loads the sums for kBatch instructions before it executes the first one.
  constexpr int kAdded = kAddsVectors ? 4 : 1, kBatch = 8;
  const int lane = threadIdx.x % 32, lane_row = lane * kAdded / kDqSide, column = lane * kAdded % kDqSide;
#pragma unroll
  for (int first = 0; first < kDqSide; first += kBatch * kAdded) {
    float x[kBatch][kAdded];
    uint32_t place[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kAdded + lane_row;
      const float* from = sums + row * kDqSide + (column ^ row % 4 * 8);
      place[i] = rows.dq_place[row0 + row];
      if constexpr (kAdded == 4)
        *reinterpret_cast<float4*>(x[i]) = *reinterpret_cast<const float4*>(from);
      else
        x[i][0] = *from;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) add_columns(to + uint64_t{4} * place[i] + column, x[i]);
  }
}

// Adds scale * ds k to dq. Each warp does this for 32 of the step's query rows and 32 columns. kInterleaved: whether
// interleave_columns() has reordered k's columns. `rows` and `scale` are described above add_from_registers(). dq_group
// is the global memory address where dq begins for the CTA's sequence and group. The other arrays are in shared memory:
//   ds    the score gradient, transposed: it has a row for each of the CTA's keys, and a column for each of the step's
//         query rows
//   k     the CTA's keys
//   sums  memory for add_through_shared()'s products, 4 KiB per warp; it is not used if kInterleaved is true
template <class Tile, bool kInterleaved, class Rows>
__device__ __forceinline__ void add_dq(const __nv_bfloat16* ds, int stride_ds, const __nv_bfloat16* k, int stride_k,
                                       float* sums, const Rows& rows, float* dq_group, float scale) {
  constexpr int kRowTiles = Tile::kKeys / kDqSide;
  static_assert(Tile::kThreads / 32 / kRowTiles * kDqSide == Tile::kColumns);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row0 = warp % kRowTiles * kDqSide, column0 = warp / kRowTiles * kDqSide;
  const __nv_bfloat16* ds_at = ds + (lane % 8 + lane / 16 * 8) * stride_ds + row0 + lane / 8 % 2 * 8;
  const __nv_bfloat16* k_at = k + lane % 16 * stride_k + column0 + lane / 16 * 8;
  float dq[2][kDqSide / 8][4] = {};
#pragma unroll
  for (int key = 0; key < Tile::kRows; key += 16) {
    uint32_t a_fragment[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) load_matrices_transposed(a_fragment[i], ds_at + key * stride_ds + 16 * i);
#pragma unroll
    for (int j = 0; j < kDqSide / 8; j += 2) {
      uint32_t b_fragment[4];
      load_matrices_transposed(b_fragment, k_at + key * stride_k + 8 * j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma_m16n8k16(dq[i][j], a_fragment[i], b_fragment[0], b_fragment[1]);
        mma_m16n8k16(dq[i][j + 1], a_fragment[i], b_fragment[2], b_fragment[3]);
      }
    }
  }
  if constexpr (kInterleaved)
    add_from_registers(dq, rows, row0, dq_group + column0, scale);
  else
    add_through_shared(dq, rows, row0, dq_group + column0, scale, sums + warp * kDqSide * kDqSide);
}

}  // namespace
}  // namespace triad::cuda
