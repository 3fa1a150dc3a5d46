// dq, dk and dv of the attention branches on Hopper by one kernel (bf16, heads of 64): five products where the two
// kernels of nsa/sm90/dkdv.cu and nsa/sm90/dq.cuh need seven, and no union of neighbours' lists.
//
// A CTA keeps a tile of keys and walks the rows (t, h) that see them, 64 a stage. Its four warpgroups:
//   two do the arithmetic of 64 keys each, which are the rows of wgmma: s^T = k q^T and dp^T = v dout^T, 32 rows a
//     step, and with pg^T and ds^T as left operands from registers dv += pg^T dout and dk += ds^T q, as in
//     nsa/sm90/dkdv.cu. ds^T goes to shared memory too. A window or compressed tile has 128 keys, and both
//     warpgroups take each stage. A listed block has 64: the two take turns, and their sums meet at the end.
//   one multiplies dq = ds k for 64 rows and all keys of the tile, and adds the result to dq where it lies (red.v4: a
//     lane's four columns are neighbours because the columns of its copy of k are permuted).
//   one brings q, dout and the rows' facts (cp.async; a warp has every fourth stage).
// They meet at mbarriers: full / empty for the stages of rows, ds_full / ds_empty for the buffers of ds.
//
// Any order of the additions to dq gives the same bits: each addend is first rounded to a multiple of a power of two u
// that is the same for all addends of a row, and so large that no sum of addends passes 2^24 u: every fp32 addition is
// then exact. The bound is
//   |sum over any keys of ds k / sqrt(dk)| <= (gate |dout| max|v| + |delta|) max_j|k_j| / sqrt(dk),
// summed over the branches. For random rows it is about 2^11 times dq, so u is 2^-13 of dq: the noise (2^-12 for 40
// addends) hides behind that of rounding p and ds to bf16, which is 2^-10; measured, dq's error against fp32 is
// 1.85e-3 with and without. (To bound by sqrt(sum p (dout.v)^2) would give two bits more, and needs a pass over all
// pairs.)
//
// 16 x 2048 x 12 x 2 x 64 on an H200, beside the two kernels: window 512: 478 -> 355 us, compressed: 189 -> 113 us,
// selected: 881 -> 591 us; 1 x 65536: 1015 -> 789, 3470 -> 2330 and 6660 -> 2160 us; 8 x 2048: window 195, compressed
// 65, selected 322, a window of all 300 us (cuDNN's dense backward: 447). The floor is 1,280 clocks for 64 rows and 128
// keys; it takes 2,600. Of a step's 1,300 a warp spends (PC samples) 460 on the way into the tensor cores, which the
// other warpgroup and dq use meanwhile, 370 on exponentials and what is around them, 250 on ds and its fence. Tried and
// not better: reduce-adds and loads by the same warps (444 us for the window, when this took 392), the two warpgroups
// made to take turns at the tensor cores (406), stages passed over by the half of the keys that no row sees (451),
// steps of 64 rows with k and v in shared memory (381). And, from 355: CTAs that take piece after piece, loads of the
// next begun early, the last blocks cut for an even end (362; 8 x 2048 192 from 196: partial sums cost what the even
// end gains); two listed blocks to a CTA (8 x 2048 348 from 335: fewer rows, but 128 keys each); 2 or 4 lanes to a
// row's copy (selected 650 and 611 from 603).
#include "kernels/nsa/sm90/launch_backward.h"

#include <cstddef>

#include "kernels/nsa/sm90/backward_d64_stage.cuh"

