// A linear layer with SiLU or SwiGLU as its epilogue, on Hopper, for bf16.
//   SiLU     The forward pass reads the layer's input x and its weights w. It writes pre = x w^T and y = silu(pre). The
//            backward pass reads pre, the next layer's weights w_next, and dz, the gradient of that layer's output. It
//            writes dpre = dy * silu'(pre), where dy = dz w_next, and y again.
//   SwiGLU   w is two matrices, w_gate above w_up, and pre is two tensors, gate beside up. The forward pass writes gate
//            = x w_gate^T, up = x w_up^T and y = silu(gate) * up. The backward pass reads gate and up. It writes their
//            gradients dgate = dy * up * silu'(gate) and dup = dy * silu(gate), and y again.
// pre, gate, up, y and their gradients are [M,N]. Below, the product is A B^T in the forward pass, with A = x [M,K] and
// B = w, and A B in the backward pass, with A = dz [M,K] and B = w_next [K,N].
//
// One tile's epilogue runs while the next tile is multiplied, so that its memory traffic overlaps with the products.
//
// A product tile is 128 x 192. Two consumer warpgroups process alternate tiles, each with a whole tile's sums in
// registers: while one multiplies, the other writes. A producer thread fills a ring with four slots (stages); a stage
// has 128 rows of A and 192 columns of B, each 64 wide along the inner dimension. L2 delivers some 40 bytes per cycle
// to an SM, and a CTA that loaded alone would need 53. So two CTAs form a cluster and process tiles one above the
// other; each loads half of a stage's B for both, which needs 36 bytes per cycle. In SwiGLU's forward these halves are
// 96 gate columns and the same 96 up columns, so that a thread has both for its elements.
//
// In the epilogue, a warp writes its 16 rows to shared memory piece by piece, and TMA stores each piece from there. A
// piece is 64 columns from each tensor, or 32 with SwiGLU. In the backward pass, TMA loads pre into the same buffers,
// three pieces ahead, and the warp overwrites it with dpre. TMA reads zeros outside the tensors and does not write
// there, so M, N and K need not be multiples of the tile sizes.
//
// Bound: the tensor cores in forward, memory traffic in backward (tests/baselines/findings/ops.md). With inner
// dimension 768, SiLU's epilogue adds a fifth to the products' time in forward, more than half in backward.
#include <algorithm>
#include <array>

#include "kernels/common/bthd.cuh"
#include "kernels/hopper/tma.cuh"
#include "kernels/hopper/wgmma.cuh"
#include "kernels/ops/linear_silu.h"

namespace triad::cuda {
namespace {

constexpr int kTileM = 128, kTileN = 192, kTileK = 64, kStages = 4;
constexpr int kCluster = 2, kConsumers = 2, kConsumerWarps = 4 * kConsumers, kThreads = 128 * (kConsumers + 1);
constexpr int kPanels = kTileN / kPanel, kHalves = kTileM / 64, kSums = kTileN / 8;
constexpr int kStageBytes = (kTileM + kTileN) * kPanelRowBytes;
constexpr int kPanelBytesB = kPanel * kPanelRowBytes;  // backward: bytes per B panel [64 of k][64 columns]
// Rows per piece; bytes per warp's buffers; how many pieces have buffers at the same time in backward.
constexpr int kPieceRows = 16, kBufferBytes = 8192, kAhead = 3;

// What an epilogue reads and writes, and how it divides a tile.
template <bool kGatedMlp, bool kIsBackward>
struct Epilogue {
  static constexpr bool kGated = kGatedMlp, kBackward = kIsBackward;
  static constexpr int kPreTensors = kGated ? 2 : 1;  // tensors in pre: gate and up, or one
  // Columns of [M,N] per tile: in SwiGLU's forward half the sums belong to gate, the others to up.
  static constexpr int kColumns = kBackward ? kTileN : kTileN / kPreTensors;
  static constexpr int kPieceColumns = kPanel / kPreTensors, kPieceBytes = kPieceRows * kPieceColumns * 2;
  static constexpr int kPiecesPerHalf = kColumns / kPieceColumns, kPieces = kHalves * kPiecesPerHalf;
  // A warp's buffers are kSlots slots, used in turn. A slot holds one piece from each pre tensor, and in forward one of
  // y. In backward a single buffer for y follows the slots.
  static constexpr int kSlots = kBackward ? kAhead : 2;
  static constexpr int kSlotBytes = (kBackward ? kPreTensors : kPreTensors + 1) * kPieceBytes;
  static_assert(kSlots * kSlotBytes + (kBackward ? kPieceBytes : 0) <= kBufferBytes && kPieces % kSlots == 0);

