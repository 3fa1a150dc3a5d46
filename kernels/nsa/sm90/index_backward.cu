// Loss and gradients of a taught index on Hopper (nsa/index.h): bf16, heads of 64 or 128, an index of up to 128
// columns.
//
// A CTA keeps a tile of keys of one (sequence, group) and loops over the tokens that see it, 64 tokens per chunk. Keys
// are the rows of all products, tokens their columns, and the group's heads take turns: a lane has the same keys and
// tokens for every head and for the index. So the teacher, a mean over heads, is a sum in registers, whatever their
// number, and meets the student's scores without any exchange. Warpgroups:
//   0, 1  per head s^T = k q^T, with k in registers, and teacher += 2^(s - lse); two sets of sums, so that the next
//         head's product runs during the exponentials. Then the student's s^T = ik iq^T; the loss; ds^T = Q - P as left
//         operand in registers for dik += ds^T iq, and through shared memory for diq = ds ik.
//   2     producer: q of one head, a stage; iq and the tokens' statistics, a chunk; by cp.async.
// Blocks of 128 keys and dense attention (kPair): both warpgroups process every chunk, with 64 keys each, and share
// diq's columns. Blocks of 64 keys: they alternate chunks.
//
// dik is summed in registers over the piece, and then added as integers; diq is added to global memory, each term
// rounded to a multiple of the row's unit (nsa/gpu/index.cuh). So the bits repeat although CTAs add in any order.
//
// Bound: per (token, group, key) G products of dk and G exponentials; 128 keys x 64 tokens of one head of 128 take 512
// clocks of the tensor cores and as many of the exponential units. A third to a half of that rate is reached, with or
// without q's copies: each warpgroup's own chain of product, wait and exponentials is what limits it
// (tests/baselines/findings/taught_index.md).
#include "kernels/nsa/sm90/launch_index.h"

#include "kernels/hopper/reduce.cuh"
#include "kernels/nsa/gpu/index.cuh"
#include "kernels/nsa/sm90/index_sweep.cuh"

