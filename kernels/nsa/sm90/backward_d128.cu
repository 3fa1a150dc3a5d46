// Backward of the attention branches on Hopper for bf16 heads of 128: one kernel for dq, dk and dv, five products.
//
// A CTA keeps keys of one (sequence, group) and walks the rows that see them, 64 a stage. Its four warpgroups:
//   two weigh: for 64 keys and the 64 rows of a stage each, with dk and dv as sums in registers,
//     s^T = k q^T,  dp^T = v dout^T,  dv += pg^T dout,  dk += ds^T q      (pg^T and ds^T as left operands in registers)
//     and lay ds into shared memory;
//   one computes dq = ds k and adds it to global memory by bulk additions in L2, the heads of a token together;
//   one brings q and dout (cp.async, swizzled).
// What the two that weigh share:
//   contiguous rows (window, compressed): the rows; they have 128 keys, so that q, dout and dq move once for 128 keys;
//   listed rows (selected): the 64 keys of a block; they take turns with the stages, and add up dk and dv at the end.
// The additions to dq come in any order. Each addend is rounded to a multiple of the row's quantum (nsa/attend.h),
// which leaves every partial sum exact: the bits repeat. CTAs at work at one time keep to rows close together, so that
// dq, q and dout move to and from memory about once: see find_piece and `start`.
//
// Floor: 10.5 MFLOP a stage and 128 keys, 2,570 clocks at the card's 4,080 a clock and SM, for 32 KB from L2 and 32 KB
// added. Shared memory is nearer: the products read 256 KB a stage and all else moves 140 KB, 3,100 clocks at 128
// bytes.
//
// H200, randn, window 512, 16 blocks of 64, compressed 32/16, quantum apart (compressed, window, selected; ms): 1 x
// 8192 x 64 x 4 x 128: 0.52, 0.86, 2.11; 1 x 65536: 23, 7.4, 20.8 (two kernels, nsa/sm90/dkdv.cu and
// nsa/sm90/dq.cuh: 0.80, 1.30, 3.09 and 36.6, 10.9, 33.0). At 65536 without additions, without loads, without
// either: 21.2, 22.3, 19.8 where the compressed branch took 23.2; 16.0, 19.3, 14.8 where selected took 20.7; those that
// weigh, alone and without loads: 16.7 and 11.0. So of some 4,800 clocks a stage the chain of dq (products that share
// the tensor cores with four more, rounding, draining to L2) takes nearly all, and that of scores, weights and sums as
// much. What is read before products start, or waited for while they run, is so for that reason: 5% of the first two.
//   At 65536 the card's power limit acts (757 W for 700, 1.58 to 1.65 GHz where a cold card has 1.8): perhaps why what
// only fills gaps won nothing there. What was tried and is slower: README.md, "Tried and left".
#include "kernels/nsa/sm90/launch_backward.h"

#include "kernels/nsa/sm90/backward_d128_stage.cuh"

