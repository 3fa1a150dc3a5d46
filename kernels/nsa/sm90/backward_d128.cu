// dq, dk and dv for the branches and dense attention on Hopper by one kernel (bf16, head width 128): five products.
//
// A CTA owns keys in one (sequence, group) and loops over the query rows that see them, 64 rows per stage. Its
// warpgroups:
//   0, 1  MMA (KeyMma): 64 keys and a stage's 64 rows each. s^T = k q^T and dp^T = v dout^T; with p^T and ds^T as left
//         operands in registers, dv += p^T dout and dk += ds^T q. They also store ds to shared memory.
//   2     dQ (reduce_dq): dq = ds k, added to global memory by bulk additions in L2, a token's heads together.
//   3     producer (produce_stages): q, dout and row statistics by cp.async.
// The MMA warpgroups share
//   contiguous rows (window, compressed, dense), and rows that list blocks of more than 64 keys: the stage; they have
//   128 keys: q, dout and dq move once per 128 keys;
//   rows that list blocks of 64 keys (selected): the block; they alternate stages, and add up dk and dv at the end.
// With blocks of 128, the former takes two thirds of the time that two CTAs of 64 keys for each block take.
//
// CTAs add to dq in any order, and the bits repeat: each addend is rounded to a multiple of the row's rounding unit
// (nsa/attend.h), which keeps every partial sum exact. CTAs that run at the same time process rows close together, so
// that q, dout and dq move to and from memory about once: see find_piece and CtaTask::start.
//
// Bound: 10.5 MFLOP per stage and 128 keys, 2,570 tensor core clocks, for 32 KB read from L2 and 32 KB added. Shared
// memory is closer: the products read 256 KB per stage and all else moves 140 KB, 3,100 clocks at 128 bytes. What
// limits the kernel is the dq chain (products that share the tensor cores with four others, rounding, draining to L2);
// the chain from scores through softmax to sums takes as long. So values are read before the products that use them
// start, and barriers are waited for while products run.
#include "kernels/nsa/sm90/launch_backward.h"

#include "kernels/nsa/gpu/dkdv_merge.cuh"
#include "kernels/nsa/sm90/backward_d128_stage.cuh"

