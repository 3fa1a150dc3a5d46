// dq of the attention branches on Hopper (bf16, heads of 64 to 192 in panels of 64), for any walk over key tiles (see
// nsa/gpu/fwd_dq.cuh).
//
// A CTA is one warpgroup with 64 rows (t, h) of one (sequence, group): q and dout in registers as left operands, dq in
// registers as the sum. Tiles of 64 keys and values arrive by cp.async, four stages, swizzled; 32 keys a step:
// s = q k^T, dp = dout v^T, and ds straight from registers into dq += ds k, which runs while the next scores are
// weighed. 16 KB from L2 per 1.6 MFLOP and CTA; three CTAs an SM.
//
// 16 x 2048 x 12 x 2 x 64 on an H200, window 512: 7.6e10 FLOP with the tiles' edges, floor 0.10 ms at 790 TFLOP/s,
// measured 0.205 ms (tensor cores 41% busy, L2 4.9 TB/s); selected, random lists of 16 blocks: 0.445 ms. There a tile
// computes every block that any of its 11 tokens lists, by KERNELS.md 4.2 about 1.35 times the blocks needed at
// T = 2048 and about 7 times at T = 65536, when neighbours' lists are random.
#pragma once
#include "kernels/nsa/gpu/fwd_dq.cuh"
#include "kernels/nsa/sm90/backward.cuh"

namespace triad::cuda {
namespace {

struct BwdDqArgs {
  Attend<__nv_bfloat16> in;
  View<const __nv_bfloat16> dout;
  const RowStats* facts;
  View<float> dq;
};

constexpr int kStepKeys = 32, kTileStages = 4;
template <int kPanelsK, int kPanelsV>
struct __align__(1024) KeyStage {
  static constexpr int kTileKeys = kPanelsK == 1 ? 64 : 32, kPanelBytes = kTileKeys * kPanelRowBytes;
  unsigned char k[kPanelsK * kPanelBytes], v[kPanelsV * kPanelBytes];
};

template <class Keys, int kPanelsK, int kPanelsV>
__global__ void __launch_bounds__(kWarpgroup, kPanelsK == 1 ? 3 : 2)
    bwd_dq_kernel(const __grid_constant__ BwdDqArgs a, const __grid_constant__ Keys keys) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the PTX for older cards holds an empty kernel, which is not chosen there
  const RowTile tile(a.in, gridDim.x - 1 - blockIdx.x, blockIdx.y);  // the last rows see most: they start first
  const LaneRows rows(a.in, tile, keys.range);
  const int G = a.in.heads.value();

  using KeyStage = KeyStage<kPanelsK, kPanelsV>;
  constexpr int kTileKeys = KeyStage::kTileKeys, kSteps = kPanel / 16, kN = kStepKeys / 8;
  uint32_t q[kPanelsK * kSteps][4], dout[kPanelsV * kSteps][4];
  float shift[2] = {INFINITY, INFINITY}, center[2] = {};
  {
    const __nv_bfloat16 *q_rows[2] = {}, *dout_rows[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!rows.exists[i]) continue;
      q_rows[i] = a.in.q.at(tile.b, rows.token[i], rows.head[i]);
      dout_rows[i] = a.dout.at(tile.b, rows.token[i], rows.head[i]);
      const int row = tile.first + 16 * (threadIdx.x / 32) + fragment_row() + 8 * i;
      const RowStats fact = a.facts[static_cast<int64_t>(blockIdx.y) * a.in.tokens * G + row];
      shift[i] = fact.x, center[i] = fact.y;
    }
    load_operand(q, q_rows);
    load_operand(dout, dout_rows);
  }

  KeyStage* const stages = reinterpret_cast<KeyStage*>(aligned_shared());
  const int chunk = threadIdx.x % 8, r0 = threadIdx.x / 8, to = swizzled(r0, chunk);
  RowSource k_rows(a.in.k, tile.b, tile.g), v_rows(a.in.v, tile.b, tile.g);
  k_rows.base += 8 * chunk, v_rows.base += 8 * chunk;
  const auto load = [&](const KeyTile& keys_of, int stage) {
#pragma unroll
    for (int i = 0; i < kTileKeys / 16; ++i) {
      const int key = min(keys_of.first + r0 + 16 * i, keys_of.end - 1);  // keys past the end are masked
#pragma unroll
      for (int panel = 0; panel < kPanelsK; ++panel)
        copy_async_16(stages[stage].k + panel * KeyStage::kPanelBytes + to + i * 16 * kPanelRowBytes,
                      k_rows.at(key, 0) + panel * kPanel, 16);
#pragma unroll
      for (int panel = 0; panel < kPanelsV; ++panel)
        copy_async_16(stages[stage].v + panel * KeyStage::kPanelBytes + to + i * 16 * kPanelRowBytes,
                      v_rows.at(key, 0) + panel * kPanel, 16);
    }
  };