  // The byte offset of 16-byte chunk c of row r of a piece.
  __device__ static int at(int r, int c) { return kGated ? swizzled_64b(r, c) : swizzled(r, c); }
};

struct Shared {
  alignas(1024) unsigned char a[kStages][kTileM * kPanelRowBytes], b[kStages][kTileN * kPanelRowBytes];
  unsigned char buffers[kConsumerWarps][kBufferBytes];
  Barrier full[kStages], empty[kStages], loaded[kConsumerWarps][kAhead];
  // Completes when a consumer's last stage for a tile is full: the next stage is the other consumer's.
  Barrier last_full[kConsumers];
};

// ---- the kernel ----

template <int kPreTensors>
struct Maps {
  CUtensorMap a, b, y;
  CUtensorMap pre[kPreTensors];  // set in backward only
  CUtensorMap out[kPreTensors];  // pre in forward, dpre in backward
};

// The order in which clusters compute the output. A cluster computes two tiles at a time, one above the other, one for
// each CTA: a pair. All pairs in the same 256 rows are a band, and a few neighbouring bands are a group. Pairs are
// numbered column by column within a group, and group after group; a pair's number is called its turn. The clusters
// compute the pairs in this order. So B, which may be larger than L2, is read from memory once per group, while L2
// holds the group's rows of A.
struct Tiles {
  int bands, columns, steps;  // 64-wide steps along the inner dimension
  int group_bands;            // bands per group; the last group may have fewer
  struct Pair {
    int band, column;
  };
  __device__ int turns() const { return bands * columns; }
  __device__ Pair pair_of(int turn) const {
    const int first = turn / (group_bands * columns) * group_bands, height = min(group_bands, bands - first);
    const int in_group = turn - first * columns;
    return {first + in_group % height, in_group / height};
  }
};

// The producer thread's work: for every tile that this CTA computes, it loads the parts of A and B, stage by stage, and
// waits before each stage until the consumers no longer need what the stage held. cta: this CTA's number in its
// cluster. up_row is used in SwiGLU's forward pass, where w_up's rows follow w_gate's in w: w_up's first row.
template <class E>
__device__ void produce(Shared& s, const Maps<E::kPreTensors>& maps, const Tiles& tiles, int up_row, int cta) {
  constexpr uint16_t kBoth = 3;  // the cluster's two CTAs, one bit each
  int n = 0;                     // steps so far
  for (int turn = blockIdx.x / kCluster; turn < tiles.turns(); turn += gridDim.x / kCluster) {
    const auto [band, tile_column] = tiles.pair_of(turn);
    const int row = (band * kCluster + cta) * kTileM, column = tile_column * E::kColumns;
    for (int k = 0; k < tiles.steps; ++k, ++n) {
      const int stage = n % kStages;
      Barrier* const full = &s.full[stage];
      barrier_wait(&s.empty[stage], (n / kStages & 1) ^ 1);
      barrier_expect(full, kStageBytes);
      copy_box(s.a[stage], maps.a, k * kTileK, row, 0, 0, full);
      if constexpr (E::kBackward) {  // each CTA loads 32 of the stage's 64 k rows for both CTAs
        constexpr int kHalf = kTileK / kCluster;
#pragma unroll
        for (int p = 0; p < kPanels; ++p)
          copy_box_multicast(s.b[stage] + p * kPanelBytesB + cta * kHalf * kPanelRowBytes, maps.b, column + p * kPanel,
                             k * kTileK + cta * kHalf, 0, 0, full, kBoth);
      } else {  // each CTA loads half the columns for both CTAs; with SwiGLU, CTA 0 loads gate's and CTA 1 up's
        constexpr int kHalf = kTileN / kCluster;
        copy_box_multicast(s.b[stage] + cta * kHalf * kPanelRowBytes, maps.b, k * kTileK,
                           column + cta * (E::kGated ? up_row : kHalf), 0, 0, full, kBoth);
      }
    }
  }
}

__device__ __forceinline__ float upper(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float lower(uint32_t pair) { return __uint_as_float(pair << 16); }
// 1 / (1 + e^-x) to within a few ulp; for very negative x it is 1 / inf = 0.
__device__ __forceinline__ float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(x * -kLog2e)); }
__device__ __forceinline__ float silu_slope(float x, float s) { return s * fmaf(x, 1.0f - s, 1.0f); }

// Computes y, and in backward the gradient that replaces pre, for two neighbouring elements, which a word holds.
template <class E>
__device__ __forceinline__ void apply(uint32_t (&pre)[E::kPreTensors], uint32_t& y, uint32_t dy) {
  const float x[2] = {lower(pre[0]), upper(pre[0])}, s[2] = {sigmoid(x[0]), sigmoid(x[1])};
  float up[2] = {1, 1};
  if constexpr (E::kGated) {
    up[0] = lower(pre[1]), up[1] = upper(pre[1]);
    y = pack_bf16(x[0] * s[0] * up[0], x[1] * s[1] * up[1]);
  } else {
    y = pack_bf16(x[0] * s[0], x[1] * s[1]);
  }
  if constexpr (E::kBackward) {
    const float d[2] = {lower(dy), upper(dy)};
    if constexpr (E::kGated) pre[1] = pack_bf16(d[0] * x[0] * s[0], d[1] * x[1] * s[1]);
    pre[0] = pack_bf16(d[0] * up[0] * silu_slope(x[0], s[0]), d[1] * up[1] * silu_slope(x[1], s[1]));
  }
}

// A consumer warpgroup's work: it multiplies every second tile in this CTA, and runs its epilogue.
template <class E>
__device__ void consume(Shared& s, const Maps<E::kPreTensors>& maps, const Tiles& tiles, int cta) {
  const int consumer = threadIdx.x / kWarpgroup, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned char* const buffers = s.buffers[warp];
  float d[kHalves][kSums][4];
  int turns = 0;
  unsigned loads = 0;  // pieces of pre so far
  for (int turn = blockIdx.x / kCluster; turn < tiles.turns(); turn += gridDim.x / kCluster, ++turns) {
    if (turns % kConsumers != consumer) continue;
    const auto [band, tile_column] = tiles.pair_of(turn);
    const int row = (band * kCluster + cta) * kTileM + warp % 4 * kPieceRows, column = tile_column * E::kColumns;
    const auto load_pre = [&](int piece) {
      Barrier* const loaded = &s.loaded[warp][piece % kAhead];
      barrier_expect(loaded, E::kPreTensors * E::kPieceBytes);
#pragma unroll
      for (int t = 0; t < E::kPreTensors; ++t)
        copy_box(buffers + piece % kAhead * E::kSlotBytes + t * E::kPieceBytes, maps.pre[t],
                 column + piece % E::kPiecesPerHalf * E::kPieceColumns, row + piece / E::kPiecesPerHalf * 64, 0, 0,
                 loaded);
    };
    if (E::kBackward && lane == 0) {
      bulk_wait_read<0>();
      for (int piece = 0; piece < kAhead; ++piece) load_pre(piece);
    }

    // A barrier wait distinguishes only two successive phases of a stage, so a consumer must not lag by two:
    // before its tile, it waits until the other consumer's last stage is full.
    if (turns > 0) barrier_wait(&s.last_full[(turns - 1) % kConsumers], (turns - 1) / kConsumers & 1);
    int n = turns * tiles.steps;
    for (int k = 0; k < tiles.steps; ++k, ++n) {
      const int stage = n % kStages;
      barrier_wait(&s.full[stage], n / kStages & 1);
      if (k == tiles.steps - 1 && lane == 0) barrier_arrive(&s.last_full[consumer]);
      // In a cluster, a shared-memory address's upper bits are the CTA number, which a descriptor must not contain.
      constexpr uint32_t kOffset = (1 << 18) - 1;
      const uint32_t a = shared_address(s.a[stage]) & kOffset, b = shared_address(s.b[stage]) & kOffset;
      wgmma_fence();
#pragma unroll
      for (int k16 = 0; k16 < kTileK / 16; ++k16)
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const uint32_t a_tile = tile_descriptor(a + half * 64 * kPanelRowBytes + k16 * 32);
          const uint32_t b_tile = E::kBackward ? tile_descriptor(b + k16 * 16 * kPanelRowBytes, kPanelBytesB)
                                               : tile_descriptor(b + k16 * 32);
          wgmma<Major::k, E::kBackward ? Major::mn : Major::k>(d[half], a_tile, b_tile, k > 0 || k16 > 0);
        }
      wgmma_commit();
      wgmma_wait<1>();  // the products that read the previous stage have finished
      if (k > 0 && lane < kCluster) barrier_arrive_at(&s.empty[(n - 1) % kStages], lane);
    }
    wgmma_wait<0>();
    pin(d[0]), pin(d[1]);
    if (lane < kCluster) barrier_arrive_at(&s.empty[(n - 1) % kStages], lane);
#pragma unroll
    for (int piece = 0; piece < E::kPieces; ++piece) {
      const int half = piece / E::kPiecesPerHalf, first = piece % E::kPiecesPerHalf * E::kPieceColumns;
      unsigned char* const pre = buffers + piece % E::kSlots * E::kSlotBytes;
      unsigned char* const y =
          E::kBackward ? buffers + E::kSlots * E::kSlotBytes : pre + E::kPreTensors * E::kPieceBytes;
      if (lane == 0) {  // waits until the buffers that are written next are free
        bulk_wait_read<E::kBackward ? 0 : 1>();
        if (E::kBackward && piece > 0 && piece + kAhead - 1 < E::kPieces) load_pre(piece + kAhead - 1);
      }
      if constexpr (E::kBackward) barrier_wait(&s.loaded[warp][piece % kAhead], loads / kAhead & 1), ++loads;
      __syncwarp();
#pragma unroll
      // An instruction moves four 8x8 matrices: rows 0..7 and 8..15 in eight columns, then in the next eight.
      for (int j = 0; j < E::kPieceColumns / 8; j += 4) {
        constexpr int kQuads = 2;
        uint32_t pres[kQuads][E::kPreTensors][4], ys[kQuads][4];
        int at[kQuads];
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          at[q] = E::at(lane % 16, j + 2 * q + lane / 16);
#pragma unroll
          for (int t = 0; t < E::kPreTensors; ++t)
            if constexpr (E::kBackward)
              load_matrices(pres[q][t], reinterpret_cast<const __nv_bfloat16*>(pre + t * E::kPieceBytes + at[q]));
        }
#pragma unroll
        for (int q = 0; q < kQuads; ++q)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            // Returns two neighbouring sums as a bf16 pair: pre's tensor t in forward, dy in backward.
            const auto product = [&](int t) {
              const float* const sums = d[half][t * kSums / E::kPreTensors + first / 8 + j + 2 * q + i / 2];
              return pack_bf16(sums[2 * (i % 2)], sums[2 * (i % 2) + 1]);
            };
            uint32_t pre_values[E::kPreTensors];
#pragma unroll
            for (int t = 0; t < E::kPreTensors; ++t) pre_values[t] = E::kBackward ? pres[q][t][i] : product(t);
            apply<E>(pre_values, ys[q][i], E::kBackward ? product(0) : 0);
#pragma unroll
            for (int t = 0; t < E::kPreTensors; ++t) pres[q][t][i] = pre_values[t];
          }
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
#pragma unroll
          for (int t = 0; t < E::kPreTensors; ++t) store_matrices(pre + t * E::kPieceBytes + at[q], pres[q][t]);
          store_matrices(y + at[q], ys[q]);
        }
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int t = 0; t < E::kPreTensors; ++t)
          store_box(maps.out[t], pre + t * E::kPieceBytes, column + first, row + half * 64, 0, 0);
        store_box(maps.y, y, column + first, row + half * 64, 0, 0);
        bulk_commit();
      }
    }
  }
  if (lane == 0) bulk_wait();
}