namespace triad::cuda {
namespace {

// What a CTA computes: the keys [key0, key_end) in sequence b and group g, and the `rows` query rows in the piece of
// work `work`.
struct CtaTask {
  int bg, b, g;
  KeyWork work;
  int key0, key_end, rows, steps;
  int block0;  // the block's first key
  int start;   // the row stage that is processed first
  // The first row in the stage that this step processes. After the last stage, processing continues with stage 0: all
  // CTAs that share contiguous rows process the same rows at the same time.
  __device__ __forceinline__ int stage_row(int step) const {
    return (step + start < steps ? step + start : step + start - steps) * kStageRows;
  }
};

// Copies the CTA's k and v to shared memory. Keys past the end are copies of the last one; their sums are not stored.
template <class Rows>
__device__ __forceinline__ void load_keys(Shared<Rows>& shared, const BwdD128Args& a, const CtaTask& task) {
  const RowSource k_rows(a.in.k, task.b, task.g), v_rows(a.in.v, task.b, task.g);
  const int chunk = threadIdx.x % 8;
  for (int r = threadIdx.x / 8; r < Shared<Rows>::kKeyTiles * kRows; r += kKeyThreads / 8) {
    const int key = min(task.key0 + r, task.key_end - 1), to = swizzled(r % kRows, chunk);
    KeyPanels& tile = shared.keys[r / kRows];
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      copy_async_16(tile.k[panel] + to, k_rows.at(key, 0) + panel * kPanel + 8 * chunk, 16);
      copy_async_16(tile.v[panel] + to, v_rows.at(key, 0) + panel * kPanel + 8 * chunk, 16);
    }
  }
  barrier_arrive_after_copies(&shared.keys_full);
}
// Waits until the barrier's phase with this parity has ended. Data that cp.async has copied before is then visible to
// wgmma.
__device__ __forceinline__ void wait_copies(Barrier& barrier, int parity) {
  barrier_wait(&barrier, parity);
  fence_async_proxy();
}

// ---- producer warpgroup ----

// Loads the stages, 16 rows per warp: a lane computes one row's address, and eight lanes copy it. Rows past the end are
// copies of the last row, with statistics that make p = 0.
template <class Rows>
__device__ __forceinline__ void produce_stages(Shared<Rows>& shared, const BwdD128Args& a, const CtaTask& task,
                                               int warp, int lane) {
  constexpr int kStages = Shared<Rows>::kStages;
  const int G = a.in.heads.value(), rows = task.rows, steps = task.steps;
  const int chunk = lane % 8, r = warp * kWarpRows + lane % kWarpRows;
  const int to_row = swizzled(warp * kWarpRows + lane / 8, chunk);
  // In tensors with one row per query, rows are counted from the call's first token.
  const int first_token = a.in.first_token;
  const bf16* const q_chunk = a.in.q.at(task.b, first_token, task.g * G) + 8 * chunk;
  const bf16* const dout_chunk = a.dout.at(task.b, first_token, task.g * G) + 8 * chunk;
  decltype(auto) visible = range_of_rows<Rows::kListed>(a.range, task.b);
  for (int step = 0, stage = 0, round = 1; step < steps; ++step) {
    if (step >= kStages) barrier_wait(&shared.empty[stage], round);
    const int row0 = task.stage_row(step), row = min(row0 + r, rows - 1);
    const int in_list = a.in.heads.quotient(row),
              t = Rows::kListed ? shared.listed[in_list] : task.work.first + in_list;
    const int h = row - in_list * G, at = t - first_token;
    const int q_at = a.q_steps.at(at, h), dout_at = a.dout_steps.at(at, h);
    RowStage& rows_to = shared.stages[stage];
#pragma unroll
    for (int i = 0; i < kWarpRows / 4; ++i) {
      const int to = (to_row ^ (i % 2 * 4 << 4)) + i * 4 * kPanelRowBytes;
      const bf16* const q_from = q_chunk + 8 * static_cast<int64_t>(__shfl_sync(kFullWarp, q_at, 4 * i + lane / 8));
      const bf16* const dout_from =
          dout_chunk + 8 * static_cast<int64_t>(__shfl_sync(kFullWarp, dout_at, 4 * i + lane / 8));
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        copy_async_16(rows_to.q[panel] + to, q_from + panel * kPanel, 16);
        copy_async_16(rows_to.dout[panel] + to, dout_from + panel * kPanel, 16);
      }
    }
    // A token's consecutive heads whose dq rows are neighbours in memory form a strip. One bulk reduction adds a strip.
    const bool exists = row0 + r < rows;
    const int dq_at = a.dq_steps.at(at, h), before = __shfl_up_sync(kFullWarp, dq_at, 1);
    const bool begins = lane == 0 || !exists || dq_at != before + kWidth / 4;
    const unsigned begin_of = __ballot_sync(kFullWarp, lane >= kWarpRows || begins);
    if (warp == 0 && lane == 0) {
      const int last = a.in.heads.quotient(min(row0 + kStageRows, rows) - 1);
      const int last_token = Rows::kListed ? shared.listed[last] : task.work.first + last;
      // A later token's keys begin and end later. So all rows see the keys from the last token's first key to the first
      // token's last key.
      shared.seen_by_all[stage] = make_int2(visible.low(last_token), visible.high(t));
    }
    if (lane < kWarpRows) {
      const int strip = begins && exists ? __ffs(begin_of >> (lane + 1)) : 0;
      shared.dq_strip[step % kRecent][r] = make_int2(dq_at, strip * kWidth * static_cast<int>(sizeof(float)));
      if (exists) {
        const float* const stats =
            &a.row_stats[(static_cast<int64_t>(task.bg) * (a.in.tokens - first_token) + at) * G + h].x;
        copy_async_4(&shared.lse[stage][r], stats, true);
        copy_async_4(&shared.dpsum[stage][r], stats + 1, true);
      } else {
        shared.lse[stage][r] = INFINITY;
        shared.dpsum[stage][r] = 0.0f;
      }
      shared.range[stage][r] = make_int2(visible.low(t), visible.high(t));
      copy_async_4(&shared.rounding_unit[step % kRecent][r], a.rounding_unit.at(task.b, t, task.g * G + h), true);
    }
    barrier_arrive_after_copies(&shared.full[stage]);
    barrier_arrive_warp(&shared.full[stage]);
    if (++stage == kStages) stage = 0, round ^= 1;
  }
}

