// dk and dv of the attention branches on Hopper (bf16, heads of 64 to 192 in panels of 64 columns).
//
// A CTA is one warpgroup and keeps 64 keys of one (sequence, group) as the rows of wgmma: k and v in shared memory, dk
// and dv in registers as sums. It walks the rows that see the keys, 64 a stage (cp.async, three stages, swizzled), 32 a
// step: s^T = k q^T and dp^T = v dout^T come out with keys as rows, so that pg^T and ds^T are in registers what
//   dv += pg^T dout   and   dk += ds^T q   take as left operands: they never return to shared memory.
// Steps of 32 rows keep a thread at 168 registers, three CTAs an SM (wide heads: 227 and 255 registers, two CTAs). One
// step's scores and the last one's sums are queued together, and the scores are weighed while the sums run.
//
// 16 x 2048 x 12 x 2 x 64 on an H200, window 512: 1.1e11 FLOP with the tiles' edges, floor 0.14 ms at 790 TFLOP/s,
// measured 0.279 ms (396 TFLOP/s, tensor cores 42% busy, L2 4.1 TB/s); selected, 16 blocks of 64: 0.384 ms.
#include "kernels/nsa/sm90/backward.cuh"
#include "kernels/nsa/sm90/launch_backward.h"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

struct BwdDkdvArgs {
  Attend<bf16> in;
  View<const bf16> dout;
  const RowStats* facts;
  GradView dk, dv;
  KeyRange range;
  KeyWorkList list;
  int sequences_and_groups;
};

constexpr int kStages = 3;
constexpr int kStepRows = 32;
constexpr int kTileBytes = kRows * kPanelRowBytes;
// The rows of a stage: wide heads take half as many, so that two CTAs still fit an SM.
template <int kPanelsK>
constexpr int kStageRows = kPanelsK == 1 ? 64 : 32;
template <int kPanelsK, int kPanelsV>
struct __align__(1024) Stage {
  static constexpr int kCount = kStageRows<kPanelsK>, kPanelBytes = kCount * kPanelRowBytes;
  unsigned char q[kPanelsK * kPanelBytes], dout[kPanelsV * kPanelBytes];
  RowStats facts[kCount];
  int2 range[kCount];  // the keys that the row sees
};