template <class E>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    linear_silu_kernel(const __grid_constant__ Maps<E::kPreTensors> maps, Tiles tiles, int up_row) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  Shared& s = *reinterpret_cast<Shared*>(aligned_shared());
  const int cta = blockIdx.x % kCluster;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], 4 * kCluster);
    for (auto& warp_barriers : s.loaded)
      for (Barrier& loaded : warp_barriers) barrier_init(&loaded, 1);
    for (Barrier& last_full : s.last_full) barrier_init(&last_full, 4);
    barrier_init_done();
  }
  sync_cluster();
  if (threadIdx.x / kWarpgroup == kConsumers) {
    decrease_registers<40>();
    if (threadIdx.x % kWarpgroup == 0) produce<E>(s, maps, tiles, up_row, cta);
  } else {
    increase_registers<232>();
    consume<E>(s, maps, tiles, cta);
  }
  sync_cluster();  // the other CTA may load into this CTA's shared memory and arrive at its barriers until here
#endif
}

// ---- launch ----

// Describes a matrix for TMA in boxes with box_rows rows and box_columns columns.
CUtensorMap box_map(const ConstTensor& t, int box_rows, int box_columns = kPanel) {
  const View<const __nv_bfloat16> view{t.ptr<__nv_bfloat16>(), 0, t.stride[0], 0, static_cast<int>(t.size(1)), true};
  return make_box_map(view, 1, t.size(0), 1, box_rows, 1, box_columns);
}