// ---- dQ warpgroup ----

// Rounds a dq panel (64 columns) and stores this lane's two rows to shared memory. Each row takes 512 bytes, so all
// begin in the same bank. To avoid conflicts, a lane begins with the 32-byte chunk j that its row's number selects; two
// rounds of swaps move that chunk to the front.
template <class Rows>
__device__ __forceinline__ void store_dq_panel(Shared<Rows>& shared, const float (&dq)[8][4],
                                               const float (&rounding_unit)[2], float scale, int row, int panel) {
  const int turn = fragment_row() & 3;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float2 x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const auto rounded = [&](float y) {
        const float c = copysignf(rounding_unit[i], y);
        return __fmaf_rn(y, scale, c) - c;
      };
      x[j] = make_float2(rounded(dq[j][2 * i]), rounded(dq[j][2 * i + 1]));
    }
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if ((j & bit) == 0) {
          const float2 one = x[j], other = x[j + bit];
          x[j] = (turn & bit) != 0 ? other : one, x[j + bit] = (turn & bit) != 0 ? one : other;
        }
    float* const to = &shared.dq[row + 8 * i][panel * kPanel + fragment_column()];
#pragma unroll
    for (int j = 0; j < 8; ++j) *reinterpret_cast<float2*>(to + 8 * (j ^ turn)) = x[j];
  }
}

template <class Rows>
__device__ __forceinline__ void reduce_dq(Shared<Rows>& shared, const BwdD128Args& a, const CtaTask& task, int warp,
                                          int lane) {
  // kSources: the MMA warpgroups that write ds in a step
  constexpr int kSteps = kPanel / 16, kSources = Rows::kAlternates ? 1 : 2;
  float* const dq_first = a.dq.at(task.b, a.in.first_token, task.g * a.in.heads.value());
  const int row = warp * kWarpRows + fragment_row();  // this lane has the rows `row` and row + 8
  wait_copies(shared.keys_full, 0);
  for (int step = 0; step < task.steps; ++step) {
    const int first_source = Rows::kAlternates ? step % 2 : 0, parity = (Rows::kAlternates ? step / 2 : step) & 1;
#pragma unroll
    for (int i = 0; i < kSources; ++i) barrier_wait(&shared.ds_full[first_source + i], parity);
    const float rounding_unit[2] = {shared.rounding_unit[step % kRecent][row],
                                    shared.rounding_unit[step % kRecent][row + 8]};
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {  // one panel at a time, because registers are few
      float dq[8][4];
      leave_unset(dq);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        const uint32_t ds = kReadAlong | shared_address(shared.ds[first_source + i]) >> 4;
        const uint32_t k = kReadAcross | shared_address(shared.keys[i].k[panel]) >> 4;
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          if (i + j == 0)
            wgmma<Major::k, Major::mn>(dq, ds, k, false);
          else
            wgmma<Major::k, Major::mn>(dq, ds + 2 * j, k + j * (16 * kPanelRowBytes >> 4));
        }
      }
      wgmma_commit();
      if (panel == 0) {
        bulk_wait_read<0>();
        __syncwarp();
      }
      wgmma_wait<0>();
      pin(dq);
      if (panel == kPanels - 1) {
#pragma unroll
        for (int i = 0; i < kSources; ++i) barrier_arrive(&shared.ds_empty[first_source + i]);
      }
      store_dq_panel(shared, dq, rounding_unit, a.in.scale, row, panel);
    }
    fence_async_proxy();
    __syncwarp();
    // Each warp adds the 16 rows that it has written, so it waits for no other warp.
    if (lane < kWarpRows) {
      const int r = warp * kWarpRows + lane;
      const int2 strip = shared.dq_strip[step % kRecent][r];
      if (strip.y > 0) add_bulk(dq_first + 4 * static_cast<int64_t>(strip.x), shared.dq[r], strip.y);
      bulk_commit();
    }
  }
  bulk_wait_read<0>();
}

