// A linear layer with SiLU as its epilogue, on Hopper, for bf16:
//   forward   pre = x w^T, y = silu(pre)                       out [M,N]: two tensors written
//   backward  dpre = (dz w) silu'(pre), y = silu(pre) again    one read, two written
// The epilogue of one tile runs while the next tile is multiplied, which hides its memory traffic.
//
// A tile of out is 128 x 192. Two consumer warpgroups process alternate tiles, each with the sums of a whole tile in
// registers: while one multiplies, the other writes. A producer thread fills a ring of four stages; a stage has
// 128 rows of A and 192 columns of B, 64 of the inner dimension each. L2 delivers some 40 bytes per cycle to an SM, and
// a CTA that loaded alone would need 53. So two CTAs form a cluster and process tiles one above the other; each loads
// half of a stage's B for both, which needs 36 bytes per cycle.
//
// Epilogue: a warp's 16 rows are written to shared memory 64 columns at a time (a piece) and stored by TMA. In
// backward, pre is loaded into the same buffer, three pieces ahead, and dpre replaces it. TMA reads zeros outside the
// tensors and does not write there, so M, N and K need not be multiples of the tile's sizes.
//
// Bound: the tensor cores. At large M the epilogue adds a fifth to the products' time in forward, more than half in
// backward.
#include "kernels/common/bthd.cuh"
#include "kernels/hopper/tma.cuh"
#include "kernels/hopper/wgmma.cuh"
#include "kernels/ops/linear_silu.h"

