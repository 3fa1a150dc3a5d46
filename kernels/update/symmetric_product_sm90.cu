// Batched symmetric matrix products on Hopper, for bf16: the tiles on and below the diagonal are computed, the others
// are stored as transposed mirror images. With 6 tiles to a side, 21 of 36 are computed.
//
// A tile of D is 128 x 128. Two consumer warpgroups process alternate tiles, each with a whole tile's sums in
// registers: while one multiplies, the other stores. A producer thread fills a ring with four slots (stages); a slot
// has 128 left-operand rows and 128 right-operand rows, each 64 wide along the inner dimension. Both are parts of X,
// and in a diagonal tile they are the same part, which is loaded once.
//
// Epilogue: a consumer writes 64 tile rows to shared memory twice, once transposed. One thread then stores both copies
// to D by TMA. TMA reads zeros outside the tensors and does not write there, so S and K need not be multiples of the
// tile sizes. The addend is read from global memory, two elements at a time.
//
// Iterations launch these kernels directly after each other, and one fills every SM, so its launch and its barriers are
// prepared while the previous kernel ends (common/launch_pdl.cuh).
//
// Bound: the tensor cores and L2 where the inner dimension is long, since a tile off the diagonal needs 64 bytes per
// cycle at their full rate; else what is written.
#include "kernels/common/bthd.cuh"
#include "kernels/common/launch_pdl.cuh"
#include "kernels/hopper/tma.cuh"
#include "kernels/hopper/wgmma.cuh"
#include "kernels/update/symmetric_product.h"

namespace triad::cuda {
namespace {

constexpr int kTile = 128, kTileK = 64, kStages = 4, kConsumers = 2, kThreads = kWarpgroup * (kConsumers + 1);
constexpr int kHalves = kTile / 64, kSums = kTile / 8;
constexpr int kOperandBytes = kTile * kPanelRowBytes;  // bytes per operand and stage
// Rows in a D box, and bytes in a panel [64][64], which is a box in D or, with trans, in X.
constexpr int kBoxRows = 64, kPanelBytes = kBoxRows * kPanelRowBytes, kPanels = kTile / kPanel;

struct Shared {
  alignas(1024) unsigned char left[kStages][kOperandBytes], right[kStages][kOperandBytes];
  // By consumer: 64 rows of D, [column panel][64 rows][64], and the same transposed, [64 rows of D^T][64] twice.
  unsigned char rows[kConsumers][kPanels * kPanelBytes], mirrored[kConsumers][kPanels * kPanelBytes];
  Barrier full[kStages], empty[kStages];
  // Completes when a consumer's last stage for a tile is full: the next stage is the other consumer's.
  Barrier last_full[kConsumers];
};

struct SymmetricMaps {
  CUtensorMap x, d;
};

struct Addend {
  const __nv_bfloat16* data;  // [n,S,S], or nullptr
  int side;                   // S
};

// All matrices' tiles, in the order in which CTAs process them: matrix by matrix, and in a matrix row by row up to the
// diagonal.
struct SymmetricTiles {
  int count, matrix_tiles, steps;  // tiles in all matrices and in one; 64-wide steps along the inner dimension
  struct Place {
    int matrix, row, column;  // row, column: the tile's first ones
    __device__ bool on_diagonal() const { return row == column; }
  };
  __device__ Place place(int tile) const {
    int row = 0, left = tile % matrix_tiles;
    while (left > row) left -= ++row;
    return {tile / matrix_tiles, row * kTile, left * kTile};
  }
};

// Loads a stage's operand: the rows of X (with trans the columns) from `first` on, at step k.
template <bool kTrans>
__device__ __forceinline__ void load_part(unsigned char* to, const CUtensorMap& x, int first, int k, int matrix,
                                          Barrier* full) {
  if constexpr (kTrans) {
#pragma unroll
    for (int p = 0; p < kPanels; ++p)
      copy_box(to + p * kPanelBytes, x, first + p * kPanel, k * kTileK, 0, matrix, full);
  } else {
    copy_box(to, x, k * kTileK, first, 0, matrix, full);
  }
}

// The producer: one thread, which loads the stages for all this CTA's tiles.
template <bool kTrans>
__device__ void produce(Shared& s, const SymmetricMaps& maps, const SymmetricTiles& tiles) {
  int n = 0;  // steps so far
  for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
    const SymmetricTiles::Place at = tiles.place(tile);
    for (int k = 0; k < tiles.steps; ++k, ++n) {
      const int stage = n % kStages;
      Barrier* const full = &s.full[stage];
      barrier_wait(&s.empty[stage], (n / kStages & 1) ^ 1);
      barrier_expect(full, at.on_diagonal() ? kOperandBytes : 2 * kOperandBytes);
      load_part<kTrans>(s.left[stage], maps.x, at.row, k, at.matrix, full);
      if (!at.on_diagonal()) load_part<kTrans>(s.right[stage], maps.x, at.column, k, at.matrix, full);
    }
  }
}

// Computes a tile's sums: d[half] has rows 64 half to 64 half + 63. n: steps in this CTA's earlier tiles.
template <bool kTrans>
__device__ __forceinline__ void multiply(float (&d)[kHalves][kSums][4], Shared& s, const SymmetricTiles& tiles,
                                         bool on_diagonal, int n, int group) {
  constexpr Major kMajor = kTrans ? Major::mn : Major::k;
  const int lane = threadIdx.x % 32;
  for (int k = 0; k < tiles.steps; ++k, ++n) {
    const int stage = n % kStages;
    barrier_wait(&s.full[stage], n / kStages & 1);
    if (k == tiles.steps - 1 && lane == 0) barrier_arrive(&s.last_full[group]);
    const uint32_t left = shared_address(s.left[stage]), right = on_diagonal ? left : shared_address(s.right[stage]);
    wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < kTileK / 16; ++k16) {
      constexpr int kStep = kTrans ? 16 * kPanelRowBytes : 32;  // bytes to the next 16 along the inner dimension
#pragma unroll
      for (int half = 0; half < kHalves; ++half)  // 64 left-operand rows are kPanelBytes in both layouts
        wgmma<kMajor, kMajor>(
            d[half], tile_descriptor(left + half * kPanelBytes + k16 * kStep),
            kTrans ? tile_descriptor(right + k16 * kStep, kPanelBytes) : tile_descriptor(right + k16 * kStep),
            k > 0 || k16 > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();  // the products that read the previous stage have finished
    if (k > 0 && lane == 0) barrier_arrive(&s.empty[(n - 1) % kStages]);
  }
  wgmma_wait<0>();
  pin(d[0]), pin(d[1]);
  if (lane == 0) barrier_arrive(&s.empty[(n - 1) % kStages]);
}

// Reads the addend where this lane's sums in 64 rows are, as pairs: for d[j][0, 1] and d[j][2, 3]. Zeros outside the
// matrix. row, column: where these rows begin.
__device__ __forceinline__ void load_addend(uint32_t (&pairs)[kSums][2], const Addend& addend, int matrix, int row,
                                            int column) {
  const int lane = threadIdx.x % 32, first = row + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int64_t side = addend.side;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = first + 8 * i;
    const __nv_bfloat16* const from = addend.data + (matrix * side + r) * side;
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      const int c = column + 8 * j + lane % 4 * 2;
      pairs[j][i] = r < side && c < side ? *reinterpret_cast<const uint32_t*>(from + c) : 0;
    }
  }
}