// ---- MMA warpgroups ----

template <class Rows>
struct KeyMma {
  using Memory = Shared<Rows>;
  static constexpr int kStages = Memory::kStages, kSteps = kPanel / 16;
  static constexpr int kStride = Rows::kAlternates ? 2 : 1;  // a warpgroup processes every kStride-th stage

  Memory& shared;
  const CtaTask& task;
  int warpgroup;
  int key0, key_end, warp_key;  // this warpgroup's keys [key0, key_end); this lane's first key
  float scale;                  // score scale times log2(e)
  // wgmma descriptors for tiles in shared memory. They are members that are computed once, from values equal in all
  // lanes, so that the products read them from uniform registers; otherwise each product would need a move.
  uint32_t k, v, stages_at;
  int ds_to;  // byte offset in ds where this lane's row in the four stored 8 x 8 matrices begins; 16 rows further: 2048
              // bytes more
  int stage;
  int phases = 0;  // bit 0: steps done, modulo 2; bit 1: how often the stage ring has been passed, modulo 2
  // References to arrays outside the struct. If the arrays were members, nvcc could not keep the struct's scalars in
  // registers before the loops are unrolled. p is kept in bf16 too, as the product for dv needs it; ds then needs 32
  // registers less.
  float (&dk)[kWidth / 8][4], (&dv)[kWidth / 8][4], (&p)[8][4];
  uint32_t (&operand_p)[4][4], (&operand_ds)[4][4];  // p^T and ds^T, packed as left operands for wgmma

  __device__ __forceinline__ uint32_t q_of(int stage) const {
    return stages_at + static_cast<uint32_t>(stage) * (sizeof(RowStage) >> 4);
  }
  __device__ __forceinline__ uint32_t dout_of(int stage) const { return q_of(stage) + (kPanels * kPanelBytes >> 4); }

