// dq, dk and dv for the branches and dense attention on Hopper by one kernel (bf16, head width 64): five products,
// where the two kernels in nsa/sm90/dkdv.cu and nsa/sm90/dq.cu compute seven.
//
// A CTA owns a key tile and loops over the query rows (t, h) that see its keys, 64 rows per stage. Its warpgroups:
//   0, 1  MMA (KeyMma): 64 keys each, wgmma's rows. s^T = k q^T and dp^T = v dout^T, 32 rows per step; with p^T and
//         ds^T as left operands in registers, dv += p^T dout and dk += ds^T q. They also store ds^T to shared memory. A
//         tile for contiguous rows, or for a listed block longer than 64 keys, has 128 keys, and both warpgroups use
//         each stage. With listed blocks of up to 64 keys (kAlternates) the warpgroups alternate stages, and their sums
//         are added at the end.
//   2     dQ (mma_dq): dq = ds k for 64 rows and all the tile's keys, added to global memory by red.v4. The columns in
//         its copy of k are permuted, so that a lane's four columns are neighbours.
//   3     producer (produce_stages): q, dout and row statistics by cp.async; each warp loads every fourth stage.
// Barriers: full[] / empty[] for the stages, ds_full[] / ds_empty[] for the ds buffers.
//
// CTAs add to dq in any order, and the bits repeat: each addend is first rounded to a multiple of u, a power of two
// that is the same for all of a row's addends, and so large that no sum exceeds 2^24 u. Every fp32 addition is then
// exact. The bound, summed over the branches, is
//   |sum over any keys of ds k / sqrt(dk)| <= (gate |dout| max|v| + |delta|) max_j|k_j| / sqrt(dk).
// For random rows it is about 2^11 |dq|, so u is 2^-13 |dq|: the rounding noise from 40 addends (2^-12) is below p's
// and ds's in bf16 (2^-10). nsa/gpu/rounding_unit.cu computes it.
//
// Bound: 1,280 tensor-core clocks for 64 rows and 128 keys; about half that rate is reached.
#include "kernels/nsa/sm90/launch_backward.h"

#include <cstddef>

#include "kernels/nsa/gpu/dkdv_merge.cuh"
#include "kernels/nsa/sm90/backward_d64_stage.cuh"