namespace triad::cuda {
namespace {

constexpr int kChunkTokens = 64, kTaughtThreads = 3 * kWarpgroup, kMostHeads = 16;  // heads of a group
constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
constexpr int kTileBytes = 64 * kPanelRowBytes;  // a panel of 64 rows

using TaughtArgs = IndexBackwardArgs<bf16>;

// kTileKeys: keys of the CTA. A ring of q belongs to both warpgroups, or each has its own.
template <int kPanels, int kIndexPanels, bool kPair>
struct __align__(1024) TaughtShared {
  static constexpr int kTileKeys = kPair ? 128 : 64, kRings = kPair ? 1 : 2;
  static constexpr int kStages = (kPair && kPanels == 2 && kIndexPanels == 2 ? 7 : 8) / kRings;
  unsigned char ik[kIndexPanels][kTileKeys * kPanelRowBytes];
  unsigned char q[kRings][kStages][kPanels][kTileBytes];
  unsigned char iq[2][kIndexPanels][kTileBytes];
  unsigned char ds[2][2][kTileBytes];  // [key][token]; [chunk % 2][warpgroup]
  // The lse of a chunk's tokens by head, and of a head that does not exist, infinity. Two more columns, against bank
  // conflicts.
  float lse[2][kMostHeads + 1][kChunkTokens + 2];
  // Of the tokens of a chunk: the keys [low, high) of the tile that they see, the student's lse, the rounding unit of
  // diq, and the token, -1 for one that does not count.
  int low[2][kChunkTokens], high[2][kChunkTokens];
  float index_lse[2][kChunkTokens], unit[2][kChunkTokens];
  int token[2][kChunkTokens];
  int2 seen_by_all[2];
  double losses[8];
  Barrier full[kRings][kStages], empty[kRings][kStages], chunk_full[2], chunk_empty[2];
};

struct TaughtTask {
  int bg, b, g;
  KeyWork work;
  int key0, keys, chunks;
};

// ---- producer ----

template <int kPanels, int kIndexPanels, bool kPair>
__device__ __forceinline__ void produce(TaughtShared<kPanels, kIndexPanels, kPair>& shared, const TaughtArgs& a,
                                        const TaughtTask& task) {
  using Memory = TaughtShared<kPanels, kIndexPanels, kPair>;
  const int thread = threadIdx.x % kWarpgroup, G = a.in.heads.value(), chunk16 = thread % 8, row0 = thread / 8;
  const int* const listed =
      a.list.tokens == nullptr ? nullptr : a.list.tokens + task.bg * a.list.tokens_stride + task.work.first;
  const DocumentRange range(a.range, task.b);
  const float factor = fabsf(static_cast<float>(a.scale.value())) * a.index.scale;
  // Places in the ring of this chunk, and in that of the next one.
  int stage = 0, parity = 0, other_stage = 0, other_parity = 0;
  // Stages whose copies are under way are passed on later, when they are complete and this thread has made them visible
  // to wgmma: the consumers, which are the bottleneck, then need no fence.
  constexpr int kUnderWay = Memory::kStages - 3;
  int passed = 0, under_way = 0;  // the next stage to pass on; how many wait for it
  const auto pass_on = [&](int ring) {
    barrier_arrive_warp(&shared.full[ring][passed]);
    if (++passed == Memory::kStages) passed = 0;
    --under_way;
  };
  for (int chunk = 0; chunk < task.chunks; ++chunk) {
    const int at = chunk % 2, ring = kPair ? 0 : at, first = chunk * kChunkTokens;
    const auto token_of = [&](int r) {
      const int i = min(first + r, task.work.count - 1);
      return listed != nullptr ? __ldg(listed + i) : task.work.first + i;
    };
    int token[4], lse_token[kChunkTokens / 8];  // all loads first: no load passes a wait or a copy
#pragma unroll
    for (int i = 0; i < 4; ++i) token[i] = token_of(row0 + 16 * i);
#pragma unroll
    for (int i = 0; i < kChunkTokens / 8; ++i) lse_token[i] = token_of(8 * i + thread / kMostHeads);
    const int my_token = token_of(thread % kChunkTokens);  // the row whose statistics this thread loads
    const bool counts = first + thread % kChunkTokens < task.work.count && a.counts(task.b, my_token);
    const float index_lse = *a.index_lse.at(task.b, my_token, task.g) * kLog2e,
                unit = diq_unit(a.sums.bounds.key(task.b, range.row().begin(my_token)), factor);
    barrier_wait(&shared.chunk_empty[at], chunk / 2 % 2 ^ 1);
    const bf16* q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = row0 + 16 * i, t = token[i];
      q[i] = a.in.q.at(task.b, t, task.g * G) + 8 * chunk16;
      const bf16* iq = a.index.q.at(task.b, t, task.g) + 8 * chunk16;
#pragma unroll
      for (int panel = 0; panel < kIndexPanels; ++panel) {
        const bool exists = panel * kPanel + 8 * chunk16 < a.index.q.width;
        copy_async_16(shared.iq[at][panel] + swizzled(r, chunk16), exists ? iq + panel * kPanel : iq, exists ? 16 : 0);
      }
    }
    const int lane = thread % 32, head = lane % kMostHeads;
#pragma unroll
    for (int i = 0; i < kChunkTokens / 8; ++i) {
      const int r = 8 * i + thread / kMostHeads, t = lse_token[i];
      if (head >= G) continue;
      if (first + r < task.work.count && a.counts(task.b, t))
        copy_async_4(&shared.lse[at][head][r], a.lse.at(task.b, t, task.g * G + head), true);
      else
        shared.lse[at][head][r] = INFINITY;
    }
    if (thread < kChunkTokens) {
      const int low = range.low(my_token) - task.key0, high = min(range.high(my_token) - task.key0, task.keys);
      shared.low[at][thread] = low, shared.high[at][thread] = high;
      shared.index_lse[at][thread] = counts ? index_lse : INFINITY;
      shared.unit[at][thread] = unit;
      shared.token[at][thread] = counts ? my_token : -1;
      // The keys of a later token begin and end later.
      if (thread == 0) shared.seen_by_all[at].y = high;
      if (thread == kChunkTokens - 1) shared.seen_by_all[at].x = low;
    }
    barrier_arrive_after_copies(&shared.chunk_full[at]);
    barrier_arrive(&shared.chunk_full[at]);  // covers what this lane has stored without cp.async
    for (int h = 0; h < G; ++h) {
      barrier_wait(&shared.empty[ring][stage], parity ^ 1);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
          copy_async_16(shared.q[ring][stage][panel] + swizzled(row0 + 16 * i, chunk16),
                        q[i] + h * a.in.q.head + panel * kPanel, 16);
      copy_async_commit();
      if (++stage == Memory::kStages) stage = 0, parity ^= 1;
      if (++under_way <= kUnderWay) continue;
      copy_async_wait_group<kUnderWay>();
      fence_async_proxy();
      pass_on(ring);
    }
    copy_async_wait_group<0>();  // the next chunk may have to wait for the end of this one
    fence_async_proxy();
    while (under_way > 0) pass_on(ring);
    if constexpr (!kPair) {
      const int s = stage, p = parity;
      stage = other_stage, parity = other_parity, other_stage = s, other_parity = p;
      passed = stage;
    }
  }
}

// ---- consumers ----

// d[64 x 64] = left right^T, summed over kSteps * 16 columns in panels of these sizes; left is in shared memory, or in
// registers.
template <int kSteps>
__device__ __forceinline__ void multiply_tiles(float (&d)[8][4], uint32_t left, int left_panel, uint32_t right,
                                               int right_panel) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    wgmma<Major::k, Major::k>(d, left + i / 4 * (left_panel >> 4) + i % 4 * 2,
                              right + i / 4 * (right_panel >> 4) + i % 4 * 2, i > 0);
  wgmma_commit();
}
template <int kSteps>
__device__ __forceinline__ void multiply_tiles(float (&d)[8][4], const uint32_t (&left)[kSteps][4], uint32_t right,
                                               int right_panel) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) wgmma<Major::k>(d, left[i], right + i / 4 * (right_panel >> 4) + i % 4 * 2, i > 0);
  wgmma_commit();
}