namespace triad::cuda {
namespace {

// ---- dk and dv ----

// The sums of one key: rows lane / 4 + 8 i of the products. The type of dk and dv is asked once, not at each pair: that
// would be 2,700 instructions, run once and each fetched from memory (with it 8 x 2048 takes 1 us more).
__device__ __forceinline__ void store_key(const BwdD64Args& a, const Task& task, int key, int lane, int i,
                                          const float (&dk)[kPanel / 8][4], const float (&dv)[kPanel / 8][4]) {
  const auto each_pair = [&](auto&& store) {
#pragma unroll
    for (int j = 0; j < kPanel / 8; ++j)
      store(8 * j, dk[j][2 * i] * a.in.scale, dk[j][2 * i + 1] * a.in.scale, dv[j][2 * i], dv[j][2 * i + 1]);
  };
  const int first = lane % 4 * 2;
  if (task.slot >= 0 || (a.dk.f32.vector && a.dv.f32.vector)) {
    const int64_t in_slot = static_cast<int64_t>(task.slot) * a.list.block_keys + key - task.block * a.list.block_keys;
    float* const partial = a.list.partial + in_slot * 2 * kPanel;
    float* const to_k = (task.slot >= 0 ? partial : a.dk.f32.at(task.b, key, task.g)) + first;
    float* const to_v = (task.slot >= 0 ? partial + kPanel : a.dv.f32.at(task.b, key, task.g)) + first;
    each_pair([&](int j, float k0, float k1, float v0, float v1) {
      *reinterpret_cast<float2*>(to_k + j) = make_float2(k0, k1);
      *reinterpret_cast<float2*>(to_v + j) = make_float2(v0, v1);
    });
  } else if (a.dk.bf16.vector && a.dv.bf16.vector) {
    bf16* const to_k = a.dk.bf16.at(task.b, key, task.g) + first;
    bf16* const to_v = a.dv.bf16.at(task.b, key, task.g) + first;
    each_pair([&](int j, float k0, float k1, float v0, float v1) {
      *reinterpret_cast<uint32_t*>(to_k + j) = pack_bf16(k0, k1);
      *reinterpret_cast<uint32_t*>(to_v + j) = pack_bf16(v0, v1);
    });
  } else {
    each_pair([&](int j, float k0, float k1, float v0, float v1) {
      a.dk.store(task.b, key, task.g, first + j, k0, k1);
      a.dv.store(task.b, key, task.g, first + j, v0, v1);
    });
  }
}

// kTurn: the first stage of a warpgroup that takes turns. A constant, so that stages stay known to uniform registers.
template <bool kListed, int kTurn>
__device__ __forceinline__ void multiply_keys(Shared<kListed>& shared, const BwdD64Args& a, const Task& task, int tile,
                                              int warp, int lane) {
  constexpr int kStages = Shared<kListed>::kStages, kBuffers = Shared<kListed>::kBuffers, kStepsD = kPanel / 16;
  constexpr int kTurns = kListed ? 2 : 1;
  constexpr int kN = kStepRows / 8, kDeep = kStepRows / 16;
  const int rows = task.count * a.in.heads.value(), steps = (rows + kStageRows - 1) / kStageRows;
  const int key0 = task.tile0 + kRows * tile;
  const int key_end = min(task.tile_end, key0 + kRows), warp_key = key0 + 16 * warp + lane / 4;
  uint32_t k[kStepsD][4], v[kStepsD][4];
  {  // keys past the end repeat the last; their p is 0
    const bf16 *k_rows[2], *v_rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = min(warp_key + 8 * i, task.tile_end - 1);
      k_rows[i] = a.in.k.at(task.b, key, task.g), v_rows[i] = a.in.v.at(task.b, key, task.g);
    }
    load_operand(k, k_rows);
    load_operand(v, v_rows);
  }
  const float scale = a.in.scale_log2();
  float dk[kPanel / 8][4] = {}, dv[kPanel / 8][4] = {};
  // Products with the rows row0 .. row0 + 31 of a stage. p and ds: first s^T and dp^T, then pg^T and ds^T.
  float p[kN][4], ds[kN][4];
  uint32_t left_p[kDeep][4], left_ds[kDeep][4];
  const auto multiply_scores = [&](const Stage& stage, int row0) {
    const uint32_t q = tile_descriptor(shared_address(stage.q + row0 * kPanelRowBytes));
    const uint32_t dout = tile_descriptor(shared_address(stage.dout + row0 * kPanelRowBytes));
    wgmma_fence();
    wgmma_begin<Major::k>(p, k[0], q);
#pragma unroll
    for (int i = 1; i < kStepsD; ++i) wgmma<Major::k>(p, k[i], q + 2 * i);
    wgmma_begin<Major::k>(ds, v[0], dout);
#pragma unroll
    for (int i = 1; i < kStepsD; ++i) wgmma<Major::k>(ds, v[i], dout + 2 * i);
    wgmma_commit();
  };
  const auto multiply_sums = [&](const Stage& stage, int row0) {
    const uint32_t q = tile_descriptor(shared_address(stage.q + row0 * kPanelRowBytes));
    const uint32_t dout = tile_descriptor(shared_address(stage.dout + row0 * kPanelRowBytes));
#pragma unroll
    for (int i = 0; i < kDeep; ++i) wgmma<Major::mn>(dv, left_p[i], dout + i * (16 * kPanelRowBytes >> 4));
#pragma unroll
    for (int i = 0; i < kDeep; ++i) wgmma<Major::mn>(dk, left_ds[i], q + i * (16 * kPanelRowBytes >> 4));
    wgmma_commit();
  };
  // What the scores are weighed with is fetched while the products run.
  float4 facts[kN];
  bool whole;
  const auto fetch_facts = [&](const Stage& stage, int row0) {
    whole = stage.whole[row0 / kStepRows] >> tile & 1;
#pragma unroll
    for (int j = 0; j < kN; ++j) facts[j] = *reinterpret_cast<const float4*>(&stage.facts[row0 + 8 * j + lane % 4 * 2]);
  };
  const auto weigh = [&](const Stage& stage, int row0) {
    pin(p);
    pin(ds);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) p[j][e] = exp2_approx(fmaf(p[j][e], scale, e % 2 == 0 ? -facts[j].x : -facts[j].z));
#pragma unroll
      for (int e = 0; e < 4; ++e) ds[j][e] -= e % 2 == 0 ? facts[j].y : facts[j].w;
    }
    if (!whole) {
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const int4 range = *reinterpret_cast<const int4*>(&stage.range[row0 + 8 * j + lane % 4 * 2]);
        const int from[2] = {warp_key - range.x, warp_key - range.z};
        const int count_seen[2] = {max(0, min(range.y, key_end) - range.x), max(0, min(range.w, key_end) - range.z)};
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (static_cast<unsigned>(from[e % 2] + 8 * (e / 2)) >= static_cast<unsigned>(count_seen[e % 2])) p[j][e] = 0;
      }
    }
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) ds[j][e] *= p[j][e];
    pin(p);
    pin(ds);
  };
  const int ds_row = 16 * warp + lane % 16, ds_chunk = lane / 16;
  // Once no product runs (ptxas lets no register become a left operand before): the left operands of the sums. From
  // there ds^T goes to dq: at once; or while the next products run, where there are buffers enough for dq to come late.
  constexpr bool kLate = kBuffers > 2;
  const auto pack = [&] {
    wgmma_wait<0>();
    pin(dk);
    pin(dv);
#pragma unroll
    for (int i = 0; i < kDeep; ++i) pack_operand(left_p[i], p, i), pack_operand(left_ds[i], ds, i);
  };
  const auto store_ds = [&](int n, int row0) {
#pragma unroll
    for (int i = 0; i < kDeep; ++i)
      store_matrices(shared.ds[n % kBuffers][tile] + swizzled(ds_row, row0 / 8 + 2 * i + ds_chunk), left_ds[i]);
  };
  const auto await_stage = [&](int n) { barrier_wait(&shared.full[n % kStages], n / kStages & 1); };
  const auto await_buffer = [&](int n) {
    if (n >= kBuffers) barrier_wait(&shared.ds_empty[n % kBuffers], (n / kBuffers - 1) & 1);
  };
  // One fence makes ds visible to the products of dq and, where the next stage has been waited for, its rows to ours.
  const auto hand_over = [&](int n) {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.ds_full[n % kBuffers]);
  };
  // The second half's scores and the first half's sums are queued together; while the sums run, scores are weighed.
  const auto second_half = [&](int n, bool has_next) {
    const Stage& stage = shared.stages[n % kStages];
    multiply_scores(stage, kStepRows);
    multiply_sums(stage, 0);
    fetch_facts(stage, kStepRows);
    if constexpr (kLate) await_buffer(n), store_ds(n, 0);
    if (has_next) await_stage(n + kTurns);
    wgmma_wait<1>();
    weigh(stage, kStepRows);
    pack();
    if constexpr (kLate)
      fence_async_proxy();
    else
      store_ds(n, kStepRows), hand_over(n);
  };

  int n = kTurn;
  if (n < steps) {
    await_stage(n);
    fence_async_proxy();
    multiply_scores(shared.stages[n % kStages], 0);
    fetch_facts(shared.stages[n % kStages], 0);
    wgmma_wait<0>();
    weigh(shared.stages[n % kStages], 0);
    pack();
    if constexpr (!kLate) store_ds(n, 0);
    for (; n + kTurns < steps; n += kTurns) {
      second_half(n, true);
      const int next = n + kTurns;
      multiply_scores(shared.stages[next % kStages], 0);
      multiply_sums(shared.stages[n % kStages], kStepRows);
      fetch_facts(shared.stages[next % kStages], 0);
      if constexpr (kLate)
        store_ds(n, kStepRows), hand_over(n);
      else
        await_buffer(next);
      wgmma_wait<1>();
      weigh(shared.stages[next % kStages], 0);
      pack();
      if constexpr (!kLate) store_ds(next, 0);
      barrier_arrive(&shared.empty[n % kStages]);
    }
    second_half(n, false);
    wgmma_fence();
    multiply_sums(shared.stages[n % kStages], kStepRows);
    if constexpr (kLate) store_ds(n, kStepRows), hand_over(n);
    wgmma_wait<0>();
  }
  pin(dk);
  pin(dv);

  if constexpr (kListed) {  // the second warpgroup's sums to the first, where the first stages' rows were
    const auto sums = [&](int j) -> float4& {
      return reinterpret_cast<float4*>(
          &shared.stages[j / (kPanel / 8)])[j % (kPanel / 8) * kWarpgroup + 32 * warp + lane];
    };
    static_assert(offsetof(Stage, facts) == kPanel / 8 * kWarpgroup * sizeof(float4));
    named_barrier_sync<2 * kWarpgroup>(1);  // neither reads rows any more
    if constexpr (kTurn == 1) {
#pragma unroll
      for (int j = 0; j < kPanel / 8; ++j) {
        sums(j) = make_float4(dk[j][0], dk[j][1], dk[j][2], dk[j][3]);
        sums(kPanel / 8 + j) = make_float4(dv[j][0], dv[j][1], dv[j][2], dv[j][3]);
      }
    }
    named_barrier_sync<2 * kWarpgroup>(1);
    if constexpr (kTurn == 0) {
#pragma unroll
      for (int j = 0; j < kPanel / 8; ++j) {
        const float4 x = sums(j), y = sums(kPanel / 8 + j);
        dk[j][0] += x.x, dk[j][1] += x.y, dk[j][2] += x.z, dk[j][3] += x.w;
        dv[j][0] += y.x, dv[j][1] += y.y, dv[j][2] += y.z, dv[j][3] += y.w;
      }
    }
  }
  if constexpr (kTurn == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = warp_key + 8 * i;
      if (key < key_end) store_key(a, task, key, lane, i, dk, dv);
    }
  }
}