namespace triad::cuda {
namespace {

// ---- dk and dv ----

// Stores one key's dk and dv, the products' row lane / 4 + 8 i. A single branch selects the dtype for all columns: one
// branch per column pair would add 2,700 instructions.
__device__ __forceinline__ void store_key(const BwdD64Args& a, const Task& task, int key, int lane, int i,
                                          const float (&dk)[kPanel / 8][4], const float (&dv)[kPanel / 8][4]) {
  const auto each_pair = [&](auto&& store) {
#pragma unroll
    for (int j = 0; j < kPanel / 8; ++j)
      store(8 * j, dk[j][2 * i] * a.in.scale, dk[j][2 * i + 1] * a.in.scale, dv[j][2 * i], dv[j][2 * i + 1]);
  };
  const int first = lane % 4 * 2;
  if (task.slot >= 0 || (a.dk.f32.vector && a.dv.f32.vector)) {
    const int64_t in_slot = static_cast<int64_t>(task.slot) * a.list.block_keys + key - task.block0;
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

// One MMA warpgroup's work; its 64 keys are its products' rows. If kAlternates, two warpgroups have the same 64 keys
// and process alternate stages. kTurn is this warpgroup's first stage; it is a template parameter so that the stage's
// address stays in uniform registers.
template <class Rows, int kTurn>
struct KeyMma {
  using Memory = Shared<Rows>;
  static constexpr int kStages = Memory::kStages, kBuffers = Memory::kBuffers, kStepsD = kPanel / 16;
  static constexpr int kTurns = Rows::kAlternates ? 2 : 1, kN = kStepRows / 8, kDeep = kStepRows / 16;
  // Whether ds is stored while the next products run, which requires enough buffers for the dQ warpgroup to lag;
  // otherwise ds is stored at once.
  static constexpr bool kLate = kBuffers > 2;

  Memory& shared;
  const BwdD64Args& a;
  const Task& task;
  int tile, warp, lane;
  int key_end, warp_key;  // where the tile's keys end; this lane's first key
  float scale;            // score scale times log2(e)
  bool all_seen;          // whether all the step's rows see all the tile's keys
  // References to arrays outside the struct. If the arrays were members, nvcc could not keep the struct's scalars in
  // registers before the loops are unrolled.
  uint32_t (&k)[kStepsD][4], (&v)[kStepsD][4];
  float (&dk)[kPanel / 8][4], (&dv)[kPanel / 8][4];
  float (&p)[kN][4], (&ds)[kN][4];                           // p and ds hold s^T and dp^T first, then p^T and ds^T
  uint32_t (&operand_p)[kDeep][4], (&operand_ds)[kDeep][4];  // p^T and ds^T, packed as left operands for wgmma
  float4 (&stats)[kN];                                       // (lse, dpsum) for two rows in each float4

  __device__ __forceinline__ void init() {
    const int key0 = task.tile0 + kRows * tile;
    key_end = min(task.tile_end, key0 + kRows), warp_key = key0 + 16 * warp + lane / 4;
    const bf16 *k_rows[2], *v_rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // keys past the end are copies of the last one, with p = 0
      const int key = min(warp_key + 8 * i, task.tile_end - 1);
      k_rows[i] = a.in.k.at(task.b, key, task.g), v_rows[i] = a.in.v.at(task.b, key, task.g);
    }
    load_operand(k, k_rows);
    load_operand(v, v_rows);
    scale = a.in.scale_log2();
  }

  // ---- products with a stage's rows row0 to row0 + 31 ----

  __device__ __forceinline__ void scores(const Stage& stage, int row0) {
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
  }
  __device__ __forceinline__ void dkdv(const Stage& stage, int row0) {
    const uint32_t q = tile_descriptor(shared_address(stage.q + row0 * kPanelRowBytes));
    const uint32_t dout = tile_descriptor(shared_address(stage.dout + row0 * kPanelRowBytes));
#pragma unroll
    for (int i = 0; i < kDeep; ++i) wgmma<Major::mn>(dv, operand_p[i], dout + i * (16 * kPanelRowBytes >> 4));
#pragma unroll
    for (int i = 0; i < kDeep; ++i) wgmma<Major::mn>(dk, operand_ds[i], q + i * (16 * kPanelRowBytes >> 4));
    wgmma_commit();
  }

  // ---- softmax ----

  // Reads the softmax statistics of the step's rows. It is called while the products run.
  __device__ __forceinline__ void read_stats(const Stage& stage, int row0) {
    all_seen = stage.all_seen[row0 / kStepRows] >> tile & 1;
#pragma unroll
    for (int j = 0; j < kN; ++j)
      stats[j] = *reinterpret_cast<const float4*>(&stage.row_stats[row0 + 8 * j + lane % 4 * 2]);
  }
  // Computes p = 2^(s scale - lse), which is 0 for keys that the row does not see, and ds = p (dp - dpsum).
  __device__ __forceinline__ void softmax_backward(const Stage& stage, int row0) {
    pin(p);
    pin(ds);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) p[j][e] = exp2_approx(fmaf(p[j][e], scale, e % 2 == 0 ? -stats[j].x : -stats[j].z));
#pragma unroll
      for (int e = 0; e < 4; ++e) ds[j][e] -= e % 2 == 0 ? stats[j].y : stats[j].w;
    }
    if (!all_seen) {
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
  }
  // Packs p^T and ds^T as left operands. All products have to end first: ptxas writes no left operand while one runs.
  __device__ __forceinline__ void pack() {
    wgmma_wait<0>();
    pin(dk);
    pin(dv);
#pragma unroll
    for (int i = 0; i < kDeep; ++i) pack_operand(operand_p[i], p, i), pack_operand(operand_ds[i], ds, i);
  }

  // ---- barriers, and ds for the dQ warpgroup ----

  __device__ __forceinline__ Stage& stage_of(int n) { return shared.stages[n % kStages]; }
  __device__ __forceinline__ void wait_full(int n) { barrier_wait(&shared.full[n % kStages], n / kStages & 1); }
  __device__ __forceinline__ void wait_ds_empty(int n) {
    if (n >= kBuffers) barrier_wait(&shared.ds_empty[n % kBuffers], (n / kBuffers - 1) & 1);
  }
  __device__ __forceinline__ void store_ds(int n, int row0) {
    const int ds_row = 16 * warp + lane % 16, ds_chunk = lane / 16;
#pragma unroll
    for (int i = 0; i < kDeep; ++i)
      store_matrices(shared.ds[n % kBuffers][tile] + swizzled(ds_row, row0 / 8 + 2 * i + ds_chunk), operand_ds[i]);
  }
  // Signals that ds buffer n is full. The fence makes ds visible to the dQ warpgroup's products and, after wait_full,
  // the next stage's rows to this warp's own products.
  __device__ __forceinline__ void signal_ds_full(int n) {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.ds_full[n % kBuffers]);
  }