// Adds rows of diq to global memory. d: columns [column0, column0 + 8 kJ) of this lane's two tokens. Two neighbouring
// lanes exchange halves, so that each adds four columns at a time.
template <int kJ>
__device__ __forceinline__ void add_diq(const TaughtArgs& a, const TaughtTask& task, const float (&d)[kJ][4],
                                        const int (&token)[2], const float (&unit)[2], float factor, int column0) {
  const bool odd = threadIdx.x % 2 != 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float* const to = a.dq.at(task.b, max(token[i], 0), task.g) + column0 + threadIdx.x % 4 / 2 * 4;
#pragma unroll
    for (int j = 0; j < kJ; j += 2) {
      float x[2][2];  // columns j and j + 1
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int e = 0; e < 2; ++e) x[k][e] = round_to_unit(d[j + k][2 * i + e] * factor, 1.0f, unit[i]);
      const float give0 = odd ? x[0][0] : x[1][0], give1 = odd ? x[0][1] : x[1][1];
      const float got0 = __shfl_xor_sync(kFullWarp, give0, 1), got1 = __shfl_xor_sync(kFullWarp, give1, 1);
      const int column = 8 * (j + odd);
      if (token[i] < 0 || column0 + column >= a.index.q.width) continue;
      if (odd)
        add_four(to + column, got0, got1, x[1][0], x[1][1]);
      else
        add_four(to + column, x[0][0], x[0][1], got0, got1);
    }
  }
}