  __device__ __forceinline__ void scores(float (&d)[8][4], uint32_t left, uint32_t right) const {
    wgmma_begin<Major::k, Major::k>(d, left, right);
#pragma unroll
    for (int i = 1; i < kPanels * kSteps; ++i) {
      const int at = i / kSteps * (kPanelBytes >> 4) + i % kSteps * 2;
      wgmma<Major::k, Major::k>(d, left + at, right + at);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void add(float (&d)[kWidth / 8][4], const uint32_t (&left)[4][4], uint32_t right) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma<Major::mn>(d, left[i], right + (i * 16 * kPanelRowBytes >> 4));
    wgmma_commit();
  }
  // Reads one statistic for a stage's rows. It is called before the products whose results need it: their operands keep
  // shared memory busy.
  __device__ __forceinline__ void read_stats(float2 (&to)[8], const float (&values)[kStageRows]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) to[j] = *reinterpret_cast<const float2*>(&values[8 * j + fragment_column()]);
  }
  // Turns scores into probabilities: p = 2^(s scale - lse), and 0 for keys that the row does not see.
  __device__ __forceinline__ void softmax(const float2 (&lse)[8]) {
    const int2* const ranges = shared.range[stage];
    const int2 common = shared.seen_by_all[stage];
    const bool all_seen = common.x <= key0 && min(common.y, key_end) >= key0 + kRows;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) p[j][e] = exp2_approx(fmaf(p[j][e], scale, e % 2 == 0 ? -lse[j].x : -lse[j].y));
    pin(p);
    if (!all_seen) {  // a single branch, with the mask in one register: the kernel has no registers left for more
      unsigned seen = 0;
#pragma unroll 1
      for (int j = 0; j < 8; ++j) {
        const int4 range = *reinterpret_cast<const int4*>(&ranges[8 * j + fragment_column()]);
        seen >>= 4;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = warp_key + 8 * (e / 2);
          const int low = e % 2 == 0 ? range.x : range.z, high = e % 2 == 0 ? range.y : range.w;
          if (key >= low && key < min(high, key_end)) seen |= 1u << (28 + e);
        }
      }
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if ((seen >> (4 * j + e) & 1) == 0) p[j][e] = 0.0f;
    }
    pin(p);
  }
  static __device__ __forceinline__ void pack(uint32_t (&left)[4][4], const float (&x)[8][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pack_operand(left[i], x, i);
  }
  __device__ __forceinline__ void store_ds() {
    const uint32_t to = shared_address(shared.ds[warpgroup]) + ds_to;
#pragma unroll
    for (int i = 0; i < 4; ++i) store_matrices_transposed(to + i * 16 * kPanelRowBytes, operand_ds[i]);
  }

  // Each step queues two rounds of products: this step's s^T with the last one's dk, then dp^T with dv. A round ends
  // before the next left operand is packed, because ptxas writes no left operand while products run. The other
  // warpgroup's products fill these gaps.
  __device__ __forceinline__ void loop() {
    const int steps = task.steps;
    int step = stage;
    wait_copies(shared.keys_full, 0);
    if (step < steps) {
      wait_copies(shared.full[stage], 0);
      float2 lse[8];
      read_stats(lse, shared.lse[stage]);
      wgmma_fence();
      scores(p, k, kReadAlong | q_of(stage));
      wgmma_wait<0>();
      pin(p);
      softmax(lse);
      pack(operand_p, p);
    }
    while (step < steps) {
      float ds[8][4];
      float2 dpsum[8];
      read_stats(dpsum, shared.dpsum[stage]);
      wgmma_fence();
      scores(ds, v, kReadAlong | dout_of(stage));
      add(dv, operand_p, kReadAcross | dout_of(stage));
      // While the products run, this warpgroup waits until the next stage is loaded and the dQ warpgroup has read the
      // previous step's ds. Listed rows' stages (kListed) load more slowly, so that wait is further down, after ds is
      // stored.
      const int last = stage;
      step += kStride, stage += kStride;
      if (stage >= kStages) stage -= kStages, phases ^= 2;
      if (!Rows::kListed && step < steps) barrier_wait(&shared.full[stage], phases >> 1);
      barrier_wait(&shared.ds_empty[warpgroup], ~phases & 1);  // returns at once in the first step
      phases ^= 1;
      wgmma_wait<1>();
      pin(ds);
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t pair = operand_p[j / 2][j % 2 * 2 + i];
          ds[j][2 * i] = __uint_as_float(pair << 16) * (ds[j][2 * i] - dpsum[j].x);
          ds[j][2 * i + 1] = __uint_as_float(pair & 0xffff0000u) * (ds[j][2 * i + 1] - dpsum[j].y);
        }
      pin(ds);
      wgmma_wait<0>();
      pin(dv);
      pack(operand_ds, ds);
      store_ds();
      fence_async_proxy();  // makes ds visible to the dQ warpgroup's products, and the next stage to this warp's
                            // products
      barrier_arrive_warp(&shared.ds_full[warpgroup]);
      if (Rows::kListed && step < steps) wait_copies(shared.full[stage], phases >> 1);
      float2 lse[8];
      read_stats(lse, shared.lse[stage]);
      wgmma_fence();
      // In the last step the stage still holds an earlier step's rows, and p is not used.
      scores(p, k, kReadAlong | q_of(stage));
      add(dk, operand_ds, kReadAcross | q_of(last));
      wgmma_wait<1>();
      pin(p);
      softmax(lse);
      wgmma_wait<0>();
      pin(dk);
      barrier_arrive(&shared.empty[last]);
      pack(operand_p, p);
    }
  }
};

