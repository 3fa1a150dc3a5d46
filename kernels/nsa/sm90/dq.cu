// dq for the branches and dense attention on Hopper (bf16, head widths 64 to 192 in 64-column panels), for any walk
// over key tiles (nsa/gpu/fwd_dq.cuh): one visible key range per row, or the union of the blocks that a tile's tokens
// list.
//
// A CTA is one warpgroup and owns 64 rows (t, h) in one (sequence, group): q and dout are left operands in registers,
// dq accumulates in registers and is added to global memory at the end. Tiles of 64 keys (head widths 128 and 192: 32)
// and their values are loaded by cp.async, four stages, 128-byte swizzle; 32 keys per step:
//   s = q k^T,  dp = dout v^T,  ds (softmax_backward),  dq += ds k.
// ds is already laid out in registers as the last product's left operand. One step's scores and the previous step's dq
// are queued together, and the former's softmax runs while the latter is computed.
//
// Bound: 16 KB from L2 per 1.6 MFLOP and CTA; three CTAs per SM (head widths 128 and 192: two). In the selected branch
// a tile computes every block that any of its tokens lists, so rows with disjoint lists multiply the work.
#include "kernels/hopper/warpgroup.cuh"
#include "kernels/nsa/gpu/fwd_dq.cuh"
#include "kernels/nsa/gpu/selected_walk.cuh"
#include "kernels/nsa/sm90/backward.cuh"
#include "kernels/nsa/sm90/launch_backward.h"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

struct BwdDqArgs {
  Attend<bf16> in;
  View<const bf16> dout;
  const RowStats* row_stats;
  View<float> dq;
};

constexpr int kStepKeys = 32, kTileStages = 4;
template <int kPanelsK, int kPanelsV>
struct __align__(1024) KeyStage {
  static constexpr int kTileKeys = kPanelsK == 1 ? 64 : 32, kPanelBytes = kTileKeys * kPanelRowBytes;
  unsigned char k[kPanelsK * kPanelBytes], v[kPanelsV * kPanelBytes];
};

// Loads key and value tiles into the stage ring; eight lanes copy one row.
template <int kPanelsK, int kPanelsV>
struct KeyLoader {
  using KeyStage = KeyStage<kPanelsK, kPanelsV>;
  KeyStage* stages;
  int r0, to;
  RowSource k_rows, v_rows;

  __device__ __forceinline__ KeyLoader(const BwdDqArgs& a, const RowTile& tile, KeyStage* stages)
      : stages(stages), k_rows(a.in.k, tile.b, tile.g), v_rows(a.in.v, tile.b, tile.g) {
    const int chunk = threadIdx.x % 8;
    r0 = threadIdx.x / 8, to = swizzled(r0, chunk);
    k_rows.base += 8 * chunk, v_rows.base += 8 * chunk;
  }
  // Starts one tile's copies as one cp.async group, which is empty if the tile does not exist.
  __device__ __forceinline__ void load(bool exists, const KeyTile& keys, int stage) const {
    if (exists) copy(keys, stage);
    copy_async_commit();
  }

 private:
  __device__ __forceinline__ void copy(const KeyTile& keys, int stage) const {
#pragma unroll
    for (int i = 0; i < KeyStage::kTileKeys / 16; ++i) {
      // keys past the end are copies of the last one; their scores are masked
      const int key = min(keys.first + r0 + 16 * i, keys.end - 1);
#pragma unroll
      for (int panel = 0; panel < kPanelsK; ++panel)
        copy_async_16(stages[stage].k + panel * KeyStage::kPanelBytes + to + i * 16 * kPanelRowBytes,
                      k_rows.at(key, 0) + panel * kPanel, 16);
#pragma unroll
      for (int panel = 0; panel < kPanelsV; ++panel)
        copy_async_16(stages[stage].v + panel * KeyStage::kPanelBytes + to + i * 16 * kPanelRowBytes,
                      v_rows.at(key, 0) + panel * kPanel, 16);
    }
  }
};

// Multiplies the warpgroup's 64 rows with 32 keys in a stage, key0 to key0 + 31.
template <int kPanelsK, int kPanelsV>
struct RowMma {
  using KeyStage = KeyStage<kPanelsK, kPanelsV>;
  static constexpr int kSteps = kPanel / 16, kN = kStepKeys / 8, kDeep = kStepKeys / 16;
  const LaneRows& rows;
  float scale;               // score scale times log2(e)
  int last_low, first_high;  // all the tile's rows see the keys [last_low, first_high)
  // References to arrays outside the struct. If the arrays were members, nvcc could not keep the struct's scalars in
  // registers before the loops are unrolled.
  uint32_t (&q)[kPanelsK * kSteps][4], (&dout)[kPanelsV * kSteps][4];
  float (&lse)[2], (&dpsum)[2];
  float (&dq)[kPanelsK][kPanel / 8][4];
  float (&p)[kN][4], (&ds)[kN][4];  // p and ds hold s and dp first; then ds replaces dp
  uint32_t (&operand)[kDeep][4];    // ds, packed as the left operand for wgmma