template <int kPanelsK, int kPanelsV>
__global__ void __launch_bounds__(kWarpgroup, kPanelsK == 1 ? 3 : 2)
    bwd_dkdv_kernel(const __grid_constant__ BwdDkdvArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the PTX for older cards holds an empty kernel, which is not chosen there
  using Stage = Stage<kPanelsK, kPanelsV>;
  constexpr int kStageRows = Stage::kCount, kStepsD = kPanel / 16;
  const int bg = blockIdx.x % a.sequences_and_groups, b = bg / a.in.groups, g = bg % a.in.groups;
  const KeyWork work =
      find_work(a.list, a.range, a.in.tokens, blockIdx.x / a.sequences_and_groups, bg, a.sequences_and_groups);
  const int key0 = work.block * a.list.block_keys + static_cast<int>(blockIdx.y) * kRows;
  const int key_end = min(min((work.block + 1) * a.list.block_keys, key0 + kRows), a.range.keys);
  if (work.count < 0 || key0 >= key_end) return;

  Stage* const stages = reinterpret_cast<Stage*>(aligned_shared());
  unsigned char* const keys = reinterpret_cast<unsigned char*>(stages + kStages);  // k, then v
  int* const listed = reinterpret_cast<int*>(keys + (kPanelsK + kPanelsV) * kTileBytes);
  const bool is_listed = a.list.tokens != nullptr;
  if (is_listed) {
    const int* tokens = a.list.tokens + bg * a.list.tokens_stride + work.first;
    for (int i = threadIdx.x; i < work.count; i += kWarpgroup) listed[i] = tokens[i];
    __syncthreads();
  }
  const int G = a.in.heads.value(), rows = work.count * G, steps = (rows + kStageRows - 1) / kStageRows;
  const RowStats* const facts = a.facts + static_cast<int64_t>(bg) * a.in.tokens * G;
  constexpr int kWarpRows = kStageRows / 4;
  const int lane = threadIdx.x % 32, chunk = lane % 8, warp_row = threadIdx.x / 32 * kWarpRows;
  const bf16* const q_chunk = a.in.q.at(b, 0, g * G) + 8 * chunk;
  const bf16* const dout_chunk = a.dout.at(b, 0, g * G) + 8 * chunk;
  const int q_row = static_cast<int>(a.in.q.row / 8), q_head = static_cast<int>(a.in.q.head / 8);  // in 16 bytes
  const int dout_row = static_cast<int>(a.dout.row / 8), dout_head = static_cast<int>(a.dout.head / 8);
  const int to_row = swizzled(warp_row + lane / 8, chunk);

  // A warp brings a quarter of the stage's rows: a lane finds out where one of them lies and tells the eight that copy
  // it. Rows past the end repeat the last and weigh nothing.
  const auto load = [&](int step, Stage& stage) {
    if (step < steps) {
      const int r = warp_row + lane % kWarpRows, row = min(step * kStageRows + r, rows - 1);
      const int in_list = a.in.heads.quotient(row), t = is_listed ? listed[in_list] : work.first + in_list;
      const int h = row - in_list * G;
      const int q_at = t * q_row + h * q_head, dout_at = t * dout_row + h * dout_head;
#pragma unroll
      for (int i = 0; i < kWarpRows / 4; ++i) {
        const int to = (to_row ^ (i % 2 * 4 << 4)) + i * 4 * kPanelRowBytes;
        const int64_t q_from = __shfl_sync(kFullWarp, q_at, 4 * i + lane / 8);
        const int64_t dout_from = __shfl_sync(kFullWarp, dout_at, 4 * i + lane / 8);
#pragma unroll
        for (int panel = 0; panel < kPanelsK; ++panel)
          copy_async_16(stage.q + panel * Stage::kPanelBytes + to, q_chunk + 8 * q_from + panel * kPanel, 16);
#pragma unroll
        for (int panel = 0; panel < kPanelsV; ++panel)
          copy_async_16(stage.dout + panel * Stage::kPanelBytes + to, dout_chunk + 8 * dout_from + panel * kPanel, 16);
      }
      if (lane < kWarpRows) {
        if (step * kStageRows + r < rows)
          copy_async_8(&stage.facts[r], facts + static_cast<int64_t>(t) * G + h);
        else
          stage.facts[r] = make_float2(INFINITY, 0.0f);
        stage.range[r] = make_int2(a.range.low(t), a.range.high(t));
      }
    }
    copy_async_commit();
  };

  const int warp_key = key0 + 16 * (threadIdx.x / 32) + fragment_row();
  {
    const RowSource k_rows(a.in.k, b, g), v_rows(a.in.v, b, g);
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {  // keys past the end repeat the last; their sums are not stored
      const int r = threadIdx.x / 8 + 16 * i, key = min(key0 + r, key_end - 1);
#pragma unroll
      for (int panel = 0; panel < kPanelsK + kPanelsV; ++panel) {
        const bf16* const from =
            panel < kPanelsK ? k_rows.at(key, 0) + panel * kPanel : v_rows.at(key, 0) + (panel - kPanelsK) * kPanel;
        copy_async_16(keys + panel * kTileBytes + swizzled(r, chunk), from + 8 * chunk, 16);
      }
    }
  }
  load(0, stages[0]);
  const uint32_t k = tile_descriptor(shared_address(keys)), v = k + kPanelsK * (kTileBytes >> 4);
  const float scale = a.in.scale_log2();
  float dk[kPanelsK][kPanel / 8][4] = {}, dv[kPanelsV][kPanel / 8][4] = {};
  // Products with the rows row0 .. row0 + 31 of a stage. p and ds: first s^T and dp^T, then pg^T and ds^T.
  constexpr int kN = kStepRows / 8, kDeep = kStepRows / 16;
  float p[kN][4], ds[kN][4];
  uint32_t left_p[kDeep][4], left_ds[kDeep][4];
  const auto multiply_scores = [&](const Stage& stage, int row0) {
    const uint32_t q = tile_descriptor(shared_address(stage.q + row0 * kPanelRowBytes));
    const uint32_t dout = tile_descriptor(shared_address(stage.dout + row0 * kPanelRowBytes));
    wgmma_fence();
    const auto multiply = [&](float(&d)[kN][4], uint32_t left, uint32_t right, int panels) {
      wgmma_begin<Major::k, Major::k>(d, left, right);
#pragma unroll
      for (int i = 1; i < panels * kStepsD; ++i)
        wgmma<Major::k, Major::k>(d, left + i / kStepsD * (kTileBytes >> 4) + i % kStepsD * 2,
                                  right + i / kStepsD * (Stage::kPanelBytes >> 4) + i % kStepsD * 2);
    };
    multiply(p, k, q, kPanelsK);
    multiply(ds, v, dout, kPanelsV);
    wgmma_commit();
  };
  const auto multiply_sums = [&](const Stage& stage, int row0) {
    const uint32_t q = tile_descriptor(shared_address(stage.q + row0 * kPanelRowBytes));
    const uint32_t dout = tile_descriptor(shared_address(stage.dout + row0 * kPanelRowBytes));
    const auto multiply = [&](auto& d, const uint32_t(&left)[kDeep][4], uint32_t right) {
#pragma unroll
      for (int panel = 0; panel < static_cast<int>(std::extent_v<std::remove_reference_t<decltype(d)>>); ++panel)
#pragma unroll
        for (int i = 0; i < kDeep; ++i)
          wgmma<Major::mn>(d[panel], left[i], right + (panel * Stage::kPanelBytes + i * 16 * kPanelRowBytes >> 4));
    };
    multiply(dv, left_p, dout);
    multiply(dk, left_ds, q);
    wgmma_commit();
  };
  // `count`: the rows that the stage holds.
  const auto weigh = [&](const Stage& stage, int row0, int count) {
    const int2 first_range = stage.range[row0], last_range = stage.range[max(0, min(count, row0 + kStepRows) - 1)];
    const bool all = last_range.x <= key0 && first_range.y >= key_end;  // both ends of a range grow with the token
    pin(p);
    pin(ds);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const int column = row0 + 8 * j + fragment_column();
      const float4 fact = *reinterpret_cast<const float4*>(&stage.facts[column]);
#pragma unroll
      for (int e = 0; e < 4; ++e) p[j][e] = exp2_approx(fmaf(p[j][e], scale, e % 2 == 0 ? -fact.x : -fact.z));
      if (!all) {
        const int4 range = *reinterpret_cast<const int4*>(&stage.range[column]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = warp_key + 8 * (e / 2);
          if (key < (e % 2 == 0 ? range.x : range.z) || key >= (e % 2 == 0 ? range.y : range.w)) p[j][e] = 0.0f;
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) ds[j][e] = p[j][e] * (ds[j][e] - (e % 2 == 0 ? fact.y : fact.w));
    }
  };
  const auto pin_sums = [&] {
#pragma unroll
    for (auto& panel : dk) pin(panel);
#pragma unroll
    for (auto& panel : dv) pin(panel);
  };
  // ptxas lets no register become a left operand while products run: so all of them end first.
  const auto pack = [&] {
    pin(p);
    pin(ds);
    wgmma_wait<0>();
    pin_sums();
#pragma unroll
    for (int i = 0; i < kDeep; ++i) pack_operand(left_p[i], p, i), pack_operand(left_ds[i], ds, i);
  };
  const auto await_stage = [&] {
    copy_async_wait_group<0>();
    fence_async_proxy();
    __syncthreads();
  };

  // One half stage's scores and the last half's sums are queued together; while the sums run, the scores are weighed.
  if (steps > 0) {
    await_stage();
    load(1, stages[1]);
    multiply_scores(stages[0], 0);
    wgmma_wait<0>();
    weigh(stages[0], 0, rows);
    pack();
    for (int step = 0, s0 = 0, s1 = 1; step < steps; ++step) {
      const Stage &now = stages[s0], &next = stages[s1];
      const int s2 = s1 + 1 == kStages ? 0 : s1 + 1;
#pragma unroll
      for (int row0 = kStepRows; row0 < kStageRows; row0 += kStepRows) {
        multiply_scores(now, row0);
        multiply_sums(now, row0 - kStepRows);
        wgmma_wait<1>();
        weigh(now, row0, rows - step * kStageRows);
        pack();
      }
      await_stage();
      multiply_scores(next, 0);  // after the last step: of what lies there, unused
      multiply_sums(now, kStageRows - kStepRows);
      load(step + 2, stages[s2]);
      wgmma_wait<1>();
      weigh(next, 0, max(1, rows - (step + 1) * kStageRows));
      pack();
      s0 = s1, s1 = s2;
    }
  }
  wgmma_wait<0>();
  pin_sums();

  constexpr int kWidthK = kPanelsK * kPanel, kWidthV = kPanelsV * kPanel;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = warp_key + 8 * i;
    if (key >= key_end) continue;
    float* partial = a.list.partial;
    if (work.slot >= 0)
      partial += (static_cast<int64_t>(work.slot) * a.list.block_keys + key - work.block * a.list.block_keys) *
                 (kWidthK + kWidthV);
    const auto store = [&](float* to, const GradView& out, int column, float x, float y) {
      if (work.slot >= 0)
        *reinterpret_cast<float2*>(to + column) = make_float2(x, y);
      else
        out.store(b, key, g, column, x, y);
    };
#pragma unroll
    for (int j = 0; j < kWidthK / 8; ++j) {
      const float(&sum)[4] = dk[j / 8][j % 8];
      store(partial, a.dk, 8 * j + fragment_column(), sum[2 * i] * a.in.scale, sum[2 * i + 1] * a.in.scale);
    }
#pragma unroll
    for (int j = 0; j < kWidthV / 8; ++j) {
      const float(&sum)[4] = dv[j / 8][j % 8];
      store(partial + kWidthK, a.dv, 8 * j + fragment_column(), sum[2 * i], sum[2 * i + 1]);
    }
  }