  const int low_of_last = keys.range.low(tile.last_token), high_of_first = keys.range.high(tile.first_token);
  float dq[kPanelsK][kPanel / 8][4] = {};
  const float scale = a.in.scale_log2();
  // Products with the keys key0 .. key0 + kStepKeys of a stage. ds: first dp, then ds.
  constexpr int kDeep = kStepKeys / 16;
  float p[kN][4], ds[kN][4];
  uint32_t left[kDeep][4];
  const auto multiply_scores = [&](const KeyStage& stage, int key0) {
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
  };
  const auto multiply_sums = [&](const KeyStage& stage, int key0) {
    const uint32_t k = tile_descriptor(shared_address(stage.k + key0 * kPanelRowBytes));
#pragma unroll
    for (int panel = 0; panel < kPanelsK; ++panel)
#pragma unroll
      for (int i = 0; i < kDeep; ++i)
        wgmma<Major::mn>(dq[panel], left[i], k + (panel * KeyStage::kPanelBytes + i * 16 * kPanelRowBytes >> 4));
    wgmma_commit();
  };
  const auto weigh = [&](const KeyTile& keys_of, int key0) {
    const int first = keys_of.first + key0;
    float minus[2];  // rows whose token has not listed these keys: p = 2^-inf
#pragma unroll
    for (int i = 0; i < 2; ++i) minus[i] = (keys_of.token_mask >> rows.bit[i] & 1) != 0 ? -shift[i] : -INFINITY;
    pin(p);
    pin(ds);
    if (first < low_of_last || first + kStepKeys > min(high_of_first, keys_of.end)) {  // a row sees them in part
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int low = rows.low[i] - first, high = min(rows.high[i], keys_of.end) - first;
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
        ds[j][e] = exp2_approx(fmaf(p[j][e], scale, minus[e / 2])) * (ds[j][e] - center[e / 2]);
  };
  const auto pin_sums = [&] {
#pragma unroll
    for (auto& panel : dq) pin(panel);
  };
  // ptxas lets no register become a left operand while products run: so all of them end first.
  const auto pack = [&] {
    pin(ds);
    wgmma_wait<0>();
    pin_sums();
#pragma unroll
    for (int i = 0; i < kDeep; ++i) pack_operand(left[i], ds, i);
  };
  const auto await_stage = [&] {
    copy_async_wait_group<1>();  // of the two stages on their way the first
    fence_async_proxy();
    __syncthreads();
  };

  // One half tile's scores and the last half's dq are queued together; while dq runs, the scores are weighed.
  typename Keys::Walk walk(keys, tile);
  KeyTile now, next, after;
  if (walk.next(now, kTileKeys)) {
    const auto load_tile = [&](bool exists, const KeyTile& keys_of, int stage) {
      if (exists) load(keys_of, stage);
      copy_async_commit();
    };
    load_tile(true, now, 0);
    bool more = walk.next(next, kTileKeys);
    load_tile(more, next, 1);
    await_stage();
    bool still_more = more && walk.next(after, kTileKeys);
    load_tile(still_more, after, 2);
    multiply_scores(stages[0], 0);
    wgmma_wait<0>();
    weigh(now, 0);
    pack();
    int s0 = 0;
    for (;;) {
#pragma unroll
      for (int key0 = kStepKeys; key0 < kTileKeys; key0 += kStepKeys) {
        multiply_scores(stages[s0], key0);
        multiply_sums(stages[s0], key0 - kStepKeys);
        wgmma_wait<1>();
        weigh(now, key0);
        pack();
      }
      if (!more) break;
      await_stage();
      multiply_scores(stages[(s0 + 1) % kTileStages], 0);
      multiply_sums(stages[s0], kTileKeys - kStepKeys);
      now = next, next = after, more = still_more;
      still_more = more && walk.next(after, kTileKeys);
      load_tile(still_more, after, (s0 + 3) % kTileStages);
      wgmma_wait<1>();
      weigh(now, 0);
      pack();
      s0 = (s0 + 1) % kTileStages;
    }
    wgmma_fence();
    multiply_sums(stages[s0], kTileKeys - kStepKeys);
  }
  wgmma_wait<0>();
  pin_sums();

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
#endif
}

// dq only.
template <class Keys>
void backward_dq_sm90(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                      const AttendIn& in, const Keys& keys, const Tensor& facts) {
  using bf16 = __nv_bfloat16;
  const BwdDqArgs a{make_attend<bf16>(op, in), make_view<const bf16>(grad.dout),
                    reinterpret_cast<const RowStats*>(facts.data), make_view<float>(out.dq)};
  dispatch_panels(in, [&]<int kPanelsK, int kPanelsV>() {
    launch(ctx, op, bwd_dq_kernel<Keys, kPanelsK, kPanelsV>, row_grid(a.in, in, 1, 1), dim3(kWarpgroup),
           kTileStages * sizeof(KeyStage<kPanelsK, kPanelsV>), a, keys);
  });
}

}  // namespace
}  // namespace triad::cuda