  __device__ __forceinline__ void load_rows(const BwdDqArgs& a, const RowTile& tile) {
    const bf16 *q_rows[2] = {}, *dout_rows[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!rows.exists[i]) continue;
      q_rows[i] = a.in.q.at(tile.b, rows.token[i], rows.head[i]);
      dout_rows[i] = a.dout.at(tile.b, rows.token[i], rows.head[i]);
      const int row = tile.first + 16 * (threadIdx.x / 32) + fragment_row() + 8 * i;
      const RowStats stats = a.row_stats[static_cast<int64_t>(blockIdx.y) * a.in.tokens * a.in.heads.value() + row];
      lse[i] = stats.x, dpsum[i] = stats.y;
    }
    load_operand(q, q_rows);
    load_operand(dout, dout_rows);
  }

  __device__ __forceinline__ void scores(const KeyStage& stage, int key0) {
    const uint32_t k = tile_descriptor(shared_address(stage.k + key0 * kPanelRowBytes));
    const uint32_t v = tile_descriptor(shared_address(stage.v + key0 * kPanelRowBytes));
    wgmma_fence();
    const auto multiply = [&](float(&d)[kN][4], const auto& left, uint32_t right) {
      wgmma_begin<Major::k>(d, left[0], right);
#pragma unroll
      for (int i = 1; i < static_cast<int>(std::extent_v<std::remove_reference_t<decltype(left)>>); ++i)
        wgmma<Major::k>(d, left[i], right + i / kSteps * (KeyStage::kPanelBytes >> 4) + i % kSteps * 2);
    };
    multiply(p, q, k);
    multiply(ds, dout, v);
    wgmma_commit();
  }

  __device__ __forceinline__ void add_dq(const KeyStage& stage, int key0) {
    const uint32_t k = tile_descriptor(shared_address(stage.k + key0 * kPanelRowBytes));
#pragma unroll
    for (int panel = 0; panel < kPanelsK; ++panel)
#pragma unroll
      for (int i = 0; i < kDeep; ++i)
        wgmma<Major::mn>(dq[panel], operand[i], k + (panel * KeyStage::kPanelBytes + i * 16 * kPanelRowBytes >> 4));
    wgmma_commit();
  }

  // Computes p = 2^(s scale - lse), which is 0 for keys that the row does not see, and ds = p (dp - dpsum).
  __device__ __forceinline__ void softmax_backward(const KeyTile& keys, int key0) {
    const int first = keys.first + key0;
    float minus_lse[2];  // -inf if the row's token does not list these keys, which makes p = 0
#pragma unroll
    for (int i = 0; i < 2; ++i) minus_lse[i] = (keys.token_mask >> rows.bit[i] & 1) != 0 ? -lse[i] : -INFINITY;
    pin(p);
    pin(ds);
    // true if some row does not see all 32 keys
    if (first < last_low || first + kStepKeys > min(first_high, keys.end)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int low = rows.low[i] - first, high = min(rows.high[i], keys.end) - first;
#pragma unroll
        for (int j = 0; j < kN; ++j)
#pragma unroll
          for (int e = 2 * i; e < 2 * i + 2; ++e) {
            const int column = 8 * j + fragment_column() + e % 2;
            if (column < low || column >= high) p[j][e] = -INFINITY;
          }
      }
    }
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        ds[j][e] = exp2_approx(fmaf(p[j][e], scale, minus_lse[e / 2])) * (ds[j][e] - dpsum[e / 2]);
  }

  __device__ __forceinline__ void pin_sums() {
#pragma unroll
    for (auto& panel : dq) pin(panel);
  }
  // Packs ds as the left operand. All products have to end first: ptxas writes no left operand while one runs.
  __device__ __forceinline__ void pack() {
    pin(ds);
    wgmma_wait<0>();
    pin_sums();
#pragma unroll
    for (int i = 0; i < kDeep; ++i) pack_operand(operand[i], ds, i);
  }

  // Adds the tile rows' dq to global memory.
  __device__ __forceinline__ void reduce_dq(const BwdDqArgs& a, const RowTile& tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!rows.exists[i]) continue;
      float* to = a.dq.at(tile.b, rows.token[i], rows.head[i]);
#pragma unroll
      for (int j = 0; j < kPanelsK * kPanel / 8; ++j) {
        const float(&sum)[4] = dq[j / 8][j % 8];
        add_pair(to + 8 * j + fragment_column(), sum[2 * i] * a.in.scale, sum[2 * i + 1] * a.in.scale);
      }
    }
  }
};