namespace triad::cuda {
namespace {

template <bool kListed>
__global__ void __launch_bounds__(kCtaThreads, 1) bwd_d128_kernel(const __grid_constant__ BwdD128Args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the PTX for older cards holds an empty kernel, which is not chosen there
  using Shared = Shared<kListed>;
  constexpr int kStages = Shared::kStages, kSteps = kPanel / 16;
  constexpr int kKeys = Shared::kKeyTiles * kRows;
  // One sequence and group after the other: what is added to dq at about one time should stay in L2.
  const int bg = blockIdx.x / a.list.pieces, b = bg / a.in.groups, g = bg % a.in.groups;
  const KeyWork work = find_piece(a, blockIdx.x % a.list.pieces, bg);
  const int key0 = work.block * a.list.block_keys + static_cast<int>(blockIdx.y) * kKeys;
  const int key_end = min(min((work.block + 1) * a.list.block_keys, key0 + kKeys), a.range.keys);
  if (work.count < 0 || key0 >= key_end) return;

  Shared& shared = *reinterpret_cast<Shared*>(aligned_shared());
  const int G = a.in.heads.value(), rows = work.count * G, steps = (rows + kStageRows - 1) / kStageRows;
  // Contiguous rows: the stages in a circle, from a start at which all CTAs that share rows come to them together.
  const int start = kListed || steps == 0 ? 0 : steps - 1 - work.first * G / kStageRows % steps;
  const auto stage_rows = [&](int step) {
    return (step + start < steps ? step + start : step + start - steps) * kStageRows;
  };
  const int warpgroup = threadIdx.x / kWarpgroup, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      barrier_init(&shared.full[i], kWarpgroup + 4), barrier_init(&shared.empty[i], 32 * (kListed ? 4 : 8));
    for (int i = 0; i < 2; ++i) barrier_init(&shared.ds_full[i], 4), barrier_init(&shared.ds_empty[i], 32 * 4);
    barrier_init(&shared.keys_full, kKeyThreads);
  }
  if (kListed) {
    const int* tokens = a.list.tokens + bg * a.list.tokens_stride + work.first;
    for (int i = threadIdx.x; i < work.count; i += kCtaThreads) shared.listed[i] = tokens[i];
  }
  __syncthreads();
  if (warpgroup != 3) {
    const RowSource k_rows(a.in.k, b, g), v_rows(a.in.v, b, g);
    const int chunk = threadIdx.x % 8;
    for (int r = threadIdx.x / 8; r < kKeys; r += kKeyThreads / 8) {  // keys past the end repeat the last: not stored
      const int key = min(key0 + r, key_end - 1), to = swizzled(r % kRows, chunk);
      KeyPanels& tile = shared.keys[r / kRows];
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        copy_async_16(tile.k[panel] + to, k_rows.at(key, 0) + panel * kPanel + 8 * chunk, 16);
        copy_async_16(tile.v[panel] + to, v_rows.at(key, 0) + panel * kPanel + 8 * chunk, 16);
      }
    }
    barrier_arrive_after_copies(&shared.keys_full);
  }
  // What copies brought has arrived (`parity` as of the barrier), and the products may read it.
  const auto await_copies = [](uint64_t& barrier, int parity) {
    barrier_wait(&barrier, parity);
    fence_async_proxy();
  };

  if (warpgroup == 3) {
    // ---- brings the rows ----
    // A warp brings 16 rows of the stage: a lane finds out where one of them lies and tells the eight that copy it.
    // Rows past the end repeat the last and weigh nothing.
    decrease_registers<kLoadRegisters>();
    const int chunk = lane % 8, r = warp * kWarpRows + lane % kWarpRows;
    const int to_row = swizzled(warp * kWarpRows + lane / 8, chunk);
    const bf16* const q_chunk = a.in.q.at(b, 0, g * G) + 8 * chunk;
    const bf16* const dout_chunk = a.dout.at(b, 0, g * G) + 8 * chunk;
    for (int step = 0, stage = 0, round = 1; step < steps; ++step) {
      if (step >= kStages) barrier_wait(&shared.empty[stage], round);
      const int row0 = stage_rows(step), row = min(row0 + r, rows - 1);
      const int in_list = a.in.heads.quotient(row), t = kListed ? shared.listed[in_list] : work.first + in_list;
      const int h = row - in_list * G;
      const int q_at = a.q_steps.at(t, h), dout_at = a.dout_steps.at(t, h);
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
      // The heads of a token follow each other in dq too, if the caller so lays them.
      const bool exists = row0 + r < rows;
      const int dq_at = a.dq_steps.at(t, h), before = __shfl_up_sync(kFullWarp, dq_at, 1);
      const bool begins = lane == 0 || !exists || dq_at != before + kWidth / 4;
      const unsigned begin_of = __ballot_sync(kFullWarp, lane >= kWarpRows || begins);
      if (warp == 0 && lane == 0) {
        const int last = a.in.heads.quotient(min(row0 + kStageRows, rows) - 1);
        const int last_token = kListed ? shared.listed[last] : work.first + last;
        shared.seen_by_all[stage] = make_int2(a.range.low(last_token), a.range.high(t));  // both grow with the token
      }
      if (lane < kWarpRows) {
        const int run = begins && exists ? __ffs(begin_of >> (lane + 1)) : 0;
        shared.dq_run[step % kRecent][r] = make_int2(dq_at, run * kWidth * static_cast<int>(sizeof(float)));
        if (exists) {
          const float* const fact = &a.facts[(static_cast<int64_t>(bg) * a.in.tokens + t) * G + h].x;
          copy_async_4(&shared.shift[stage][r], fact, true);
          copy_async_4(&shared.center[stage][r], fact + 1, true);
        } else {
          shared.shift[stage][r] = INFINITY;
          shared.center[stage][r] = 0.0f;
        }
        shared.range[stage][r] = make_int2(a.range.low(t), a.range.high(t));
        copy_async_4(&shared.rounding_unit[step % kRecent][r], a.rounding_unit.at(b, t, g * G + h), true);
      }
      barrier_arrive_after_copies(&shared.full[stage]);
      barrier_arrive_warp(&shared.full[stage]);
      if (++stage == kStages) stage = 0, round ^= 1;
    }
    return;
  }