#endif
}

// A CTA takes a few keys of a block, a thread four columns of one.
constexpr int kMergeThreads = 256;
__global__ void __launch_bounds__(kMergeThreads) bwd_dkdv_merge_kernel(const __grid_constant__ MergeArgs a) {
  const KeyWorkList& list = a.list;
  const int block = blockIdx.x, bg = blockIdx.y, b = bg / a.groups, g = bg % a.groups;
  int2 slots;  // the first, and how many
  if (list.block_slots != nullptr) {
    slots = list.block_slots[static_cast<int64_t>(bg) * list.blocks + block];
    if (slots.y <= 1) return;  // its only piece has stored dk and dv
  } else {
    const int parts = list.pieces / list.blocks;
    const int first = a.part_tokens == 0 ? 0 : a.range.first_row(block * list.block_keys) / a.part_tokens;
    slots = make_int2((bg * list.blocks + block) * parts + first, parts - first);
  }
  const int width = a.dk.width + a.dv.width, column = threadIdx.x * 4;
  const int in_block = static_cast<int>(blockIdx.z * blockDim.y + threadIdx.y);
  const int key = block * list.block_keys + in_block;
  if (in_block >= list.block_keys || key >= a.range.keys) return;
  float4 sum = {};
  for (int part = 0; part < slots.y; ++part) {
    const float4 x = *reinterpret_cast<const float4*>(
        list.partial + (static_cast<int64_t>(slots.x + part) * list.block_keys + in_block) * width + column);
    sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
  }
  const bool is_dk = column < a.dk.width;
  const GradView& out = is_dk ? a.dk : a.dv;
  const int to = is_dk ? column : column - a.dk.width;
  out.store(b, key, g, to, sum.x, sum.y);
  out.store(b, key, g, to + 2, sum.z, sum.w);
}