  // ---- the loop over stages ----

  // Processes a stage's second 32 rows. These rows' scores are queued together with the first 32 rows' dk and dv, and
  // their softmax runs while dk and dv are computed.
  __device__ __forceinline__ void second_half(int n, bool has_next) {
    const Stage& stage = stage_of(n);
    scores(stage, kStepRows);
    dkdv(stage, 0);
    read_stats(stage, kStepRows);
    if constexpr (kLate) wait_ds_empty(n), store_ds(n, 0);
    if (has_next) wait_full(n + kTurns);
    wgmma_wait<1>();
    softmax_backward(stage, kStepRows);
    pack();
    if constexpr (kLate)
      fence_async_proxy();
    else
      store_ds(n, kStepRows), signal_ds_full(n);
  }
  __device__ __forceinline__ void loop(int steps) {
    int n = kTurn;
    if (n < steps) {
      wait_full(n);
      fence_async_proxy();
      scores(stage_of(n), 0);
      read_stats(stage_of(n), 0);
      wgmma_wait<0>();
      softmax_backward(stage_of(n), 0);
      pack();
      if constexpr (!kLate) store_ds(n, 0);
      for (; n + kTurns < steps; n += kTurns) {
        second_half(n, true);
        const int next = n + kTurns;
        scores(stage_of(next), 0);
        dkdv(stage_of(n), kStepRows);
        read_stats(stage_of(next), 0);
        if constexpr (kLate)
          store_ds(n, kStepRows), signal_ds_full(n);
        else
          wait_ds_empty(next);
        wgmma_wait<1>();
        softmax_backward(stage_of(next), 0);
        pack();
        if constexpr (!kLate) store_ds(next, 0);
        barrier_arrive(&shared.empty[n % kStages]);
      }
      second_half(n, false);
      wgmma_fence();
      dkdv(stage_of(n), kStepRows);
      if constexpr (kLate) store_ds(n, kStepRows), signal_ds_full(n);
      wgmma_wait<0>();
    }
    pin(dk);
    pin(dv);
  }

  // ---- epilogue ----

  // Adds the second warpgroup's dk and dv to the first one's. They pass through the first two stages' shared memory.
  __device__ __forceinline__ void add_turns() {
    const auto sums = [&](int j) -> float4& {
      return reinterpret_cast<float4*>(
          &shared.stages[j / (kPanel / 8)])[j % (kPanel / 8) * kWarpgroup + 32 * warp + lane];
    };
    static_assert(offsetof(Stage, row_stats) == kPanel / 8 * kWarpgroup * sizeof(float4));
    named_barrier_sync<2 * kWarpgroup>(1);  // now both warpgroups have read all rows
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
  __device__ __forceinline__ void store() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = warp_key + 8 * i;
      if (key < key_end) store_key(a, task, key, lane, i, dk, dv);
    }
  }
};

