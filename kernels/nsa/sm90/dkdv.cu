// dk and dv for the branches and dense attention on Hopper (bf16, head widths 64 to 192 in 64-column panels).
//
// A CTA is one warpgroup and owns 64 keys in one (sequence, group), wgmma's rows: k and v in shared memory, dk and dv
// accumulate in registers. It loops over the query rows (t, h) that see these keys, one stage at a time (cp.async,
// three stages, 128-byte swizzle), 32 rows per step:
//   s^T = k q^T,  dp^T = v dout^T,  p^T and ds^T (softmax_backward),  dv += p^T dout,  dk += ds^T q.
// s^T has keys as rows, so p^T and ds^T are already laid out in registers as the last two products' left operands: they
// never pass through shared memory.
//
// 32-row steps keep a thread at 168 registers, three CTAs per SM (head widths 128 and 192: 227 and 255 registers, two
// CTAs). One step's scores and the previous step's dk and dv are queued together, and the former's softmax runs while
// the latter are computed.
//
// If several CTAs share a block's rows, each stores fp32 partial sums, and bwd_dkdv_merge_kernel
// (nsa/gpu/dkdv_merge.cu) adds them in order.
#include "kernels/nsa/gpu/dkdv_merge.cuh"
#include "kernels/nsa/sm90/backward.cuh"
#include "kernels/nsa/sm90/launch_backward.h"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

struct BwdDkdvArgs {
  Attend<bf16> in;
  View<const bf16> dout;
  const RowStats* row_stats;
  GradView dk, dv;
  KeyRange range;
  KeyWorkList list;
  int sequences_and_groups;
};

constexpr int kStages = 3;
constexpr int kStepRows = 32;
constexpr int kTileBytes = kRows * kPanelRowBytes;  // a panel (64 columns) for the CTA's keys
// Rows per stage. Head widths 128 and 192 have half as many rows as 64, so that two CTAs still fit on an SM.
template <int kPanelsK>
constexpr int kStageRows = kPanelsK == 1 ? 64 : 32;
template <int kPanelsK, int kPanelsV>
struct __align__(1024) Stage {
  static constexpr int kCount = kStageRows<kPanelsK>, kPanelBytes = kCount * kPanelRowBytes;
  unsigned char q[kPanelsK * kPanelBytes], dout[kPanelsV * kPanelBytes];
  RowStats row_stats[kCount];
  int2 range[kCount];  // the first key that the row sees, and where its keys end
};

// What a CTA computes: the keys [key0, key_end) in sequence b and group g, and the `rows` query rows in the piece of
// work `work`.
struct CtaTask {
  KeyWork work;
  int bg, b, g, key0, key_end, rows;
  // The index of `key` within the block; this CTA has the block's blockIdx.y-th 64 keys.
  __device__ __forceinline__ int in_block(int key) const { return key - key0 + static_cast<int>(blockIdx.y) * kRows; }
};
__device__ __forceinline__ CtaTask find_task(const BwdDkdvArgs& a) {
  CtaTask task;
  task.bg = blockIdx.x % a.sequences_and_groups, task.b = task.bg / a.in.groups, task.g = task.bg % a.in.groups;
  task.work = find_work(a.list, DocumentRange(a.range, task.b), a.range.keys, a.in.tokens,
                        blockIdx.x / a.sequences_and_groups, task.bg, a.sequences_and_groups);
  const int2 block_keys = keys_of_block(a.list, a.range, task.b, task.work.block);
  task.key0 = block_keys.x + static_cast<int>(blockIdx.y) * kRows;
  task.key_end = min(block_keys.y, task.key0 + kRows);
  task.rows = task.work.count * a.in.heads.value();
  return task;
}

// Loads stages of query rows, a quarter stage per warp: a lane computes one row's address, and eight lanes copy it.
template <int kPanelsK, int kPanelsV>
struct RowLoader {
  using Stage = Stage<kPanelsK, kPanelsV>;
  static constexpr int kStageRows = Stage::kCount, kWarpRows = kStageRows / 4;
  const BwdDkdvArgs& a;
  const CtaTask& task;
  const int* listed;  // the piece's tokens, if is_listed; otherwise unused, because the tokens are contiguous
  bool is_listed;
  const RowStats* row_stats;
  const bf16 *q_chunk, *dout_chunk;
  int q_row, q_head, dout_row, dout_head;  // strides in units of 16 bytes
  int G, lane, warp_row, to_row;