__global__ void __launch_bounds__(256)
    bwd_row_stats_kernel(RowStats* facts, const View<const float> lse, const View<const float> delta,
                         const View<const float> gate, Divisor heads, int rows, int groups) {
  const int row = static_cast<int>(blockIdx.x * 256 + threadIdx.x), bg = blockIdx.y;
  if (row >= rows) return;
  const int b = bg / groups, g = bg % groups, t = heads.quotient(row),
            head = g * heads.value() + row - t * heads.value();
  const float x = *lse.at(b, t, head), d = *delta.at(b, t, head), w = gate.data == nullptr ? 1.0f : *gate.at(b, t, g);
  const bool silent = x == -INFINITY || w == 0.0f;
  facts[static_cast<int64_t>(bg) * rows + row] =
      silent ? make_float2(INFINITY, 0.0f) : make_float2(fmaf(x, 1.4426950408889634f, -log2f(w)), d / w);
}

}  // namespace

Tensor compute_row_stats(Context& ctx, Scratch::Scope& scope, const AttendGradIn& grad, const AttendIn& in) {
  const Tensor facts =
      scope.alloc(DType::f32, {in.q.size(0) * in.k.size(2), in.q.size(1) * (in.q.size(2) / in.k.size(2)), 2});
  const int rows = static_cast<int>(facts.size(1)), groups = static_cast<int>(in.k.size(2));
  launch(ctx, "row_stats", bwd_row_stats_kernel, dim3(ceil_div(rows, 256), facts.size(0)), dim3(256), 0,
         reinterpret_cast<RowStats*>(facts.data), make_view<const float>(grad.lse), make_view<const float>(grad.delta),
         make_view<const float>(grad.gate), Divisor(static_cast<int>(in.q.size(2) / groups)), rows, groups);
  return facts;
}