// For listed rows, whose dk and dv both MMA warpgroups have summed in part: the first warpgroup receives the second
// one's dk, the second one the first one's dv.
template <class Rows>
__device__ __forceinline__ void exchange_sums(Shared<Rows>& shared, float (&dk)[kWidth / 8][4],
                                              float (&dv)[kWidth / 8][4], bool stores_dk) {
  const auto mma_barrier = [] { named_barrier_sync<2 * kWarpgroup>(1); };
  constexpr int kCount = kWidth / 8 * kWarpgroup;
  float4* const dk_at = reinterpret_cast<float4*>(shared.stages) + threadIdx.x % kWarpgroup;
  float4* const dv_at = dk_at + kCount;
  const auto send = [](float4* to, const float(&x)[kWidth / 8][4]) {
#pragma unroll
    for (int i = 0; i < kWidth / 8; ++i) to[i * kWarpgroup] = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
  };
  const auto receive = [](float(&x)[kWidth / 8][4], const float4* from) {
#pragma unroll
    for (int i = 0; i < kWidth / 8; ++i) {
      const float4 y = from[i * kWarpgroup];
      x[i][0] += y.x, x[i][1] += y.y, x[i][2] += y.z, x[i][3] += y.w;
    }
  };
  mma_barrier();  // now no product reads the stages any more
  if (stores_dk)
    send(dv_at, dv);
  else
    send(dk_at, dk);
  mma_barrier();
  if (stores_dk)
    receive(dk, dk_at);
  else
    receive(dv, dv_at);
}

// Stores this lane's two keys' dk and dv, or, if the block has several pieces, stores them as partial sums to the
// piece's slot.
__device__ __forceinline__ void store_dkdv(const BwdD128Args& a, const CtaTask& task, int warp_key,
                                           const float (&dk)[kWidth / 8][4], const float (&dv)[kWidth / 8][4],
                                           bool stores_dk, bool stores_dv) {
  const auto store = [&](const float(&sums)[kWidth / 8][4], int i, float factor, auto* to) {
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j) {
      const float x = sums[j][2 * i] * factor, y = sums[j][2 * i + 1] * factor;
      if constexpr (std::is_same_v<decltype(to), float*>)
        *reinterpret_cast<float2*>(to + 8 * j + fragment_column()) = make_float2(x, y);
      else
        *reinterpret_cast<uint32_t*>(to + 8 * j + fragment_column()) = pack_bf16(x, y);
    }
  };
  // The empty asm statement makes the compiler compute the addresses here. It would otherwise compute them before the
  // kernel's loop and spill them.
  int first_key = warp_key, slot = task.work.slot, block0 = task.block0, group = task.bg;
  asm volatile("" : "+r"(first_key), "+r"(slot), "+r"(block0), "+r"(group));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = first_key + 8 * i;
    if (key >= task.key_end) continue;
    if (slot >= 0) {
      float* const to = a.list.partial + (static_cast<int64_t>(slot) * a.list.block_keys + key - block0) * (2 * kWidth);
      if (stores_dk) store(dk, i, a.in.scale, to);
      if (stores_dv) store(dv, i, 1.0f, to + kWidth);
    } else if (a.dk.f32.data != nullptr) {
      if (stores_dk) store(dk, i, a.in.scale, a.dk.f32.at(group / a.in.groups, key, group % a.in.groups));
      if (stores_dv) store(dv, i, 1.0f, a.dv.f32.at(group / a.in.groups, key, group % a.in.groups));
    } else {
      if (stores_dk) store(dk, i, a.in.scale, a.dk.bf16.at(group / a.in.groups, key, group % a.in.groups));
      if (stores_dv) store(dv, i, 1.0f, a.dv.bf16.at(group / a.in.groups, key, group % a.in.groups));
    }
  }
}