// The work of one consumer warpgroup. It is one function with lambdas, because its sums and operands stay in registers
// from one phase to the next.
template <int kPanels, int kIndexPanels, bool kPair>
__device__ __forceinline__ void consume(TaughtShared<kPanels, kIndexPanels, kPair>& shared, const TaughtArgs& a,
                                        const TaughtTask& task, int warpgroup) {
  using Memory = TaughtShared<kPanels, kIndexPanels, kPair>;
  constexpr int kKeyPanel = Memory::kTileKeys * kPanelRowBytes, kStages = Memory::kStages;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32, G = a.in.heads.value();
  const int half_tile = kPair ? warpgroup : 0, ring = kPair ? 0 : warpgroup;
  for (int i = threadIdx.x; i < Memory::kTileKeys * kIndexPanels * 8; i += 2 * kWarpgroup) {
    const int r = i / (kIndexPanels * 8), chunk = i % (kIndexPanels * 8);
    uint4 x = make_uint4(0, 0, 0, 0);
    if (r < task.keys && chunk * 8 < a.index.k.width)
      x = *reinterpret_cast<const uint4*>(a.index.k.at(task.b, task.key0 + r, 0) + chunk * 8);
    *reinterpret_cast<uint4*>(shared.ik[chunk / 8] + swizzled(r, chunk % 8)) = x;
  }
  for (int i = threadIdx.x; i < 2 * kChunkTokens; i += 2 * kWarpgroup)
    shared.lse[i / kChunkTokens][kMostHeads][i % kChunkTokens] = INFINITY;
  fence_async_proxy();
  named_barrier_sync<2 * kWarpgroup>(1);

  const uint32_t ik = uniform(tile_descriptor(shared_address(shared.ik))),
                 ik_mine = uniform(ik + half_tile * (kTileBytes >> 4)),
                 q_ring = uniform(tile_descriptor(shared_address(shared.q[ring])));
  const int my_key =
      half_tile * 64 + warp * 16 + fragment_row();  // this lane has keys my_key and my_key + 8 of the tile
  const int store_row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
  const float score_units = a.in.scale_log2(), index_units = a.index.scale * kLog2e, share = 1.0f / G,
              factor = static_cast<float>(a.scale.value()) * a.index.scale;
  float even[8][4], odd[8][4], teacher[8][4], dik[kIndexPanels][8][4] = {};
  leave_unset(even);
  leave_unset(odd);
  double loss = 0;
  int stage = 0, parity = 0, reading = 0;  // the stage that is multiplied next; the stage that is released next
  // Products are queued and read without a branch; with one, ptxas would let no product run during the exponentials. So
  // an odd number of heads gets one more, which does not exist: it is an earlier one again, with an lse of infinity.
  uint32_t k[4 * kPanels][4];
  {
    const bf16* rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      rows[i] = my_key + 8 * i < task.keys ? a.in.k.at(task.b, task.key0 + my_key + 8 * i, task.g) : nullptr;
    load_operand(k, rows);
  }
  const auto multiply_head = [&](float(&d)[8][4], int from) {
    multiply_tiles(d, k, q_ring + from * (kPanels * kTileBytes >> 4), kTileBytes);
  };
  // Waits for the next head's stage and returns it, or, if there is no such head, any stage that has been full.
  const auto next_stage = [&](bool exists) {
    if (!exists) return stage == 0 ? kStages - 1 : stage - 1;
    const int next = stage;
    barrier_wait(&shared.full[ring][next], parity);
    if (++stage == kStages) stage = 0, parity ^= 1;
    return next;
  };
  const auto release = [&](bool exists) {
    if (!exists) return;
    barrier_arrive_warp(&shared.empty[ring][reading]);
    if (++reading == kStages) reading = 0;
  };
  const auto begin_chunk = [&] { multiply_head(even, next_stage(true)); };
  const int first_chunk = kPair ? 0 : warpgroup;
  if constexpr (kPair) begin_chunk();
#pragma unroll 1
  for (int chunk = first_chunk; chunk < task.chunks; chunk += kPair ? 1 : 2) {
    const int at = chunk % 2;
    // Whether the loop over heads already queues the next chunk's first head. Where warpgroups alternate, that chunk
    // takes the place of this one in shared memory, and so cannot be loaded yet.
    const bool has_next = kPair && chunk + 1 < task.chunks;
    const auto teach = [&](const float(&s)[8][4], int h) {
      const float* const lse = shared.lse[at][h < G ? h : kMostHeads] + fragment_column();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 x = *reinterpret_cast<const float2*>(lse + 8 * j), shift = make_float2(x.x * kLog2e, x.y * kLog2e);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          teacher[j][e] += exp2_approx(fmaf(s[j][e], score_units, e % 2 == 0 ? -shift.x : -shift.y));
      }
      pin(teacher);  // the exponentials come before the next wait
    };
    if constexpr (!kPair) begin_chunk();
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) teacher[j][e] = 0.0f;
    barrier_wait(&shared.chunk_full[at], chunk / 2 % 2);
    fence_async_proxy();  // towards iq
    // `even` has the first head's product. The loop leaves that of the next chunk's first head there, if has_next.