void merge_dkdv_sm90(Context& ctx, const char* op, const MergeArgs& a, int64_t sequences_and_groups) {
  if (a.list.partial == nullptr) return;
  const int lanes = (a.dk.width + a.dv.width) / 4, keys = kMergeThreads / lanes;
  const dim3 grid(a.list.blocks, static_cast<unsigned>(sequences_and_groups),
                  static_cast<unsigned>(ceil_div(a.list.block_keys, keys)));
  launch(ctx, op, bwd_dkdv_merge_kernel, grid, dim3(lanes, keys), 0, a);
}

void backward_dkdv_sm90(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                        const AttendIn& in, const KeyRange& range, const KeyWorkList& list, const Tensor& facts) {
  const auto bgs = static_cast<unsigned>(in.k.size(0) * in.k.size(2));
  const BwdDkdvArgs a{make_attend<bf16>(op, in),
                      make_view<const bf16>(grad.dout),
                      reinterpret_cast<const RowStats*>(facts.data),
                      make_grad_view(out.dk),
                      make_grad_view(out.dv),
                      range,
                      list,
                      static_cast<int>(bgs)};
  const dim3 grid(bgs * list.pieces, ceil_div(list.block_keys, kRows));  // the first keys, which have most rows, first
  dispatch_panels(in, [&]<int kPanelsK, int kPanelsV>() {
    const size_t bytes = kStages * sizeof(Stage<kPanelsK, kPanelsV>) + (kPanelsK + kPanelsV) * kTileBytes +
                         (list.tokens != nullptr ? kWorkTokens * sizeof(int) : 0);
    launch(ctx, op, bwd_dkdv_kernel<kPanelsK, kPanelsV>, grid, dim3(kWarpgroup), bytes, a);
  });
  merge_dkdv_sm90(ctx, op, {list, a.dk, a.dv, range, a.in.groups}, bgs);
}

}  // namespace triad::cuda