namespace triad::cuda {
namespace {

constexpr int kTileM = 128, kTileN = 192, kTileK = 64, kStages = 4;
constexpr int kCluster = 2, kConsumers = 2, kConsumerWarps = 4 * kConsumers, kThreads = 128 * (kConsumers + 1);
// Rows and bytes of a piece; the number of pieces for which a warp has buffers.
constexpr int kPieceRows = 16, kPieceBytes = kPieceRows * kPanelRowBytes, kPieces = 4;
constexpr int kPanels = kTileN / kPanel, kHalves = kTileM / 64, kSums = kTileN / 8;
constexpr int kStageBytes = (kTileM + kTileN) * kPanelRowBytes;
constexpr int kPanelBytesB = kPanel * kPanelRowBytes;  // backward: bytes of a panel [64 of k][64 columns] of B

struct Shared {
  alignas(1024) unsigned char a[kStages][kTileM * kPanelRowBytes], b[kStages][kTileN * kPanelRowBytes];
  unsigned char pieces[kConsumerWarps][kPieces * kPieceBytes];
  Barrier full[kStages], empty[kStages], loaded[kConsumerWarps][kPanels];
  // Completes when a consumer's last stage of a tile is full: the next stage is the other consumer's.
  Barrier last_full[kConsumers];
};

// ---- the kernel ----

struct Maps {
  CUtensorMap a, b, pre, out, y;  // out describes pre in forward, dpre in backward
};

// The tiles of a cluster in each turn: two, one above the other, one for each CTA. Consecutive turns differ in the
// column, so that A is read from memory once.
struct Tiles {
  int turns, columns, steps;  // turns of all clusters; tiles per row of tiles; steps of 64 of the inner dimension
  __device__ int row(int turn, int cta) const { return (turn / columns * kCluster + cta) * kTileM; }
  __device__ int column(int turn) const { return turn % columns * kTileN; }
};

// The producer: one thread, which loads the stages of all of this CTA's tiles.
template <bool kBackward>
__device__ void produce(Shared& s, const Maps& maps, const Tiles& tiles, int cta) {
  constexpr uint16_t kBoth = 3;  // both CTAs of the cluster, one bit each
  int n = 0;                     // number of steps so far
  for (int turn = blockIdx.x / kCluster; turn < tiles.turns; turn += gridDim.x / kCluster) {
    const int row = tiles.row(turn, cta), column = tiles.column(turn);
    for (int k = 0; k < tiles.steps; ++k, ++n) {
      const int stage = n % kStages;
      Barrier* const full = &s.full[stage];
      barrier_wait(&s.empty[stage], (n / kStages & 1) ^ 1);
      barrier_expect(full, kStageBytes);
      copy_box(s.a[stage], maps.a, k * kTileK, row, 0, 0, full);
      if constexpr (kBackward) {  // each CTA loads 32 of the stage's 64 rows of k for both CTAs
        constexpr int kHalf = kTileK / kCluster;
#pragma unroll
        for (int p = 0; p < kPanels; ++p)
          copy_box_multicast(s.b[stage] + p * kPanelBytesB + cta * kHalf * kPanelRowBytes, maps.b, column + p * kPanel,
                             k * kTileK + cta * kHalf, 0, 0, full, kBoth);
      } else {  // each CTA loads half of the columns for both CTAs
        constexpr int kHalf = kTileN / kCluster;
        copy_box_multicast(s.b[stage] + cta * kHalf * kPanelRowBytes, maps.b, k * kTileK, column + cta * kHalf, 0, 0,
                           full, kBoth);
      }
    }
  }
}

__device__ __forceinline__ float upper(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float lower(uint32_t pair) { return __uint_as_float(pair << 16); }
// 1 / (1 + e^-x) with an error of a few ulp; for very negative x it is 1 / inf = 0.
__device__ __forceinline__ float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(x * -kLog2e)); }
__device__ __forceinline__ float silu_slope(float x, float s) { return s * fmaf(x, 1.0f - s, 1.0f); }

// Computes two neighbouring elements of out and y from those of the product. In backward `out` contains pre on entry.
template <bool kBackward>
__device__ __forceinline__ void apply(uint32_t& out, uint32_t& y, uint32_t product) {
  const uint32_t pre = kBackward ? out : product;
  const float x0 = lower(pre), x1 = upper(pre), s0 = sigmoid(x0), s1 = sigmoid(x1);
  y = pack_bf16(x0 * s0, x1 * s1);
  out = kBackward ? pack_bf16(lower(product) * silu_slope(x0, s0), upper(product) * silu_slope(x1, s1)) : product;
}

// A consumer warpgroup: multiplies every second tile of this CTA and writes it.
template <bool kBackward>
__device__ void consume(Shared& s, const Maps& maps, const Tiles& tiles, int cta) {
  const int group = threadIdx.x / kWarpgroup, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // This warp's buffers for pieces. Forward: two for out and two for y, used alternately. Backward: three for pre,
  // which dpre replaces, and one for y.
  unsigned char* const pieces = s.pieces[warp];
  float d[kHalves][kSums][4];
  int turns = 0;
  unsigned loads = 0;  // number of pieces of pre so far
  for (int turn = blockIdx.x / kCluster; turn < tiles.turns; turn += gridDim.x / kCluster, ++turns) {
    if (turns % kConsumers != group) continue;
    const int row = tiles.row(turn, cta) + warp % 4 * kPieceRows, column = tiles.column(turn);
    const auto load_pre = [&](int piece) {
      Barrier* const loaded = &s.loaded[warp][piece % kPanels];
      barrier_expect(loaded, kPieceBytes);
      copy_box(pieces + piece % kPanels * kPieceBytes, maps.pre, column + piece % kPanels * kPanel,
               row + piece / kPanels * 64, 0, 0, loaded);
    };
    if (kBackward && lane == 0) {
      bulk_wait_read<0>();
      for (int piece = 0; piece < kPanels; ++piece) load_pre(piece);
    }

    // A barrier's wait distinguishes only two successive phases of a stage, so a consumer must not lag by two:
    // before its tile, it waits until the other consumer's last stage is full.
    if (turns > 0) barrier_wait(&s.last_full[(turns - 1) % kConsumers], (turns - 1) / kConsumers & 1);
    int n = turns * tiles.steps;
    for (int k = 0; k < tiles.steps; ++k, ++n) {
      const int stage = n % kStages;
      barrier_wait(&s.full[stage], n / kStages & 1);
      if (k == tiles.steps - 1 && lane == 0) barrier_arrive(&s.last_full[group]);
      // In a cluster, the upper bits of a shared-memory address are the CTA's number, which a descriptor must not
      // contain.
      constexpr uint32_t kOffset = (1 << 18) - 1;
      const uint32_t a = shared_address(s.a[stage]) & kOffset, b = shared_address(s.b[stage]) & kOffset;
      wgmma_fence();
#pragma unroll
      for (int k16 = 0; k16 < kTileK / 16; ++k16)
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const uint32_t a_tile = tile_descriptor(a + half * 64 * kPanelRowBytes + k16 * 32);
          const uint32_t b_tile =
              kBackward ? tile_descriptor(b + k16 * 16 * kPanelRowBytes, kPanelBytesB) : tile_descriptor(b + k16 * 32);
          wgmma<Major::k, kBackward ? Major::mn : Major::k>(d[half], a_tile, b_tile, k > 0 || k16 > 0);
        }
      wgmma_commit();
      wgmma_wait<1>();  // the products that read the previous stage have finished
      if (k > 0 && lane < kCluster) barrier_arrive_at(&s.empty[(n - 1) % kStages], lane);
    }
    wgmma_wait<0>();
    pin(d[0]), pin(d[1]);
    if (lane < kCluster) barrier_arrive_at(&s.empty[(n - 1) % kStages], lane);
#pragma unroll
    for (int piece = 0; piece < kHalves * kPanels; ++piece) {
      const int half = piece / kPanels, panel = piece % kPanels;
      unsigned char* const out = pieces + (kBackward ? panel : piece % 2 * 2) * kPieceBytes;
      unsigned char* const y = kBackward ? pieces + kPanels * kPieceBytes : out + kPieceBytes;
      if (lane == 0) {  // waits until the buffers that are written next are free
        bulk_wait_read<kBackward ? 0 : 1>();
        if (kBackward && piece > 0 && piece + 2 < kHalves * kPanels) load_pre(piece + 2);
      }
      if constexpr (kBackward) barrier_wait(&s.loaded[warp][panel], loads / kPanels & 1), ++loads;
      __syncwarp();
#pragma unroll
      // An instruction moves four 8x8 matrices: rows 0..7 and 8..15 of eight columns, then those of the next eight.
      for (int j = 0; j < kPanel / 8; j += 4) {
        constexpr int kQuads = 2;
        uint32_t outs[kQuads][4], ys[kQuads][4];
        int at[kQuads];
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          at[q] = swizzled(lane % 16, j + 2 * q + lane / 16);
          if constexpr (kBackward) load_matrices(outs[q], reinterpret_cast<const __nv_bfloat16*>(out + at[q]));
        }
#pragma unroll
        for (int q = 0; q < kQuads; ++q)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* const product = &d[half][8 * panel + j + 2 * q + i / 2][2 * (i % 2)];
            apply<kBackward>(outs[q][i], ys[q][i], pack_bf16(product[0], product[1]));
          }
#pragma unroll
        for (int q = 0; q < kQuads; ++q) store_matrices(out + at[q], outs[q]), store_matrices(y + at[q], ys[q]);
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
        store_box(maps.out, out, column + panel * kPanel, row + half * 64, 0, 0);
        store_box(maps.y, y, column + panel * kPanel, row + half * 64, 0, 0);
        bulk_commit();
      }
    }
  }
  if (lane == 0) bulk_wait();
}