  __device__ __forceinline__ RowLoader(const BwdDkdvArgs& a, const CtaTask& task, const int* listed, bool is_listed)
      : a(a), task(task), listed(listed), is_listed(is_listed) {
    G = a.in.heads.value();
    row_stats = a.row_stats + static_cast<int64_t>(task.bg) * a.in.tokens * G;
    lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * kWarpRows;
    const int chunk = lane % 8;
    q_chunk = a.in.q.at(task.b, 0, task.g * G) + 8 * chunk;
    dout_chunk = a.dout.at(task.b, 0, task.g * G) + 8 * chunk;
    q_row = static_cast<int>(a.in.q.row / 8), q_head = static_cast<int>(a.in.q.head / 8);
    dout_row = static_cast<int>(a.dout.row / 8), dout_head = static_cast<int>(a.dout.head / 8);
    to_row = swizzled(warp_row + lane / 8, chunk);
  }
  __device__ __forceinline__ int steps() const { return ceil_div(task.rows, kStageRows); }

  // Starts the copies of a step's rows, as one cp.async group; after the last step the group is empty. Rows past the
  // end are copies of the last row, with statistics that make p = 0.
  __device__ __forceinline__ void load(int step, Stage& stage) const {
    if (step < steps()) {
      const int r = warp_row + lane % kWarpRows, row = min(step * kStageRows + r, task.rows - 1);
      const int in_list = a.in.heads.quotient(row), t = is_listed ? listed[in_list] : task.work.first + in_list;
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
        if (step * kStageRows + r < task.rows)
          copy_async_8(&stage.row_stats[r], row_stats + static_cast<int64_t>(t) * G + h);
        else
          stage.row_stats[r] = no_weight();
        const DocumentRange range(a.range, task.b);
        stage.range[r] = make_int2(range.low(t), range.high(t));
      }
    }
    copy_async_commit();
  }
};

// Copies the CTA's k, then v, to shared memory. Keys past the end are copies of the last one; their sums are not
// stored.
template <int kPanelsK, int kPanelsV>
__device__ __forceinline__ void load_keys(const BwdDkdvArgs& a, const CtaTask& task, unsigned char* keys) {
  const RowSource k_rows(a.in.k, task.b, task.g), v_rows(a.in.v, task.b, task.g);
  const int chunk = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) {
    const int r = threadIdx.x / 8 + 16 * i, key = min(task.key0 + r, task.key_end - 1);
#pragma unroll
    for (int panel = 0; panel < kPanelsK + kPanelsV; ++panel) {
      const bf16* const from =
          panel < kPanelsK ? k_rows.at(key, 0) + panel * kPanel : v_rows.at(key, 0) + (panel - kPanelsK) * kPanel;
      copy_async_16(keys + panel * kTileBytes + swizzled(r, chunk), from + 8 * chunk, 16);
    }
  }
}

// Multiplies the warpgroup's 64 keys with 32 rows in a stage, row0 to row0 + 31.
template <int kPanelsK, int kPanelsV>
struct KeyMma {
  using Stage = Stage<kPanelsK, kPanelsV>;
  static constexpr int kStepsD = kPanel / 16, kN = kStepRows / 8, kDeep = kStepRows / 16;
  const CtaTask& task;
  uint32_t k, v;  // wgmma descriptors for the key and value tiles
  float scale;    // score scale times log2(e)
  int warp_key;   // this lane's first key
  // References to arrays outside the struct. If the arrays were members, nvcc could not keep the struct's scalars in
  // registers before the loops are unrolled.
  float (&dk)[kPanelsK][kPanel / 8][4], (&dv)[kPanelsV][kPanel / 8][4];
  float (&p)[kN][4], (&ds)[kN][4];                           // p and ds hold s^T and dp^T first, then p^T and ds^T
  uint32_t (&operand_p)[kDeep][4], (&operand_ds)[kDeep][4];  // p^T and ds^T, packed as left operands for wgmma

  __device__ __forceinline__ void scores(const Stage& stage, int row0) {
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
  }

  __device__ __forceinline__ void dkdv(const Stage& stage, int row0) {
    const uint32_t q = tile_descriptor(shared_address(stage.q + row0 * kPanelRowBytes));
    const uint32_t dout = tile_descriptor(shared_address(stage.dout + row0 * kPanelRowBytes));
    const auto multiply = [&](auto& d, const uint32_t(&left)[kDeep][4], uint32_t right) {
#pragma unroll
      for (int panel = 0; panel < static_cast<int>(std::extent_v<std::remove_reference_t<decltype(d)>>); ++panel)
#pragma unroll
        for (int i = 0; i < kDeep; ++i)
          wgmma<Major::mn>(d[panel], left[i], right + (panel * Stage::kPanelBytes + i * 16 * kPanelRowBytes >> 4));
    };
    multiply(dv, operand_p, dout);
    multiply(dk, operand_ds, q);
    wgmma_commit();
  }