#pragma unroll 1
    for (int h = 0; h < G; h += 2) {
      const bool has_odd = h + 1 < G, has_even = h + 2 < G || has_next;
      wgmma_wait<0>();
      pin(even);
      release(true);
      const int odd_from = next_stage(has_odd), even_from = next_stage(has_even);
      multiply_head(odd, odd_from);
      teach(even, h);
      wgmma_wait<0>();
      pin(odd);
      release(has_odd);
      multiply_head(even, even_from);
      teach(odd, h + 1);
    }
    multiply_tiles<4 * kIndexPanels>(odd, ik_mine, kKeyPanel, tile_descriptor(shared_address(shared.iq[at])),
                                     kTileBytes);
    wgmma_wait<0>();
    pin(even);
    pin(odd);

    // The lesson. teacher becomes ds; `odd` has the student's scores.
    const int2 common = shared.seen_by_all[at];
    const bool all_seen = common.x <= 0 && common.y >= half_tile * 64 + 64;
    float kl = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int column = 8 * j + fragment_column();
      const float2 index_lse = *reinterpret_cast<const float2*>(&shared.index_lse[at][column]);
      const int2 low = *reinterpret_cast<const int2*>(&shared.low[at][column]),
                 high = *reinterpret_cast<const int2*>(&shared.high[at][column]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = my_key + e / 2 * 8;
        float p = teacher[j][e] * share, log_q = odd[j][e] * index_units - (e % 2 == 0 ? index_lse.x : index_lse.y);
        if (!all_seen && (key < (e % 2 == 0 ? low.x : low.y) || key >= (e % 2 == 0 ? high.x : high.y)))
          p = 0.0f, log_q = -INFINITY;
        teacher[j][e] = learn<bf16>(p, log_q, kl);
      }
    }
    loss += static_cast<double>(kl);
    uint32_t ds[4][4];
    unsigned char* const ds_tile = shared.ds[at][warpgroup];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pack_operand(ds[i], teacher, i);
      store_matrices(ds_tile + swizzled(store_row, 2 * i + lane / 16), ds[i]);
    }
    const int row = warp * 16 + fragment_row();
    const int token[2] = {shared.token[at][row], shared.token[at][row + 8]};
    const float unit[2] = {shared.unit[at][row], shared.unit[at][row + 8]};
    fence_async_proxy();
    if constexpr (kPair)
      named_barrier_sync<2 * kWarpgroup>(1);
    else
      named_barrier_sync<kWarpgroup>(2 + warpgroup);  // 1 is that of both
    const uint32_t iq = tile_descriptor(shared_address(shared.iq[at]));
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < kIndexPanels; ++panel)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        wgmma<Major::mn>(dik[panel], ds[i], iq + panel * (kTileBytes >> 4) + i * (16 * kPanelRowBytes >> 4));
    constexpr int kDsSteps = kPair ? 8 : 4, kColumns = kPair ? kIndexPanels * 32 : 64,
                  kTurns = kPair ? 1 : kIndexPanels;
    float diq[kTurns][kColumns / 8][4];
    const int column0 = kPair ? warpgroup * kColumns : 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const uint32_t left = tile_descriptor(shared_address(kPair ? shared.ds[at][0] : ds_tile)),
                     right = ik + (column0 / kPanel + turn) * (kKeyPanel >> 4) + (column0 % kPanel * 2 >> 4);
      wgmma_begin<Major::mn, Major::mn>(diq[turn], left, right);