template <class Keys, int kPanelsK, int kPanelsV>
__global__ void __launch_bounds__(kWarpgroup, kPanelsK == 1 ? 3 : 2)
    bwd_dq_kernel(const __grid_constant__ BwdDqArgs a, const __grid_constant__ Keys keys) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the PTX for older cards holds an empty kernel, which is not chosen there
  using KeyStage = KeyStage<kPanelsK, kPanelsV>;
  constexpr int kTileKeys = KeyStage::kTileKeys;
  // the last rows start first, because they see most keys
  const RowTile tile(a.in, gridDim.x - 1 - blockIdx.x, blockIdx.y);
  constexpr bool kListed = !std::is_same_v<Keys, RangeKeys>;
  decltype(auto) visible = range_of_rows<kListed>(keys.range, tile.b);
  const auto tile_bound = [](int bound) { return kListed ? bound : static_cast<int>(uniform(bound)); };
  const LaneRows rows(a.in, tile, visible);
  using Mma = RowMma<kPanelsK, kPanelsV>;
  uint32_t q[kPanelsK * Mma::kSteps][4], dout[kPanelsV * Mma::kSteps][4], operand[Mma::kDeep][4];
  float lse[2] = {INFINITY, INFINITY}, dpsum[2] = {};
  float dq[kPanelsK][kPanel / 8][4] = {}, p[Mma::kN][4], ds[Mma::kN][4];
  Mma mma{.rows = rows,
          .scale = a.in.scale_log2(),
          .last_low = tile_bound(visible.low(tile.last_token)),
          .first_high = tile_bound(visible.high(tile.first_token)),
          .q = q,
          .dout = dout,
          .lse = lse,
          .dpsum = dpsum,
          .dq = dq,
          .p = p,
          .ds = ds,
          .operand = operand};
  mma.load_rows(a, tile);
  KeyStage* const stages = reinterpret_cast<KeyStage*>(aligned_shared());
  const KeyLoader<kPanelsK, kPanelsV> loader(a, tile, stages);
  const auto wait_stage = [&] {
    copy_async_wait_group<1>();  // waits for the older of the two groups in flight
    fence_async_proxy();
    __syncthreads();
  };

  typename Keys::Walk walk(keys, tile);
  KeyTile now, next, after;
  if (walk.next(now, kTileKeys)) {
    loader.load(true, now, 0);
    bool more = walk.next(next, kTileKeys);
    loader.load(more, next, 1);
    wait_stage();
    bool still_more = more && walk.next(after, kTileKeys);
    loader.load(still_more, after, 2);
    mma.scores(stages[0], 0);
    wgmma_wait<0>();
    mma.softmax_backward(now, 0);
    mma.pack();
    int s0 = 0;
    for (;;) {
#pragma unroll
      for (int key0 = kStepKeys; key0 < kTileKeys; key0 += kStepKeys) {
        mma.scores(stages[s0], key0);
        mma.add_dq(stages[s0], key0 - kStepKeys);
        wgmma_wait<1>();
        mma.softmax_backward(now, key0);
        mma.pack();
      }
      if (!more) break;
      wait_stage();
      mma.scores(stages[(s0 + 1) % kTileStages], 0);
      mma.add_dq(stages[s0], kTileKeys - kStepKeys);
      now = next, next = after, more = still_more;
      still_more = more && walk.next(after, kTileKeys);
      loader.load(still_more, after, (s0 + 3) % kTileStages);
      wgmma_wait<1>();
      mma.softmax_backward(now, 0);
      mma.pack();
      s0 = (s0 + 1) % kTileStages;
    }
    wgmma_fence();
    mma.add_dq(stages[s0], kTileKeys - kStepKeys);
  }
  wgmma_wait<0>();
  mma.pin_sums();
  mma.reduce_dq(a, tile);
#endif
}

template <class Keys>
void launch_dq_sm90(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                    const AttendIn& in, const Keys& keys, const Tensor& row_stats) {
  const BwdDqArgs a{make_attend<bf16>(op, in), make_view<const bf16>(grad.dout),
                    reinterpret_cast<const RowStats*>(row_stats.data), make_view<float>(out.dq)};
  dispatch_panels(in, [&]<int kPanelsK, int kPanelsV>() {
    launch(ctx, op, bwd_dq_kernel<Keys, kPanelsK, kPanelsV>, row_grid(a.in, in, 1, 1), dim3(kWarpgroup),
           kTileStages * sizeof(KeyStage<kPanelsK, kPanelsV>), a, keys);
  });
}

}  // namespace

void backward_dq_range_sm90(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                            const AttendIn& in, const KeyRange& range, const Tensor& row_stats) {
  launch_dq_sm90(ctx, op, out, grad, in, RangeKeys{range}, row_stats);
}
void backward_dq_selected_sm90(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                               const AttendIn& in, const SelectedKeys& keys, const Tensor& row_stats) {
  launch_dq_sm90(ctx, op, out, grad, in, keys, row_stats);
}

}  // namespace triad::cuda