  // Computes p = 2^(s scale - lse), which is 0 for keys that the row does not see, and ds = p (dp - dpsum). The stage
  // has `count` rows.
  __device__ __forceinline__ void softmax_backward(const Stage& stage, int row0, int count) {
    const int2 first_range = stage.range[row0], last_range = stage.range[max(0, min(count, row0 + kStepRows) - 1)];
    // The first and the last key that a row sees both grow with its token, so the first and the last row decide for all
    // rows.
    const bool all_seen = last_range.x <= task.key0 && first_range.y >= task.key_end;
    pin(p);
    pin(ds);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const int column = row0 + 8 * j + fragment_column();
      const float4 stats = *reinterpret_cast<const float4*>(&stage.row_stats[column]);  // (lse, dpsum) for two rows
#pragma unroll
      for (int e = 0; e < 4; ++e) p[j][e] = exp2_approx(fmaf(p[j][e], scale, e % 2 == 0 ? -stats.x : -stats.z));
      if (!all_seen) {
        const int4 range = *reinterpret_cast<const int4*>(&stage.range[column]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = warp_key + 8 * (e / 2);
          if (key < (e % 2 == 0 ? range.x : range.z) || key >= (e % 2 == 0 ? range.y : range.w)) p[j][e] = 0.0f;
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) ds[j][e] = p[j][e] * (ds[j][e] - (e % 2 == 0 ? stats.y : stats.w));
    }
  }

  __device__ __forceinline__ void pin_sums() {
#pragma unroll
    for (auto& panel : dk) pin(panel);
#pragma unroll
    for (auto& panel : dv) pin(panel);
  }
  // Packs p^T and ds^T as left operands. All products have to end first: ptxas writes no left operand while one runs.
  __device__ __forceinline__ void pack() {
    pin(p);
    pin(ds);
    wgmma_wait<0>();
    pin_sums();
#pragma unroll
    for (int i = 0; i < kDeep; ++i) pack_operand(operand_p[i], p, i), pack_operand(operand_ds[i], ds, i);
  }
};

// Stores this lane's two keys' dk and dv, or, if the block has several pieces, stores them as partial sums to the
// piece's slot.
template <int kPanelsK, int kPanelsV>
__device__ __forceinline__ void store_dkdv(const BwdDkdvArgs& a, const CtaTask& task,
                                           const KeyMma<kPanelsK, kPanelsV>& mma) {
  constexpr int kWidthK = kPanelsK * kPanel, kWidthV = kPanelsV * kPanel;
  const KeyWork& work = task.work;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = mma.warp_key + 8 * i;
    if (key >= task.key_end) continue;
    float* partial = a.list.partial;
    if (work.slot >= 0)
      partial += (static_cast<int64_t>(work.slot) * a.list.block_keys + task.in_block(key)) * (kWidthK + kWidthV);
    const auto store = [&](float* to, const GradView& out, int column, float x, float y) {
      if (work.slot >= 0)
        *reinterpret_cast<float2*>(to + column) = make_float2(x, y);
      else
        out.store(task.b, key, task.g, column, x, y);
    };
#pragma unroll
    for (int j = 0; j < kWidthK / 8; ++j) {
      const float(&sum)[4] = mma.dk[j / 8][j % 8];
      store(partial, a.dk, 8 * j + fragment_column(), sum[2 * i] * a.in.scale, sum[2 * i + 1] * a.in.scale);
    }
#pragma unroll
    for (int j = 0; j < kWidthV / 8; ++j) {
      const float(&sum)[4] = mma.dv[j / 8][j % 8];
      store(partial + kWidthK, a.dv, 8 * j + fragment_column(), sum[2 * i], sum[2 * i + 1]);
    }
  }
}