#pragma unroll
      for (int i = 1; i < kDsSteps; ++i)
        wgmma<Major::mn, Major::mn>(diq[turn], left + i * (16 * kPanelRowBytes >> 4),
                                    right + i * (16 * kPanelRowBytes >> 4));
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int panel = 0; panel < kIndexPanels; ++panel) pin(dik[panel]);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) pin(diq[turn]);
    barrier_arrive(&shared.chunk_empty[at]);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) add_diq(a, task, diq[turn], token, unit, factor, column0 + turn * kPanel);
  }

  wgmma_wait<0>();
  pin(even);

  const DocumentRow<int> documents = a.range.documents.row(task.b);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = my_key + 8 * half;
    if (key >= task.keys) continue;
    const FixedPoint point(a.sums.bounds.query(task.b, documents.begin(task.key0 + key)),
                           int64_t{a.in.tokens} * a.in.groups);
    int64_t* const to = a.sums.dk + (int64_t{task.b} * a.in.tokens + task.key0 + key) * a.index.k.width;
#pragma unroll
    for (int panel = 0; panel < kIndexPanels; ++panel)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = panel * kPanel + 8 * j + fragment_column() + e;
          if (column < a.index.k.width) point.add(to + column, dik[panel][j][2 * half + e]);
        }
  }
  loss = warp_sum_to_lane0(loss);
  if (lane == 0) shared.losses[threadIdx.x / 32] = loss;
  named_barrier_sync<2 * kWarpgroup>(1);
  if (threadIdx.x == 0) {
    double sum = 0;
    for (int i = 0; i < 8; ++i) sum += shared.losses[i];
    a.sums.losses[int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = sum / static_cast<double>(kLog2e);
  }
}

template <int kPanels, int kIndexPanels, bool kPair>
__global__ void __launch_bounds__(kTaughtThreads, 1) index_backward_sm90_kernel(const __grid_constant__ TaughtArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Memory = TaughtShared<kPanels, kIndexPanels, kPair>;
  Memory& shared = *reinterpret_cast<Memory*>(aligned_shared());
  TaughtTask task;
  task.bg = blockIdx.x / a.list.pieces, task.b = task.bg / a.in.groups, task.g = task.bg % a.in.groups;
  task.work = find_work(a.list, DocumentRange(a.range, task.b), a.range.keys, a.in.tokens, blockIdx.x % a.list.pieces,
                        task.bg, a.sequences_and_groups, a.in.first_token);
  const int2 block = keys_of_block(a.list, a.range, task.b, task.work.block);
  task.key0 = block.x, task.keys = min(block.y - block.x, Memory::kTileKeys);
  if (task.work.count <= 0 || task.keys <= 0) return;
  task.chunks = ceil_div(task.work.count, kChunkTokens);
  if (threadIdx.x == 0) {
    constexpr int kReaders = kPair ? 8 : 4;  // warps
    for (int ring = 0; ring < Memory::kRings; ++ring)
      for (int i = 0; i < Memory::kStages; ++i)
        barrier_init(&shared.full[ring][i], 4), barrier_init(&shared.empty[ring][i], kReaders);
    for (int i = 0; i < 2; ++i)
      barrier_init(&shared.chunk_full[i], 2 * kWarpgroup), barrier_init(&shared.chunk_empty[i], 32 * kReaders);
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 2) {
    decrease_registers<kProducerRegisters>();
    produce(shared, a, task);
  } else {
    increase_registers<kConsumerRegisters>();
    consume(shared, a, task, warpgroup);
  }
#endif
}