template <class Rows, int kTurn>
__device__ __forceinline__ void mma_keys(Shared<Rows>& shared, const BwdD64Args& a, const Task& task, int tile,
                                         int warp, int lane) {
  const int rows = task.count * a.in.heads.value(), steps = ceil_div(rows, kStageRows);
  using Mma = KeyMma<Rows, kTurn>;
  uint32_t k[Mma::kStepsD][4], v[Mma::kStepsD][4], operand_p[Mma::kDeep][4], operand_ds[Mma::kDeep][4];
  float dk[kPanel / 8][4] = {}, dv[kPanel / 8][4] = {}, p[Mma::kN][4], ds[Mma::kN][4];
  float4 stats[Mma::kN];
  Mma mma{.shared = shared,
          .a = a,
          .task = task,
          .tile = tile,
          .warp = warp,
          .lane = lane,
          .k = k,
          .v = v,
          .dk = dk,
          .dv = dv,
          .p = p,
          .ds = ds,
          .operand_p = operand_p,
          .operand_ds = operand_ds,
          .stats = stats};
  mma.init();
  mma.loop(steps);
  if constexpr (Rows::kAlternates) mma.add_turns();
  if constexpr (kTurn == 0) mma.store();
}

template <class Rows>
__global__ void __launch_bounds__(kCtaThreads, 1) bwd_d64_kernel(const __grid_constant__ BwdD64Args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the PTX for older cards holds an empty kernel, which is not chosen there
  using Memory = Shared<Rows>;
  Task task;
  if (!find_task<Rows>(task, a)) return;
  auto& shared = *reinterpret_cast<Memory*>(aligned_shared());
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / kWarpgroup, 0);
  // The shuffle makes ptxas keep the value in a register. Otherwise it reads the special register for each use, which
  // costs about 50 clocks.
  const int thread = __shfl_sync(kFullWarp, threadIdx.x % kWarpgroup, threadIdx.x % 32);
  const int warp = thread / 32, lane = thread % 32;

  if (threadIdx.x == 0) {
    for (int i = 0; i < Memory::kStages; ++i) {
      barrier_init(&shared.full[i], 2 * 32);  // every lane in the producer warp arrives twice
      barrier_init(&shared.empty[i], 32 * (Memory::kMmaWarps + kRoleWarps));
    }
    for (int i = 0; i < Memory::kBuffers; ++i) {
      barrier_init(&shared.ds_full[i], Memory::kMmaWarps);
      barrier_init(&shared.ds_empty[i], kRoleWarps);
    }
    barrier_init_done();
  }
  if constexpr (Rows::kListed) {
    const int* tokens = a.list.tokens + task.bg * a.list.tokens_stride + task.first;
    for (int i = threadIdx.x; i < task.count; i += kCtaThreads) shared.listed[i] = tokens[i];
  }
  if (warpgroup < Memory::kTiles) {  // k for dq's products. Keys past the end are copies of the last one, with ds = 0.
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
    decrease_registers<kProducerRegisters>();
    produce_stages<Rows>(shared, a, task, warp, lane);
  } else if (warpgroup == 2) {
    decrease_registers<kDqRegisters>();
    mma_dq<Rows>(shared, a, task, warp, lane);
  } else {
    increase_registers<kMmaRegisters>();
    constexpr bool kAlternates = Rows::kAlternates;
    if (kAlternates && warpgroup == 1)
      mma_keys<Rows, kAlternates>(shared, a, task, 0, warp, lane);
    else
      mma_keys<Rows, 0>(shared, a, task, kAlternates ? 0 : warpgroup, warp, lane);
  }
#endif
}