// The tensors [M,N] in pre or dpre.
template <class E>
std::array<ConstTensor, E::kPreTensors> parts_of(const ConstTensor& pre) {
  if constexpr (E::kGated) {
    const int64_t N = pre.size(1) / 2;
    return {pre.slice(1, 0, N), pre.slice(1, N, 2 * N)};
  } else {
    return {pre};
  }
}

// Launches the kernel. a [M,K] is x or dz. b is w [N,K], with SwiGLU [2N,K], or in backward w_next [K,N]. pre, out
// [M,N], with SwiGLU [M,2N]; y [M,N]. Returns false, without a launch, if the kernel does not support the call.
template <class E>
bool run(Context& ctx, const char* name, const ConstTensor& a, const ConstTensor& b, const ConstTensor& pre,
         const Tensor& out, const Tensor& y) {
  const auto pre_parts = parts_of<E>(pre), out_parts = parts_of<E>(out);
  constexpr int V = kVector<__nv_bfloat16>;
  const auto vectors = [](const ConstTensor& t) { return has_vectors(t, V); };
  const bool fits = a.dtype == DType::bf16 && ctx.may_use_sm90() && all_have_vectors(V, a, b, y) &&
                    std::ranges::all_of(pre_parts, vectors) && std::ranges::all_of(out_parts, vectors) && a.size(1) > 0;
  record_route(ctx, name, a.dtype, fits ? "sm90" : nullptr,
               a.size(1) > 0 ? "rows that are not made of 16-byte vectors" : "products without terms");
  if (!fits) return false;
  const auto bands = static_cast<int>(ceil_div(y.size(0), kTileM * kCluster));
  const auto columns = static_cast<int>(ceil_div(y.size(1), E::kColumns));
  // An H100's 66 clusters then work on about 4 x 16 or 8 x 8 neighbouring pairs (tests/baselines/findings/ops.md has
  // times for other heights).
  const Tiles tiles{bands, columns, static_cast<int>(ceil_div(a.size(1), kTileK)), columns <= 16 ? 4 : 8};
  const int64_t turns = int64_t{bands} * columns;
  if (ctx.planning || turns == 0) return true;
  Maps<E::kPreTensors> maps{.a = box_map(a, kTileM),
                            .b = box_map(b, (E::kBackward ? kTileK : kTileN) / kCluster),
                            .y = box_map(y, kPieceRows, E::kPieceColumns)};
  for (int t = 0; t < E::kPreTensors; ++t) {
    if (E::kBackward) maps.pre[t] = box_map(pre_parts[t], kPieceRows, E::kPieceColumns);
    maps.out[t] = box_map(out_parts[t], kPieceRows, E::kPieceColumns);
  }
  const int64_t ctas = kCluster * std::min<int64_t>(ctx.num_sms / kCluster, turns);
  launch(ctx, name, linear_silu_kernel<E>, dim3(ctas), dim3(kThreads), sizeof(Shared), maps, tiles,
         static_cast<int>(y.size(1)));
  return true;
}

}  // namespace

bool linear_silu_forward_sm90(Context& ctx, const Tensor& y, const Tensor& pre, const ConstTensor& x,
                              const ConstTensor& w) {
  return run<Epilogue<false, false>>(ctx, "linear_silu_forward", x, w, pre, pre, y);
}

bool linear_silu_backward_sm90(Context& ctx, const Tensor& dpre, const Tensor& y, const ConstTensor& dz,
                               const ConstTensor& w_next, const ConstTensor& pre) {
  return run<Epilogue<false, true>>(ctx, "linear_silu_backward", dz, w_next, pre, dpre, y);
}

bool linear_swiglu_forward_sm90(Context& ctx, const Tensor& y, const Tensor& pre, const ConstTensor& x,
                                const ConstTensor& w) {
  return run<Epilogue<true, false>>(ctx, "linear_swiglu_forward", x, w, pre, pre, y);
}

bool linear_swiglu_backward_sm90(Context& ctx, const Tensor& dpre, const Tensor& y, const ConstTensor& dz,
                                 const ConstTensor& w_next, const ConstTensor& pre) {
  return run<Epilogue<true, true>>(ctx, "linear_swiglu_backward", dz, w_next, pre, dpre, y);
}

}  // namespace triad::cuda