// How the tokens of listed blocks are cut: into runs whose queries fit into L2, as in nsa/dispatch/plan_pieces.h.
PiecePlan plan_taught_pieces(const AttendIn& in) {
  constexpr int64_t kParts = 8, kMostParts = 32, kRunBytes = 40 << 20;
  const int64_t G = in.q.size(2) / in.k.size(2), bytes = in.q.size(1) * G * in.q.size(3) * 2;
  int64_t parts = kParts, cut = kParts;
  while (cut > 1 && bytes * cut > kRunBytes * parts) cut /= 2;
  if (cut == 1) parts = std::clamp(ceil_div(bytes, kRunBytes), kParts, kMostParts);
  return {parts, cut, G >= 8 ? 512 : 1024};
}

}  // namespace

bool index_backward_sm90_supports(const IndexBackward& index, const AttendIn& in, const ConstTensor& block_index,
                                  int64_t l_sel) {
  const int64_t dk = in.q.size(3);
  bool fits = sweep_supports(index.in.q, index.in.k) && in.q.size(2) <= kMostHeads * in.k.size(2) &&
              (dk == 64 || dk == 128) && in.q.dtype == DType::bf16 && make_view<const bf16>(in.q).vector &&
              make_view<const bf16>(in.k).vector && (block_index.empty() || l_sel == 64 || l_sel == 128);
  fits = fits && reinterpret_cast<uintptr_t>(index.dq.data) % 16 == 0;
  for (int i = 0; i < 3; ++i) fits = fits && (index.dq.size(i) <= 1 || index.dq.stride[i] % 4 == 0);
  return fits;
}

void index_backward_sm90(Context& ctx, const IndexBackward& index, const AttendIn& in, const ConstTensor& lse,
                         const ConstTensor& block_index, int64_t l_sel) {
  const char* const op = "nsa_index_backward";
  Scratch::Scope scope(ctx.scratch);
  const SelectedKeys keys = make_taught_keys(op, in, block_index, l_sel);
  const int64_t bgs = in.k.size(0) * in.k.size(2), T = in.q.size(1);
  constexpr int kDenseKeys = 128;
  // Without lists, about half of the pieces are empty, because their tokens precede the block.
  const int64_t dense_blocks = std::max<int64_t>(1, bgs * ceil_div(keys.range.keys, kDenseKeys));
  const int64_t parts =
      std::clamp<int64_t>(ceil_div(int64_t{16} * ctx.num_sms, dense_blocks), 1, std::max<int64_t>(1, T / 512));
  const KeyWorkList list = make_taught_work(ctx, scope, op, in, keys, plan_taught_pieces(in), kDenseKeys, parts);
  const auto ctas = static_cast<unsigned>(bgs * list.pieces);
  const IndexSums sums = make_index_sums(ctx, scope, index, in, ctas, /*sums_dq=*/false);
  const TaughtArgs a = make_backward_args<bf16>(op, index, in, lse, keys.range, list, sums);
  const auto run = [&]<int kPanels, int kIndexPanels, bool kPair>() {
    launch(ctx, op, index_backward_sm90_kernel<kPanels, kIndexPanels, kPair>, dim3(ctas), dim3(kTaughtThreads),
           sizeof(TaughtShared<kPanels, kIndexPanels, kPair>), a);
  };
  const auto run_paired = [&]<int kPanels, int kIndexPanels>() {
    list.block_keys > 64 ? run.template operator()<kPanels, kIndexPanels, true>()
                         : run.template operator()<kPanels, kIndexPanels, false>();
  };
  const bool wide = index.in.q.size(3) > kPanel;
  if (in.q.size(3) == 64)
    wide ? run_paired.operator()<1, 2>() : run_paired.operator()<1, 1>();
  else
    wide ? run_paired.operator()<2, 2>() : run_paired.operator()<2, 1>();
  finish_index_sums(ctx, sums, index, in);
}

}  // namespace triad::cuda