template <class Rows>
void run_bwd_d64(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                 const KeyRange& range, const KeyWorkList& list, int64_t piece_tokens) {
  Scratch::Scope scope(ctx.scratch);
  const Tensor row_stats = compute_row_stats(ctx, scope, grad, in);
  constexpr int64_t kNearBytes = 48 << 20;
  const int64_t bgs = in.k.size(0) * in.k.size(2);
  // q, dout and dq bytes per sequence and group
  const int64_t bytes = in.q.size(1) * in.q.size(2) / in.k.size(2) * kPanel * 8;
  const BwdD64Args a{make_attend<bf16>(op, in),
                     make_query_view<const bf16>(in, grad.dout),
                     reinterpret_cast<const RowStats*>(row_stats.data),
                     make_query_view<const float>(in, grad.rounding_unit),
                     make_query_view<float>(in, out.dq),
                     make_grad_view(out.dk),
                     make_grad_view(out.dv),
                     range,
                     list,
                     static_cast<int>(bgs),
                     static_cast<int>(piece_tokens),
                     static_cast<int>(std::clamp<int64_t>(kNearBytes / bytes, 1, bgs))};
  const dim3 grid(bgs * list.pieces, ceil_div(list.block_keys, Shared<Rows>::kTiles * kRows));
  launch(ctx, op, bwd_d64_kernel<Rows>, grid, dim3(kCtaThreads), sizeof(Shared<Rows>), a);
  merge_dkdv(ctx, op, {list, a.dk, a.dv, range, a.in.tokens, a.in.groups, a.piece_tokens, a.in.first_token}, bgs);
}

}  // namespace

void backward_d64_range(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                        const AttendIn& in, const KeyRange& range) {
  constexpr int64_t kBlockKeys = 2 * kRows, kLeastTokens = 128, kLongPiece = 512, kPiecesPerSm = 16,
                    kPackedPiece = 1024, kPackedPieces = 4096;  // 64 KB scratch each, 256 MB
  const int64_t bgs = in.k.size(0) * in.k.size(2), blocks = ceil_div(range.keys, kBlockKeys), T = in.q.size(1);
  if (blocks == 0) return;
  // If there are fewer key blocks than SMs (the compressed branch has few keys), their rows are cut into pieces. A
  // short sequence has one piece per SM. A long one has many, to balance the load: about half the pieces don't exist,
  // because their tokens precede the block. Each piece writes 64 KB of partial sums, which are read again. In a packed
  // row only the pieces in a block's own document exist, so there they are shorter, if memory allows.
  int64_t piece_tokens = T;
  if (const int64_t per_block = ctx.num_sms / std::max<int64_t>(1, bgs * blocks); per_block > 0) {
    piece_tokens = ceil_div(T, per_block);
    if (piece_tokens > kLongPiece)
      piece_tokens = std::max(kLongPiece, ceil_div(T * bgs * blocks, kPiecesPerSm * ctx.num_sms));
    if (!in.documents.empty() && piece_tokens > kPackedPiece)
      piece_tokens = std::clamp(T * bgs * blocks / kPackedPieces, kPackedPiece, piece_tokens);
    piece_tokens = std::min(T, std::max(kLeastTokens, piece_tokens));
  }
  const int64_t parts = ceil_div(T, piece_tokens);
  KeyWorkList list{};
  list.block_keys = kBlockKeys;
  list.blocks = static_cast<int>(blocks);
  list.pieces = static_cast<int>(blocks * parts);
  Scratch::Scope scope(ctx.scratch);
  if (parts > 1) list.partial = scope.alloc(DType::f32, {bgs * blocks * parts, kBlockKeys, 2 * kPanel}).ptr<float>();
  run_bwd_d64<ContiguousRows>(ctx, op, out, grad, in, range, list, piece_tokens);
}

void backward_d64_listed(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                         const AttendIn& in, const KeyRange& range, const KeyWorkList& list) {
  if (list.block_keys > kRows)
    run_bwd_d64<WideListedRows>(ctx, op, out, grad, in, range, list, 0);
  else
    run_bwd_d64<ListedRows>(ctx, op, out, grad, in, range, list, 0);
}

}  // namespace triad::cuda