template <bool kListed>
__global__ void __launch_bounds__(kCtaThreads, 1) bwd_d64_kernel(const __grid_constant__ BwdD64Args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the PTX for older cards holds an empty kernel, which is not chosen there
  using Memory = Shared<kListed>;
  Task task;
  if (!find_task<kListed>(task, a)) return;
  auto& shared = *reinterpret_cast<Memory*>(aligned_shared());
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / kWarpgroup, 0);
  // By way of a shuffle, because ptxas would read the special register anew for each use, at some 50 clocks.
  const int thread = __shfl_sync(kFullWarp, threadIdx.x % kWarpgroup, threadIdx.x % 32);
  const int warp = thread / 32, lane = thread % 32;

  if (threadIdx.x == 0) {
    for (int i = 0; i < Memory::kStages; ++i) {
      barrier_init(&shared.full[i], 2 * 32);  // each lane of the loading warp twice
      barrier_init(&shared.empty[i], 32 * (Memory::kMathWarps + kRoleWarps));
    }
    for (int i = 0; i < Memory::kBuffers; ++i) {
      barrier_init(&shared.ds_full[i], Memory::kMathWarps);
      barrier_init(&shared.ds_empty[i], kRoleWarps);
    }
    barrier_init_done();
  }
  if constexpr (kListed) {
    const int* tokens = a.list.tokens + task.bg * a.list.tokens_stride + task.first;
    for (int i = threadIdx.x; i < task.count; i += kCtaThreads) shared.listed[i] = tokens[i];
  }
  if (warpgroup < Memory::kTiles) {  // k for dq; keys past the end repeat the last: their ds is 0
    const int r = thread / 2, key = min(task.tile0 + kRows * warpgroup + r, task.tile_end - 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = thread % 2 * 2 + i;
      const auto* from = reinterpret_cast<const uint4*>(a.in.k.at(task.b, key, task.g) + 16 * at);
      const uint4 x = __ldg(from), y = __ldg(from + 1);
      unsigned char* const to = shared.k[warpgroup];
      *reinterpret_cast<uint4*>(to + swizzled(r, 2 * at)) = make_uint4(x.x, x.z, y.x, y.z);
      *reinterpret_cast<uint4*>(to + swizzled(r, 2 * at + 1)) = make_uint4(x.y, x.w, y.y, y.w);
    }
    fence_async_proxy();
  }
  __syncthreads();

  if (warpgroup == 3) {
    decrease_registers<kLoadRegisters>();
    load_stages<kListed>(shared, a, task, warp, lane);
  } else if (warpgroup == 2) {
    decrease_registers<kDqRegisters>();
    multiply_dq<kListed>(shared, a, task, warp, lane);
  } else {
    increase_registers<kMathRegisters>();
    if (kListed && warpgroup == 1)
      multiply_keys<kListed, kListed>(shared, a, task, 0, warp, lane);
    else
      multiply_keys<kListed, 0>(shared, a, task, kListed ? 0 : warpgroup, warp, lane);
  }