template <class Rows>
__device__ __forceinline__ void mma_keys(Shared<Rows>& shared, const BwdD128Args& a, const CtaTask& task, int warpgroup,
                                         int warp, int lane) {
  const int my_key0 = Rows::kAlternates ? task.key0 : task.key0 + warpgroup * kRows;
  const int my_key_end = min(task.key_end, my_key0 + kRows), warp_key = my_key0 + 16 * warp + fragment_row();
  float dk[kWidth / 8][4] = {}, dv[kWidth / 8][4] = {}, p[8][4];
  uint32_t operand_p[4][4], operand_ds[4][4];
  const uint32_t shared_at = shared_address(&shared) >> 4;
  const uint32_t k = kReadAlong | (shared_at + (Rows::kAlternates ? 0 : uniform(warpgroup)) * (sizeof(KeyPanels) >> 4));
  KeyMma<Rows> mma{.shared = shared,
                   .task = task,
                   .warpgroup = warpgroup,
                   .key0 = my_key0,
                   .key_end = my_key_end,
                   .warp_key = warp_key,
                   .scale = a.in.scale_log2(),
                   .k = k,
                   .v = k + (kPanels * kPanelBytes >> 4),
                   .stages_at = shared_at + static_cast<uint32_t>(offsetof(Shared<Rows>, stages) >> 4),
                   .ds_to = swizzled(lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2),
                   .stage = Rows::kAlternates ? static_cast<int>(uniform(warpgroup)) : 0,
                   .dk = dk,
                   .dv = dv,
                   .p = p,
                   .operand_p = operand_p,
                   .operand_ds = operand_ds};
  mma.loop();
  const bool stores_dk = !Rows::kAlternates || warpgroup == 0, stores_dv = !Rows::kAlternates || warpgroup == 1;
  if (Rows::kAlternates) exchange_sums(shared, dk, dv, stores_dk);
  store_dkdv(a, task, warp_key, dk, dv, stores_dk, stores_dv);
}

// ---- the kernel ----

template <class Rows>
__global__ void __launch_bounds__(kCtaThreads, 1) bwd_d128_kernel(const __grid_constant__ BwdD128Args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the PTX for older cards holds an empty kernel, which is not chosen there
  using Shared = Shared<Rows>;
  constexpr int kStages = Shared::kStages, kKeys = Shared::kKeyTiles * kRows;
  CtaTask task;
  // CTAs are ordered by sequence and group: those that run at the same time add to the same part of dq, which stays in
  // L2.
  task.bg = blockIdx.x / a.list.pieces, task.b = task.bg / a.in.groups, task.g = task.bg % a.in.groups;
  task.work = find_piece(a, blockIdx.x % a.list.pieces, task.bg);
  const KeyWork& work = task.work;
  const int2 block_keys = keys_of_block(a.list, a.range, task.b, work.block);
  task.block0 = block_keys.x, task.key0 = block_keys.x + static_cast<int>(blockIdx.y) * kKeys;
  task.key_end = min(block_keys.y, task.key0 + kKeys);
  if (work.count < 0 || task.key0 >= task.key_end) return;

  Shared& shared = *reinterpret_cast<Shared*>(aligned_shared());
  const int G = a.in.heads.value();
  task.rows = work.count * G, task.steps = ceil_div(task.rows, kStageRows);
  task.start = Rows::kListed || task.steps == 0 ? 0 : task.steps - 1 - work.first * G / kStageRows % task.steps;
  const int warpgroup = threadIdx.x / kWarpgroup, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      barrier_init(&shared.full[i], kWarpgroup + 4), barrier_init(&shared.empty[i], 32 * (Rows::kAlternates ? 4 : 8));
    for (int i = 0; i < 2; ++i) barrier_init(&shared.ds_full[i], 4), barrier_init(&shared.ds_empty[i], 32 * 4);
    barrier_init(&shared.keys_full, kKeyThreads);
  }
  if (Rows::kListed) {
    const int* tokens = a.list.tokens + task.bg * a.list.tokens_stride + work.first;
    for (int i = threadIdx.x; i < work.count; i += kCtaThreads) shared.listed[i] = tokens[i];
  }
  __syncthreads();
  if (warpgroup != 3) load_keys(shared, a, task);

  if (warpgroup == 3) {
    decrease_registers<kProducerRegisters>();
    produce_stages(shared, a, task, warp, lane);
  } else if (warpgroup == 2) {
    decrease_registers<kDqRegisters>();
    reduce_dq(shared, a, task, warp, lane);
  } else {
    increase_registers<kMmaRegisters>();
    mma_keys(shared, a, task, warpgroup, warp, lane);
  }