template <int kPanelsK, int kPanelsV>
__global__ void __launch_bounds__(kWarpgroup, kPanelsK == 1 ? 3 : 2)
    bwd_dkdv_kernel(const __grid_constant__ BwdDkdvArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the PTX for older cards holds an empty kernel, which is not chosen there
  using Stage = Stage<kPanelsK, kPanelsV>;
  constexpr int kStageRows = Stage::kCount;
  const CtaTask task = find_task(a);
  const KeyWork& work = task.work;
  if (work.count < 0 || task.key0 >= task.key_end) return;

  Stage* const stages = reinterpret_cast<Stage*>(aligned_shared());
  unsigned char* const keys = reinterpret_cast<unsigned char*>(stages + kStages);  // the CTA's k, then v
  int* const listed = reinterpret_cast<int*>(keys + (kPanelsK + kPanelsV) * kTileBytes);
  const bool is_listed = a.list.tokens != nullptr;
  if (is_listed) {
    const int* tokens = a.list.tokens + task.bg * a.list.tokens_stride + work.first;
    for (int i = threadIdx.x; i < work.count; i += kWarpgroup) listed[i] = tokens[i];
    __syncthreads();
  }
  const RowLoader<kPanelsK, kPanelsV> loader(a, task, listed, is_listed);
  load_keys<kPanelsK, kPanelsV>(a, task, keys);
  loader.load(0, stages[0]);
  const uint32_t k = tile_descriptor(shared_address(keys));
  using Mma = KeyMma<kPanelsK, kPanelsV>;
  float dk[kPanelsK][kPanel / 8][4] = {}, dv[kPanelsV][kPanel / 8][4] = {}, p[Mma::kN][4], ds[Mma::kN][4];
  uint32_t operand_p[Mma::kDeep][4], operand_ds[Mma::kDeep][4];
  Mma mma{.task = task,
          .k = k,
          .v = k + kPanelsK * (kTileBytes >> 4),
          .scale = a.in.scale_log2(),
          .warp_key = task.key0 + 16 * static_cast<int>(threadIdx.x / 32) + fragment_row(),
          .dk = dk,
          .dv = dv,
          .p = p,
          .ds = ds,
          .operand_p = operand_p,
          .operand_ds = operand_ds};
  const auto wait_stage = [&] {
    copy_async_wait_group<0>();
    fence_async_proxy();
    __syncthreads();
  };

  if (const int steps = loader.steps(); steps > 0) {
    wait_stage();
    loader.load(1, stages[1]);
    mma.scores(stages[0], 0);
    wgmma_wait<0>();
    mma.softmax_backward(stages[0], 0, task.rows);
    mma.pack();
    for (int step = 0, s0 = 0, s1 = 1; step < steps; ++step) {
      const Stage &now = stages[s0], &next = stages[s1];
      const int s2 = s1 + 1 == kStages ? 0 : s1 + 1;
#pragma unroll
      for (int row0 = kStepRows; row0 < kStageRows; row0 += kStepRows) {
        mma.scores(now, row0);
        mma.dkdv(now, row0 - kStepRows);
        wgmma_wait<1>();
        mma.softmax_backward(now, row0, task.rows - step * kStageRows);
        mma.pack();
      }
      wait_stage();
      mma.scores(next, 0);  // the rows are old ones after the last step, and the result is not used
      mma.dkdv(now, kStageRows - kStepRows);
      loader.load(step + 2, stages[s2]);
      wgmma_wait<1>();
      mma.softmax_backward(next, 0, max(1, task.rows - (step + 1) * kStageRows));
      mma.pack();
      s0 = s1, s1 = s2;
    }
  }
  wgmma_wait<0>();
  mma.pin_sums();
  store_dkdv(a, task, mma);
#endif
}

}  // namespace

void backward_dkdv_sm90(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                        const AttendIn& in, const KeyRange& range, const KeyWorkList& list, const Tensor& row_stats) {
  const auto bgs = static_cast<unsigned>(in.k.size(0) * in.k.size(2));
  const BwdDkdvArgs a{make_attend<bf16>(op, in),
                      make_view<const bf16>(grad.dout),
                      reinterpret_cast<const RowStats*>(row_stats.data),
                      make_grad_view(out.dk),
                      make_grad_view(out.dv),
                      range,
                      list,
                      static_cast<int>(bgs)};
  const dim3 grid(bgs * list.pieces,
                  ceil_div(list.block_keys, kRows));  // the first keys start first, because most rows see them
  dispatch_panels(in, [&]<int kPanelsK, int kPanelsV>() {
    const size_t bytes = kStages * sizeof(Stage<kPanelsK, kPanelsV>) + (kPanelsK + kPanelsV) * kTileBytes +
                         (list.tokens != nullptr ? kWorkTokens * sizeof(int) : 0);
    launch(ctx, op, bwd_dkdv_kernel<kPanelsK, kPanelsV>, grid, dim3(kWarpgroup), bytes, a);
  });
  merge_dkdv(ctx, op, {list, a.dk, a.dv, range, a.in.tokens, a.in.groups}, bgs);
}

}  // namespace triad::cuda