#endif
}

template <bool kListed>
void run_bwd_d64(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                 const KeyRange& range, const KeyWorkList& list, int64_t piece_tokens) {
  Scratch::Scope scope(ctx.scratch);
  const Tensor facts = compute_row_stats(ctx, scope, grad, in);
  constexpr int64_t kNearBytes = 48 << 20;
  const int64_t bgs = in.k.size(0) * in.k.size(2);
  const int64_t bytes = in.q.size(1) * in.q.size(2) / in.k.size(2) * kPanel * 8;  // q, dout and dq of a (b, g)
  const BwdD64Args a{make_attend<bf16>(op, in),
                     make_view<const bf16>(grad.dout),
                     reinterpret_cast<const RowStats*>(facts.data),
                     make_view<const float>(grad.rounding_unit),
                     make_view<float>(out.dq),
                     make_grad_view(out.dk),
                     make_grad_view(out.dv),
                     range,
                     list,
                     static_cast<int>(bgs),
                     static_cast<int>(piece_tokens),
                     static_cast<int>(std::clamp<int64_t>(kNearBytes / bytes, 1, bgs))};
  const dim3 grid(bgs * list.pieces, ceil_div(list.block_keys, Shared<kListed>::kTiles * kRows));
  launch(ctx, op, bwd_d64_kernel<kListed>, grid, dim3(kCtaThreads), sizeof(Shared<kListed>), a);
  merge_dkdv_sm90(ctx, op, {list, a.dk, a.dv, range, a.in.groups}, bgs);
}

}  // namespace