// Stores 64 tile rows, and their transpose if the tile is not on the diagonal. row: the first of these rows.
template <bool kAddend>
__device__ __forceinline__ void store_rows(const float (&d)[kSums][4], Shared& s, const CUtensorMap& map, float alpha,
                                           const Addend& addend, const SymmetricTiles::Place& at, int row, int group) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const bool stores = threadIdx.x % kWarpgroup == 0;
  uint32_t pairs[kSums][2];
  if constexpr (kAddend) load_addend(pairs, addend, at.matrix, row, at.column);
#pragma unroll
  for (int j = 0; j < kSums; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x = alpha * d[j][2 * i], y = alpha * d[j][2 * i + 1];
      if constexpr (kAddend) x += __uint_as_float(pairs[j][i] << 16), y += __uint_as_float(pairs[j][i] & 0xffff0000u);
      pairs[j][i] = pack_bf16(x, y);
    }
  if (stores) bulk_wait_read<0>();  // waits until the buffers are free
  named_barrier_sync<kWarpgroup>(1 + group);
#pragma unroll
  // An instruction stores four 8x8 matrices: rows 0..7 and 8..15 in eight columns, then in the next eight.
  for (int j = 0; j < kSums; j += 2) {
    const uint32_t four[4] = {pairs[j][0], pairs[j][1], pairs[j + 1][0], pairs[j + 1][1]};
    unsigned char* const panel = s.rows[group] + j / 8 * kPanelBytes;
    store_matrices(panel + swizzled(16 * warp + lane % 16, j % 8 + lane / 16), four);
    const int mirrored_row = 8 * (j + lane / 16) + lane % 8;
    if (!at.on_diagonal())
      store_matrices_transposed(shared_address(s.mirrored[group] + swizzled(mirrored_row, 2 * warp + lane / 8 % 2)),
                                four);
  }
  fence_async_proxy();
  named_barrier_sync<kWarpgroup>(1 + group);
  if (stores) {
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      store_box(map, s.rows[group] + p * kPanelBytes, at.column + p * kPanel, row, 0, at.matrix);
      if (!at.on_diagonal())
        store_box(map, s.mirrored[group] + p * kPanelBytes, row, at.column + p * kPanel, 0, at.matrix);
    }
    bulk_commit();
  }
  __syncwarp();
}