  if (warpgroup == 2) {
    // ---- takes dq away ----
    decrease_registers<kDqRegisters>();
    float* const dq_first = a.dq.at(b, 0, g * G);
    const int row = warp * kWarpRows + fragment_row();  // and 8 more
    await_copies(shared.keys_full, 0);
    for (int step = 0; step < steps; ++step) {
      constexpr int kSources = kListed ? 1 : 2;  // math warpgroups
      const int first_source = kListed ? step % 2 : 0, parity = (kListed ? step / 2 : step) & 1;
#pragma unroll
      for (int i = 0; i < kSources; ++i) barrier_wait(&shared.ds_full[first_source + i], parity);
      const float rounding_unit[2] = {shared.rounding_unit[step % kRecent][row],
                                      shared.rounding_unit[step % kRecent][row + 8]};
#pragma unroll 1
      for (int panel = 0; panel < kPanels; ++panel) {  // in turn, as registers are short
        float dq[8][4];
        leave_unset(dq);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kSources; ++i) {
          const uint32_t ds = kAlong | shared_address(shared.ds[first_source + i]) >> 4;
          const uint32_t k = kAcross | shared_address(shared.keys[i].k[panel]) >> 4;
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
        // Rows lie 512 bytes apart, all in the same banks: so a lane begins with the chunk of 32 bytes (j) that its
        // row's number says, having brought it to the front by two rounds of swaps.
        const int turn = fragment_row() & 3;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float2 x[8];
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const auto rounded = [&](float y) {
              const float c = copysignf(rounding_unit[i], y);
              return __fmaf_rn(y, a.in.scale, c) - c;
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
      fence_async_proxy();
      __syncwarp();
      // The warp's own 16 rows, so that no other warp has to be waited for.
      if (lane < kWarpRows) {
        const int r = warp * kWarpRows + lane;
        const int2 run = shared.dq_run[step % kRecent][r];
        if (run.y > 0) add_bulk(dq_first + 4 * static_cast<int64_t>(run.x), shared.dq[r], run.y);
        bulk_commit();
      }
    }
    bulk_wait_read<0>();
    return;
  }

  // ---- scores, and the sums of dk and dv ----
  increase_registers<kMathRegisters>();
  const KeyPanels& keys = shared.keys[kListed ? 0 : warpgroup];
  const int my_key0 = kListed ? key0 : key0 + warpgroup * kRows, my_key_end = min(key_end, my_key0 + kRows);
  const int warp_key = my_key0 + 16 * warp + fragment_row();
  const float scale = a.in.scale_log2();
  float dk[kWidth / 8][4] = {}, dv[kWidth / 8][4] = {};
  {
    // Tiles by addresses that the compiler knows to be alike in all lanes: products then take them from uniform
    // registers, without a move into one for each.
    const uint32_t shared_at = shared_address(&shared) >> 4;
    const uint32_t k = kAlong | (shared_at + (kListed ? 0 : uniform(warpgroup)) * (sizeof(KeyPanels) >> 4));
    const uint32_t v = k + (kPanels * kPanelBytes >> 4);
    const uint32_t stages_at = shared_at + (offsetof(Shared, stages) >> 4);
    const auto q_of = [&](int stage) { return stages_at + static_cast<uint32_t>(stage) * (sizeof(RowStage) >> 4); };
    const auto dout_of = [&](int stage) { return q_of(stage) + (kPanels * kPanelBytes >> 4); };
    // Where this lane's row of the four matrices of ds that a store writes begins; 16 rows further: 2048 bytes.
    const int ds_to = swizzled(lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2);
    int phases = 0;  // bit 0: steps done, bit 1: how often the stages came round, both modulo 2
    const auto lay_ds = [&](const uint32_t(&left)[4][4]) {
      const uint32_t to = shared_address(shared.ds[warpgroup]) + ds_to;
#pragma unroll
      for (int i = 0; i < 4; ++i) store_matrices_transposed(to + i * 16 * kPanelRowBytes, left[i]);
    };
    const auto multiply_scores = [&](float(&d)[8][4], uint32_t left, uint32_t right) {
      wgmma_begin<Major::k, Major::k>(d, left, right);
#pragma unroll
      for (int i = 1; i < kPanels * kSteps; ++i) {
        const int at = i / kSteps * (kPanelBytes >> 4) + i % kSteps * 2;
        wgmma<Major::k, Major::k>(d, left + at, right + at);
      }
      wgmma_commit();
    };
    const auto add_products = [&](float(&d)[kWidth / 8][4], const uint32_t(&left)[4][4], uint32_t right) {
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma<Major::mn>(d, left[i], right + (i * 16 * kPanelRowBytes >> 4));
      wgmma_commit();
    };
    constexpr int kStride = kListed ? 2 : 1;
    // Two rounds a step: (s^T of this step and dk of the last) run together, then (dp^T and dv). ptxas lets no register
    // become a left operand while products run, so each round ends before the next left operand is packed; the other
    // warpgroup's products fill the gaps. p is kept in bf16, as dv has it, for ds too: 32 registers less.
    float p[8][4];
    uint32_t left_p[4][4], left_ds[4][4];
    int stage = kListed ? static_cast<int>(uniform(warpgroup)) : 0;
    // Facts of rows are read before the products that they are for, whose operands keep shared memory busy.
    const auto read_facts = [](float2(&to)[8], const float(&of_rows)[kStageRows]) {
#pragma unroll
      for (int j = 0; j < 8; ++j) to[j] = *reinterpret_cast<const float2*>(&of_rows[8 * j + fragment_column()]);
    };
    // p[row] = 2^(s * scale - shift), 0 for the keys that the row does not see.
    const auto weigh = [&](const float2(&shift)[8]) {
      const int2* const ranges = shared.range[stage];
      const int2 common = shared.seen_by_all[stage];
      const bool all = common.x <= my_key0 && min(common.y, my_key_end) >= my_key0 + kRows;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) p[j][e] = exp2_approx(fmaf(p[j][e], scale, e % 2 == 0 ? -shift[j].x : -shift[j].y));
      pin(p);
      if (!all) {  // one branch, and a register of 32 bits: the kernel has no more
        unsigned seen = 0;
#pragma unroll 1
        for (int j = 0; j < 8; ++j) {
          const int4 range = *reinterpret_cast<const int4*>(&ranges[8 * j + fragment_column()]);
          seen >>= 4;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int key = warp_key + 8 * (e / 2);
            const int low = e % 2 == 0 ? range.x : range.z, high = e % 2 == 0 ? range.y : range.w;
            if (key >= low && key < min(high, my_key_end)) seen |= 1u << (28 + e);
          }
        }
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if ((seen >> (4 * j + e) & 1) == 0) p[j][e] = 0.0f;
      }
      pin(p);
    };
    const auto pack = [](uint32_t(&left)[4][4], const float(&x)[8][4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) pack_operand(left[i], x, i);
    };
    int step = stage;
    await_copies(shared.keys_full, 0);
    if (step < steps) {
      await_copies(shared.full[stage], 0);
      float2 shift[8];
      read_facts(shift, shared.shift[stage]);
      wgmma_fence();
      multiply_scores(p, k, kAlong | q_of(stage));
      wgmma_wait<0>();
      pin(p);
      weigh(shift);
      pack(left_p, p);
    }
    while (step < steps) {
      float ds[8][4];
      float2 center[8];
      read_facts(center, shared.center[stage]);
      wgmma_fence();
      multiply_scores(ds, v, kAlong | dout_of(stage));
      add_products(dv, left_p, kAcross | dout_of(stage));
      // What the step waits for beside the products, while they run: that dq has read the last ds, and the next stage
      // (of listed rows, which come late, only when ds is laid).
      const int last = stage;
      step += kStride, stage += kStride;
      if (stage >= kStages) stage -= kStages, phases ^= 2;
      if (!kListed && step < steps) barrier_wait(&shared.full[stage], phases >> 1);
      barrier_wait(&shared.ds_empty[warpgroup], ~phases & 1);  // at once in the first step
      phases ^= 1;
      wgmma_wait<1>();
      pin(ds);
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t pair = left_p[j / 2][j % 2 * 2 + i];
          ds[j][2 * i] = __uint_as_float(pair << 16) * (ds[j][2 * i] - center[j].x);
          ds[j][2 * i + 1] = __uint_as_float(pair & 0xffff0000u) * (ds[j][2 * i + 1] - center[j].y);
        }
      pin(ds);
      wgmma_wait<0>();
      pin(dv);
      pack(left_ds, ds);
      lay_ds(left_ds);
      fence_async_proxy();  // both for ds, to the products of dq, and for the next stage, to ours
      barrier_arrive_warp(&shared.ds_full[warpgroup]);
      if (kListed && step < steps) await_copies(shared.full[stage], phases >> 1);
      float2 shift[8];
      read_facts(shift, shared.shift[stage]);
      wgmma_fence();
      multiply_scores(p, k, kAlong | q_of(stage));  // after the last step: of what lies there, unused
      add_products(dk, left_ds, kAcross | q_of(last));
      wgmma_wait<1>();
      pin(p);
      weigh(shift);
      wgmma_wait<0>();
      pin(dk);
      barrier_arrive(&shared.empty[last]);
      pack(left_p, p);
    }
  }

  const bool stores_dk = !kListed || warpgroup == 0, stores_dv = !kListed || warpgroup == 1;
  if (kListed) {  // the first warpgroup gets the other's dk, the second the other's dv
    const auto math_barrier = [] { named_barrier_sync<2 * kWarpgroup>(1); };
    constexpr int kCount = kWidth / 8 * kWarpgroup;
    float4* const dk_at = reinterpret_cast<float4*>(shared.stages) + threadIdx.x % kWarpgroup;
    float4* const dv_at = dk_at + kCount;
    const auto give = [](float4* to, const float(&x)[kWidth / 8][4]) {
#pragma unroll
      for (int i = 0; i < kWidth / 8; ++i) to[i * kWarpgroup] = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
    };
    const auto take = [](float(&x)[kWidth / 8][4], const float4* from) {
#pragma unroll
      for (int i = 0; i < kWidth / 8; ++i) {
        const float4 y = from[i * kWarpgroup];
        x[i][0] += y.x, x[i][1] += y.y, x[i][2] += y.z, x[i][3] += y.w;
      }
    };
    math_barrier();  // no product reads the stages any more
    if (stores_dk)
      give(dv_at, dv);
    else
      give(dk_at, dk);
    math_barrier();
    if (stores_dk)
      take(dk, dk_at);
    else
      take(dv, dv_at);
  }

  // Two rows of keys a lane, which keeps sums[j / 8][j % 8] at the columns 8 j + fragment_column().
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
  // Where they go, computed here: what the compiler may compute before the loop it would have to spill.
  int first_key = warp_key, slot = work.slot, block = work.block, group = bg;
  asm volatile("" : "+r"(first_key), "+r"(slot), "+r"(block), "+r"(group));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = first_key + 8 * i;
    if (key >= key_end) continue;
    if (slot >= 0) {
      float* const to = a.list.partial + (static_cast<int64_t>(slot - block) * a.list.block_keys + key) * (2 * kWidth);
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
#endif
}