void backward_d64_range(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                        const AttendIn& in, const KeyRange& range) {
  constexpr int64_t kBlockKeys = 2 * kRows, kLeastTokens = 128, kLongPiece = 512, kPiecesPerSm = 16;
  const int64_t bgs = in.k.size(0) * in.k.size(2), blocks = ceil_div(range.keys, kBlockKeys), T = in.q.size(1);
  if (blocks == 0) return;
  // Where blocks alone do not fill the card (compressed keys are few), pieces: of a short sequence one for each SM, of
  // a long one many, to share it evenly, as half of them lie before their block and are empty. A block's pieces cost
  // 64 KB each, written and read again.
  int64_t piece_tokens = T;
  if (const int64_t per_block = ctx.num_sms / std::max<int64_t>(1, bgs * blocks); per_block > 0) {
    piece_tokens = ceil_div(T, per_block);
    if (piece_tokens > kLongPiece)
      piece_tokens = std::max(kLongPiece, ceil_div(T * bgs * blocks, kPiecesPerSm * ctx.num_sms));
    piece_tokens = std::min(T, std::max(kLeastTokens, piece_tokens));
  }
  const int64_t parts = ceil_div(T, piece_tokens);
  KeyWorkList list{};
  list.block_keys = kBlockKeys;
  list.blocks = static_cast<int>(blocks);
  list.pieces = static_cast<int>(blocks * parts);
  Scratch::Scope scope(ctx.scratch);
  if (parts > 1) list.partial = scope.alloc(DType::f32, {bgs * blocks * parts, kBlockKeys, 2 * kPanel}).ptr<float>();
  run_bwd_d64<false>(ctx, op, out, grad, in, range, list, piece_tokens);
}

void backward_d64_listed(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                         const AttendIn& in, const KeyRange& range, const KeyWorkList& list) {
  run_bwd_d64<true>(ctx, op, out, grad, in, range, list, 0);
}

}  // namespace triad::cuda