#endif
}

template <class Rows>
void run_bwd_d128(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                  const KeyRange& range, const KeyWorkList& list, int part_tokens) {
  Scratch::Scope scope(ctx.scratch);
  const Tensor row_stats = compute_row_stats(ctx, scope, grad, in);
  const auto bgs = static_cast<unsigned>(in.k.size(0) * in.k.size(2));
  const Attend<bf16> attend = make_attend<bf16>(op, in);
  const View<const bf16> dout = make_query_view<const bf16>(in, grad.dout);
  const View<float> dq = make_query_view<float>(in, out.dq);
  const BwdD128Args a{attend,
                      dout,
                      reinterpret_cast<const RowStats*>(row_stats.data),
                      make_query_view<const float>(in, grad.rounding_unit),
                      dq,
                      Steps(attend.q, 8),
                      Steps(dout, 8),
                      Steps(dq, 4),
                      make_grad_view(out.dk),
                      make_grad_view(out.dv),
                      range,
                      list,
                      part_tokens,
                      static_cast<int>(bgs)};
  const dim3 grid(bgs * list.pieces, ceil_div(list.block_keys, Shared<Rows>::kKeyTiles * kRows));
  launch(ctx, op, bwd_d128_kernel<Rows>, grid, dim3(kCtaThreads), sizeof(Shared<Rows>), a);
  merge_dkdv(ctx, op, {list, a.dk, a.dv, range, a.in.tokens, a.in.groups, part_tokens, a.in.first_token}, bgs);
}

}  // namespace

void backward_d128_range(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                         const AttendIn& in, const KeyRange& range) {
  constexpr int64_t kBlockKeys = 2 * kRows, kMostParts = 64;
  const int64_t bgs = in.k.size(0) * in.k.size(2), blocks = ceil_div(range.keys, kBlockKeys), T = in.q.size(1);
  if (blocks == 0) return;
  // A block's rows are cut into pieces, at least 32 stages each, so that each SM gets 16 pieces with work. About half
  // the pieces are empty, because their tokens precede the block.
  const int64_t G = in.q.size(2) / in.k.size(2), least_tokens = std::max<int64_t>(1, 32 * kStageRows / G);
  const bool limited = range.window < T;
  // the most tokens that see a given block
  const int64_t viewers = limited ? std::min(T, range.window + kBlockKeys * range.d) : T;
  const int64_t wanted = ceil_div((limited ? 2 : 32) * int64_t{ctx.num_sms}, bgs * blocks);
  const int64_t parts = std::max<int64_t>(1, std::min({kMostParts, wanted, viewers / least_tokens}));
  KeyWorkList list{};
  list.block_keys = kBlockKeys;
  list.blocks = static_cast<int>(blocks);
  list.pieces = static_cast<int>(blocks * parts);
  Scratch::Scope scope(ctx.scratch);
  if (parts > 1) list.partial = scope.alloc(DType::f32, {bgs * blocks * parts, kBlockKeys, 2 * kWidth}).ptr<float>();
  run_bwd_d128<ContiguousRows>(ctx, op, out, grad, in, range, list, limited ? 0 : static_cast<int>(ceil_div(T, parts)));
}

void backward_d128_listed(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                          const AttendIn& in, const KeyRange& range, const KeyWorkList& list) {
  if (list.block_keys > kRows)
    run_bwd_d128<WideListedRows>(ctx, op, out, grad, in, range, list, 0);
  else
    run_bwd_d128<ListedRows>(ctx, op, out, grad, in, range, list, 0);
}

}  // namespace triad::cuda