template <bool kListed>
void run_bwd_d128(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                  const KeyRange& range, const KeyWorkList& list, int part_tokens) {
  Scratch::Scope scope(ctx.scratch);
  const Tensor facts = compute_row_stats(ctx, scope, grad, in);
  const auto bgs = static_cast<unsigned>(in.k.size(0) * in.k.size(2));
  const Attend<bf16> attend = make_attend<bf16>(op, in);
  const View<const bf16> dout = make_view<const bf16>(grad.dout);
  const View<float> dq = make_view<float>(out.dq);
  const BwdD128Args a{attend,
                      dout,
                      reinterpret_cast<const RowStats*>(facts.data),
                      make_view<const float>(grad.rounding_unit),
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
  const dim3 grid(bgs * list.pieces, ceil_div(list.block_keys, Shared<kListed>::kKeyTiles * kRows));
  launch(ctx, op, bwd_d128_kernel<kListed>, grid, dim3(kCtaThreads), sizeof(Shared<kListed>), a);
  merge_dkdv_sm90(ctx, op, {list, a.dk, a.dv, range, a.in.groups, part_tokens}, bgs);
}

}  // namespace

void backward_d128_range(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                         const AttendIn& in, const KeyRange& range) {
  constexpr int64_t kBlockKeys = 2 * kRows, kMostParts = 64;
  const int64_t bgs = in.k.size(0) * in.k.size(2), blocks = ceil_div(range.keys, kBlockKeys), T = in.q.size(1);
  if (blocks == 0) return;
  // Pieces of 32 stages or more, and enough of them: 16 for each SM (of each range of tokens about half see a block).
  const int64_t G = in.q.size(2) / in.k.size(2), least_tokens = std::max<int64_t>(1, 32 * kStageRows / G);
  const bool limited = range.window < T;
  const int64_t run = limited ? std::min(T, range.window + kBlockKeys * range.d) : T;  // the tokens that see a block
  const int64_t wanted = ceil_div((limited ? 2 : 32) * int64_t{ctx.num_sms}, bgs * blocks);
  const int64_t parts = std::max<int64_t>(1, std::min({kMostParts, wanted, run / least_tokens}));
  KeyWorkList list{};
  list.block_keys = kBlockKeys;
  list.blocks = static_cast<int>(blocks);
  list.pieces = static_cast<int>(blocks * parts);
  Scratch::Scope scope(ctx.scratch);
  if (parts > 1) list.partial = scope.alloc(DType::f32, {bgs * blocks * parts, kBlockKeys, 2 * kWidth}).ptr<float>();
  run_bwd_d128<false>(ctx, op, out, grad, in, range, list, limited ? 0 : static_cast<int>(ceil_div(T, parts)));
}

void backward_d128_listed(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                          const AttendIn& in, const KeyRange& range, const KeyWorkList& list) {
  run_bwd_d128<true>(ctx, op, out, grad, in, range, list, 0);
}

}  // namespace triad::cuda