template <bool kBackward>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    linear_silu_kernel(const __grid_constant__ Maps maps, Tiles tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  Shared& s = *reinterpret_cast<Shared*>(aligned_shared());
  const int cta = blockIdx.x % kCluster;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], 4 * kCluster);
    for (auto& of_warp : s.loaded)
      for (Barrier& loaded : of_warp) barrier_init(&loaded, 1);
    for (Barrier& last_full : s.last_full) barrier_init(&last_full, 4);
    barrier_init_done();
  }
  sync_cluster();
  if (threadIdx.x / kWarpgroup == kConsumers) {
    decrease_registers<40>();
    if (threadIdx.x % kWarpgroup == 0) produce<kBackward>(s, maps, tiles, cta);
  } else {
    increase_registers<232>();
    consume<kBackward>(s, maps, tiles, cta);
  }
  sync_cluster();  // the other CTA may load into this CTA's shared memory and arrive at its barriers until here
#endif
}

// ---- launch ----

// Describes a matrix for TMA in boxes of 64 columns and box_rows rows.
CUtensorMap box_map(const ConstTensor& t, int box_rows) {
  const View<const __nv_bfloat16> view{t.ptr<__nv_bfloat16>(), 0, t.stride[0], 0, static_cast<int>(t.size(1)), true};
  return make_box_map(view, 1, t.size(0), 1, box_rows);
}

// Launches the kernel: a [M,K]; b [N,K], in backward [K,N]; pre, out, y [M,N]. Returns false if it does not apply.
template <bool kBackward>
bool run(Context& ctx, const char* name, const ConstTensor& a, const ConstTensor& b, const ConstTensor& pre,
         const Tensor& out, const Tensor& y) {
  const bool fits = a.dtype == DType::bf16 && ctx.may_use_sm90() &&
                    all_have_vectors(kVector<__nv_bfloat16>, a, b, pre, out, y) && a.size(1) > 0;
  record_route(ctx, name, a.dtype, fits ? "sm90" : nullptr, "rows that are not made of 16-byte vectors");
  if (!fits) return false;
  const int64_t columns = ceil_div(out.size(1), kTileN);
  const int64_t turns = ceil_div(out.size(0), kTileM * kCluster) * columns;
  if (ctx.planning || turns == 0) return true;
  const Maps maps{box_map(a, kTileM), kBackward ? box_map(b, kTileK / kCluster) : box_map(b, kTileN / kCluster),
                  box_map(pre, kPieceRows), box_map(out, kPieceRows), box_map(y, kPieceRows)};
  const Tiles tiles{static_cast<int>(turns), static_cast<int>(columns), static_cast<int>(ceil_div(a.size(1), kTileK))};
  const int64_t ctas = kCluster * std::min<int64_t>(ctx.num_sms / kCluster, turns);
  launch(ctx, name, linear_silu_kernel<kBackward>, dim3(ctas), dim3(kThreads), sizeof(Shared), maps, tiles);
  return true;
}

}  // namespace

bool linear_silu_forward_sm90(Context& ctx, const Tensor& y, const Tensor& pre, const ConstTensor& x,
                              const ConstTensor& w) {
  return run<false>(ctx, "linear_silu_forward", x, w, pre, pre, y);
}

bool linear_silu_backward_sm90(Context& ctx, const Tensor& dpre, const Tensor& y, const ConstTensor& dz,
                               const ConstTensor& w_next, const ConstTensor& pre) {
  return run<true>(ctx, "linear_silu_backward", dz, w_next, pre, dpre, y);
}

}  // namespace triad::cuda