// A consumer warpgroup: multiplies and stores every second tile in this CTA.
template <bool kTrans, bool kAddend>
__device__ void consume(Shared& s, const SymmetricMaps& maps, const SymmetricTiles& tiles, float alpha,
                        const Addend& addend) {
  const int group = threadIdx.x / kWarpgroup;
  int turn = 0;
  for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x, ++turn) {
    if (turn % kConsumers != group) continue;
    const SymmetricTiles::Place at = tiles.place(tile);
    // A barrier wait distinguishes only two successive phases of a stage, so a consumer must not lag by two: before its
    // tile, it waits until the other consumer's last stage is full.
    if (turn > 0) barrier_wait(&s.last_full[(turn - 1) % kConsumers], (turn - 1) / kConsumers & 1);
    float d[kHalves][kSums][4];
    leave_unset(d[0]), leave_unset(d[1]);
    multiply<kTrans>(d, s, tiles, at.on_diagonal(), turn * tiles.steps, group);
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      store_rows<kAddend>(d[half], s, maps.d, alpha, addend, at, at.row + half * 64, group);
  }
  if (threadIdx.x % kWarpgroup == 0) bulk_wait();
}

template <bool kTrans, bool kAddend>
__global__ void __launch_bounds__(kThreads, 1)
    symmetric_product_kernel(const __grid_constant__ SymmetricMaps maps, SymmetricTiles tiles, float alpha,
                             Addend addend) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  Shared& s = *reinterpret_cast<Shared*>(aligned_shared());
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], 4);
    for (Barrier& last_full : s.last_full) barrier_init(&last_full, 4);
    barrier_init_done();
  }
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x / kWarpgroup == kConsumers) {
    decrease_registers<40>();
    if (threadIdx.x % kWarpgroup == 0) produce<kTrans>(s, maps, tiles);
  } else {
    increase_registers<232>();
    consume<kTrans, kAddend>(s, maps, tiles, alpha, addend);
  }
#endif
}

// Describes matrices [n,rows,cols] for TMA in boxes of 64 columns and box_rows rows.
CUtensorMap matrices_map(const ConstTensor& t, int box_rows) {
  const View<const __nv_bfloat16> view{t.ptr<__nv_bfloat16>(),      t.stride[0], t.stride[1], 0,
                                       static_cast<int>(t.size(2)), true};
  return make_box_map(view, t.size(0), t.size(1), 1, box_rows);
}

template <bool kTrans, bool kAddend>
void run(Context& ctx, const Tensor& d, const ConstTensor& x, double alpha, const ConstTensor& addend) {
  const int64_t rows = ceil_div(d.size(1), kTile), matrix_tiles = rows * (rows + 1) / 2,
                count = x.size(0) * matrix_tiles;
  const SymmetricTiles tiles{static_cast<int>(count), static_cast<int>(matrix_tiles),
                             static_cast<int>(ceil_div(x.size(kTrans ? 1 : 2), kTileK))};
  const SymmetricMaps maps{matrices_map(x, kTrans ? kTileK : kTile), matrices_map(d, kBoxRows)};
  launch_pdl(ctx, "symmetric_product", symmetric_product_kernel<kTrans, kAddend>,
             dim3(std::min<int64_t>(ctx.num_sms, count)), dim3(kThreads), sizeof(Shared), maps, tiles,
             static_cast<float>(alpha),
             Addend{kAddend ? addend.ptr<__nv_bfloat16>() : nullptr, static_cast<int>(d.size(1))});
}

}  // namespace

bool symmetric_product_sm90(Context& ctx, const Tensor& d, const ConstTensor& x, const SymmetricProductOptions& o,
                            const ConstTensor& addend) {
  const auto has_rows = [](const ConstTensor& t) { return t.empty() || has_vectors(t, kVector<__nv_bfloat16>); };
  const bool fits = x.dtype == DType::bf16 && ctx.may_use_sm90() && has_rows(x) && has_rows(d) && has_rows(addend);
  record_route(ctx, "symmetric_product", x.dtype, fits ? "sm90" : nullptr, "rows that are not made of 16-byte vectors");
  if (!fits) return false;
  if (ctx.planning) return true;
  const auto with_trans = [&]<bool kTrans>() {
    if (addend.empty())
      run<kTrans, false>(ctx, d, x, o.alpha, addend);
    else
      run<kTrans, true>(ctx, d, x, o.alpha, addend);
  };
  if (o.trans)
    with_trans.template operator()<true>();
  else
    with_trans.template operator()<false>();
  return true;
}

}  // namespace triad::cuda
