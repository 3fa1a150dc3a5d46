// The selected branch's query-stationary forward on Hopper (bf16), for groups with many heads, and for sequences with
// more blocks than a shared KV tile supports.
//
// A warp has one token's heads, up to 16, as mma.sync's 16 rows: a unit; q and o stay in its registers. A CTA's twelve
// warps have neighbouring tokens and share the union of their lists: each block is loaded once from L2 into a stage
// ring, and only the warps whose tokens list it wait for it and compute. No score is computed to be masked, as with a
// shared KV tile, and nothing but q, o, K and V is read or written, unlike KV-stationary with many heads.
//
// A CTA is persistent, one per SM. It has twelve consumer warps and a producer warpgroup: one thread loads
// blocks, one warp makes the lists (nsa/sm90/query_stationary_lists.cuh).
//
// If all four warps in a warpgroup list a block (the first block, the last two, and most blocks if neighbours choose
// alike), they multiply by one wgmma: their rows are its tile's 64 rows, in the same registers. K and V are then read
// once for the four warps.
//
// Memory: as many stages, each with 64 keys and values, as fit after the lists. Bound: L2 bandwidth at 65,536 tokens
// with random lists, where 12 neighbours' lists have few blocks in common; in other cases, the ring's latencies.
// tests/baselines/findings/selected.md has the figures.
#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/nsa/sm90/launch_forward.h"
#include "kernels/nsa/sm90/query_stationary_lists.cuh"

namespace triad::cuda {
namespace {

constexpr int kUnitRows = 16;  // heads per warp, a unit: mma.m16n8k16's rows
constexpr int kStepKeys = 32;  // keys per matrix product

// A warp's registers for its token: q as left operands, o, and for each row row_max (in powers of 2), sum, and rounded.
// sum is the lane's share of the probabilities' sum, from which lse is computed. rounded sums the probabilities rounded
// to bf16, and divides o; it is a product with ones, so all its columns are equal.
template <class Shape>
struct Unit {
  uint32_t q[Shape::kDk / 16][4];
  float o[Shape::kPanelsV][8][4];
  float row_max[2], sum[2], rounded[2];
};

// Turns kStepKeys keys' scores into probabilities and packs them as the next left operand p. The token sees the
// first `seen` of these keys. row_max is close to the largest score: o is rescaled only if a score exceeds row_max by
// kSlack powers of 2.
template <class Shape>
__device__ __forceinline__ void softmax(Unit<Shape>& unit, float (&s)[kStepKeys / 8][4],
                                        uint32_t (&p)[kStepKeys / 16][4], int seen, float scale) {
  constexpr int kTiles = kStepKeys / 8;
  constexpr float kSlack = 8.0f;
  if (seen < kStepKeys) {
    const int room = seen - fragment_column();
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * j + e % 2 >= room) s[j][e] = -INFINITY;
  }
  float best[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    best[i] = -INFINITY;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) best[i] = fmaxf(best[i], fmaxf(s[j][2 * i], s[j][2 * i + 1]));
  }
  if (__any_sync(kFullWarp,
                 fmaf(best[0], scale, -kSlack) > unit.row_max[0] || fmaf(best[1], scale, -kSlack) > unit.row_max[1])) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float largest = quad_max(best[i]);
      const float higher = fmaf(largest, scale, -kSlack) > unit.row_max[i] ? largest * scale : unit.row_max[i];
      const float rescale = exp2_approx(higher == -INFINITY ? 0.0f : unit.row_max[i] - higher);
      unit.row_max[i] = higher;
      unit.sum[i] *= rescale, unit.rounded[i] *= rescale;
#pragma unroll
      for (int panel = 0; panel < Shape::kPanelsV; ++panel)
#pragma unroll
        for (int j = 0; j < 8; ++j) unit.o[panel][j][2 * i] *= rescale, unit.o[panel][j][2 * i + 1] *= rescale;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float minus =
        unit.row_max[i] != -INFINITY ? -unit.row_max[i] : -INFINITY;  // avoids inf - inf while the row has seen no key
    float add = 0.0f;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 2 * i; e < 2 * i + 2; ++e) add += s[j][e] = exp2_approx(fmaf(s[j][e], scale, minus));
    unit.sum[i] += add;
  }
  constexpr uint32_t kOnes = 0x3f803f80;
  float rounded[4] = {};
#pragma unroll
  for (int i = 0; i < kTiles / 2; ++i) {
    pack_operand(p[i], s, i);
    mma_m16n8k16(rounded, p[i], kOnes, kOnes);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) unit.rounded[i] += rounded[2 * i];
}

// Computes a stage's first `keys` keys by one warp, with mma.sync. k and v are the shared memory addresses that this
// lane passes to ldmatrix.
template <class Shape>
__device__ __forceinline__ void multiply_by_warp(Unit<Shape>& unit, uint32_t k, uint32_t v, int seen, int keys,
                                                 float scale) {
  constexpr int kSteps = kStepKeys / 16, kStepBytes = 16 * kPanelRowBytes;
#pragma unroll 1
  for (int key0 = 0; key0 < keys; key0 += kStepKeys) {
    const uint32_t k_row = k + key0 * kPanelRowBytes, v_row = v + key0 * kPanelRowBytes;
    float s[kStepKeys / 8][4] = {};
#pragma unroll
    for (int i = 0; i < Shape::kDk / 16; ++i)
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        uint32_t keys_of[4];
        load_matrices(keys_of, (k_row ^ (i % 4 << 5)) + i / 4 * Shape::kPanelBytes + j * kStepBytes);
        mma_m16n8k16(s[2 * j], unit.q[i], keys_of[0], keys_of[1]);
        mma_m16n8k16(s[2 * j + 1], unit.q[i], keys_of[2], keys_of[3]);
      }
    uint32_t p[kSteps][4];
    softmax(unit, s, p, seen - key0, scale);
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int j = 0; j < Shape::kDv / 16; ++j) {
        uint32_t values[4];
        load_matrices_transposed(values, (v_row ^ (j % 4 << 5)) + j / 4 * Shape::kPanelBytes + i * kStepBytes);
        mma_m16n8k16(unit.o[j / 4][j % 4 * 2], p[i], values[0], values[1]);
        mma_m16n8k16(unit.o[j / 4][j % 4 * 2 + 1], p[i], values[2], values[3]);
      }
  }
}

// Computes the same for a warpgroup's four warps together, by wgmma. k and v are the panels' descriptors.
template <class Shape>
__device__ __forceinline__ void multiply_by_warpgroup(Unit<Shape>& unit, uint32_t k, uint32_t v, int seen, int keys,
                                                      float scale) {
  constexpr int kSteps = kStepKeys / 16, kPanelUnits = Shape::kPanelBytes >> 4, kRowUnits = kPanelRowBytes >> 4;
#pragma unroll 1
  for (int key0 = 0; key0 < keys; key0 += kStepKeys) {
    const uint32_t k_tile = k + key0 * kRowUnits, v_tile = v + key0 * kRowUnits;
    float s[kStepKeys / 8][4];
    wgmma_fence();
    wgmma_begin<Major::k>(s, unit.q[0], k_tile);
#pragma unroll
    for (int i = 1; i < Shape::kDk / 16; ++i) wgmma<Major::k>(s, unit.q[i], k_tile + i / 4 * kPanelUnits + i % 4 * 2);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    uint32_t p[kSteps][4];
    softmax(unit, s, p, seen - key0, scale);
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < Shape::kPanelsV; ++panel)
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        wgmma<Major::mn>(unit.o[panel], p[i], v_tile + panel * kPanelUnits + i * 16 * kRowUnits);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int panel = 0; panel < Shape::kPanelsV; ++panel) pin(unit.o[panel]);
  }
}

template <class Shape>
struct QueryConsumer : BlockRing<Shape> {
  using typename BlockRing<Shape>::Tile;
  using BlockRing<Shape>::a, BlockRing<Shape>::stages, BlockRing<Shape>::control;

  // Whether all four warps in a warpgroup list a block. The lowest bits of `four` are their bits in the list entry.
  static __device__ __forceinline__ bool are_together(unsigned four) { return (four & 15) == 15; }

  // Computes this warp's units (a unit is one token's 16 heads): warp w has unit w in each of this CTA's tiles.
  __device__ __forceinline__ void attend(int warp) const {
    const int lane = threadIdx.x % 32;
    const uint32_t k_panels = shared_address(stages), v_panels = k_panels + Shape::kPanelsK * Shape::kPanelBytes;
    // The addresses that this lane passes to ldmatrix, so that the 8 x 8 matrices arrive in mma fragment order. For k,
    // keys vary first (8 keys after 8 keys), then columns; for v, columns vary first.
    const uint32_t k_lane = k_panels + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const uint32_t v_lane = v_panels + swizzled(lane % 16, lane / 16);
    const int in_tile = a.units.quotient(warp), head0 = (warp - in_tile * a.units.value()) * kUnitRows;
    int first_step = 0;  // the tile's first step, counted over all this CTA's tiles
    int requested = 0;   // how many stages the load thread had requested when this warp last read it
    this->for_tiles([&](const Tile& tile, int turn) {
      const int token = tile.first + in_tile;
      const bool exists = in_tile < a.tile_tokens.value() && token < a.lists.tokens;
      Unit<Shape> unit;
      load_query(unit, tile, token, head0, exists);
      barrier_wait(&control.list_full[turn & 1], turn >> 1 & 1);
      const int count = control.counts[turn & 1];
      const unsigned* const entries = this->list(turn);
      for (int base = 0; base < count; base += 32) {
        const unsigned lane_entry = base + lane < count ? entries[base + lane] : 0;
        if (base + 32 >= count && exists && a.combine.active()) prefetch_others(tile, token, head0);
        const unsigned listed = __ballot_sync(kFullWarp, (lane_entry >> warp & 1) != 0);
        const unsigned together = __ballot_sync(kFullWarp, are_together(lane_entry >> (warp & ~3)));
        for (unsigned left = listed; left != 0; left &= left - 1) {
          const int j = __ffs(left) - 1;
          const int first_key = static_cast<int>(entries[base + j] >> kWarpBits) * a.entry_keys;
          for (int piece = 0; piece < a.pieces; ++piece) {
            const int step = first_step + (base + j) * a.pieces + piece, lap = a.stages.quotient(step);
            const int stage = step - lap * a.stages.value(), key0 = first_key + piece * kStageKeys;
            // A barrier has only a phase parity, and this warp may have skipped whole laps around the ring. It
            // therefore waits first until the load thread has begun this lap. The lap cannot end before this warp
            // arrives.
            while (requested <= step) requested = await_requested(requested);
            barrier_wait(&control.full[stage], lap & 1);
            const int seen = token + 1 - key0;
            if ((together >> j & 1) != 0)  // the four warps compute the keys that the last one's token sees
              multiply_by_warpgroup(unit, tile_descriptor(k_panels + stage * Shape::kStageBytes),
                                    tile_descriptor(v_panels + stage * Shape::kStageBytes), seen,
                                    min(tile.first + a.units.quotient(warp | 3) + 1 - key0, a.stage_keys),
                                    a.scale_log2);
            else
              multiply_by_warp(unit, k_lane + stage * Shape::kStageBytes, v_lane + stage * Shape::kStageBytes, seen,
                               min(seen, a.stage_keys), a.scale_log2);
            __syncwarp();
            if (lane == 0) barrier_arrive(&control.empty[stage]);
          }
        }
      }
      first_step += count * a.pieces;
      barrier_arrive(&control.list_empty[turn & 1]);  // each lane arrives when it has read the list
      if (exists) store(unit, tile, token, head0);
      if (exists && a.combine.active()) combine(tile, token, head0);
    });
  }

  __device__ __forceinline__ int await_requested(int requested) const {
    int now = 0;
    if (threadIdx.x % 32 == 0) now = read_count(control.requested);
    __syncwarp();  // orders lane 0's acquire before the other lanes' reads
    now = __reduce_max_sync(kFullWarp, now);
    if (now == requested) __nanosleep(32);
    return now;
  }

  __device__ __forceinline__ void load_query(Unit<Shape>& unit, const Tile& tile, int token, int head0,
                                             bool exists) const {
    const bf16* const q = a.q.at(tile.b, exists ? token : tile.first, tile.g * a.G + head0) + fragment_column();
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int h = fragment_row() + e % 2 * 8;
      const bool is_there = exists && head0 + h < a.G;
#pragma unroll
      for (int i = 0; i < Shape::kDk / 16; ++i)
        unit.q[i][e] = is_there ? __ldg(reinterpret_cast<const unsigned*>(q + h * a.q.head + 16 * i + e / 2 * 8)) : 0u;
    }
#pragma unroll
    for (int panel = 0; panel < Shape::kPanelsV; ++panel)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) unit.o[panel][j][e] = 0.0f;
    unit.row_max[0] = unit.row_max[1] = -INFINITY;
    unit.sum[0] = unit.sum[1] = unit.rounded[0] = unit.rounded[1] = 0.0f;
  }

  // Prefetches into L2 the other branches' output rows that combine() will read.
  __device__ __forceinline__ void prefetch_others(const Tile& tile, int token, int head0) const {
    const int lane = threadIdx.x % 32, h = head0 + lane / 2;
    if (h >= a.G) return;
    const int64_t at = lane % 2 * (Shape::kDv / 2);
#pragma unroll
    for (int i = 0; i < Shape::kDv / 2; i += 64) {
      prefetch_l2(a.combine.o_cmp.row(tile.b, token, tile.g * a.G + h) + at + i);
      prefetch_l2(a.combine.o_win.row(tile.b, token, tile.g * a.G + h) + at + i);
    }
  }

  // Stores o and lse. In every eight columns, four lanes have two each; they exchange them so that each lane stores
  // eight neighbouring columns.
  __device__ __forceinline__ void store(const Unit<Shape>& unit, const Tile& tile, int token, int head0) const {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float total = quad_sum(unit.sum[i]), inverse = total == 0.0f ? 0.0f : 1.0f / unit.rounded[i];
      const int h = head0 + fragment_row() + 8 * i;
      bf16* const o = a.o.at(tile.b, token, tile.g * a.G + h) + 8 * c;
#pragma unroll
      for (int m = 0; m < Shape::kDv / 32; ++m) {
        uint32_t x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float(&sums)[4] = unit.o[m / 2][m % 2 * 4 + j];
          x[j] = pack_bf16(sums[2 * i] * inverse, sums[2 * i + 1] * inverse);
        }
        exchange(x[0], x[1], 1), exchange(x[2], x[3], 1);
        exchange(x[0], x[2], 2), exchange(x[1], x[3], 2);
        if (h < a.G) *reinterpret_cast<uint4*>(o + 32 * m) = make_uint4(x[0], x[1], x[2], x[3]);
      }
      if (h < a.G && c == 0)
        *a.lse.at(tile.b, token, tile.g * a.G + h) =
            total == 0.0f ? -INFINITY : (unit.row_max[i] + log2f(total)) * 0.69314718055994531f;
    }
  }
  // For two lanes whose numbers differ in bit `by`: swaps the upper lane's x with the lower one's y.
  static __device__ __forceinline__ void exchange(uint32_t& x, uint32_t& y, int by) {
    const bool upper = (threadIdx.x & by) != 0;
    const uint32_t got = __shfl_xor_sync(kFullWarp, upper ? x : y, by);
    (upper ? x : y) = got;
  }

  // Computes the branches' gated sum for the o rows that this warp has stored. This is separate from store(), which has
  // no registers left: here several rows are in flight.
  __device__ __forceinline__ void combine(const Tile& tile, int token, int head0) const {
    constexpr int kLanes = Shape::kDv / 8;  // lanes per row
    const int lane = threadIdx.x % 32, column = lane % kLanes * 8, heads = min(kUnitRows, a.G - head0);
    __syncwarp();
#pragma unroll 4
    for (int i = lane / kLanes; i < heads; i += 32 / kLanes) {
      const int h = tile.g * a.G + head0 + i;
      const CombineRows::Row row(a.combine, tile.b, token, h, tile.g);
      row.store(column, __ldcg(reinterpret_cast<const uint4*>(a.o.at(tile.b, token, h) + column)));
    }
  }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    fwd_query_stationary_kernel(const __grid_constant__ QueryStationaryArgs a) {
  if (!a.elsewhere.is_packed() && a.elsewhere.has(0, 0)) return;
  unsigned char* const stages = aligned_shared();
  const BlockRing<Shape> ring{a, stages, *reinterpret_cast<Control*>(stages + a.stages.value() * Shape::kStageBytes)};
  if (threadIdx.x == 0) {
    Control& control = ring.control;
    for (int i = 0; i < a.stages.value(); ++i) {
      barrier_init(&control.full[i], 1);
      barrier_init(&control.empty[i], Shape::kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&control.list_full[i], 32);
      barrier_init(&control.list_empty[i], 32 * Shape::kWarps + 1);
    }
    control.requested = 0;
    barrier_init_done();
  }
  __syncthreads();
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (warp < Shape::kWarps) {
    increase_registers<Shape::kConsumerRegisters>();
    QueryConsumer<Shape>{ring}.attend(warp);
  } else {
    decrease_registers<Shape::kProducerRegisters>();
    const Producer<Shape> producer{ring};
    if (warp == Shape::kWarps && threadIdx.x % 32 == 0) producer.load();
    if (warp == Shape::kWarps + 1) producer.make_lists();
  }
}

template <class Shape>
void launch_query_stationary(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                             const ConstTensor& block_index, int64_t l_sel, const CombineAlong* combine,
                             const KvStationaryShare* elsewhere) {
  const int64_t first = first_token(in), T = end_token(in), B = in.k.size(0), groups = in.k.size(2),
                G = in.q.size(2) / groups;
  const int64_t n = block_index.size(3), units = ceil_div(G, kUnitRows), tile_tokens = Shape::kWarps / units;
  const int64_t tiles = ceil_div(T - first, tile_tokens);
  const int64_t blocks = in.documents.empty() ? ceil_div(T, l_sel) : in.documents.ids();
  const int64_t list_room = std::min(tile_tokens * n, blocks);
  const int64_t table_bits =
      // The hash table's size as log2; it is at most half full.
      std::bit_width(static_cast<uint64_t>(2 * list_room));
  const int64_t stage_keys = std::min<int64_t>(l_sel, kStageKeys), control = control_bytes(list_room, table_bits);
  const int64_t stages = std::min<int64_t>((227 * 1024 - control) / Shape::kStageBytes, kMaxStages);
  TRIAD_CHECK(B * groups * tiles < (int64_t{1} << 31), "{}: {} tiles do not fit 31 bits", op, B * groups * tiles);
  const auto divisor = [](int64_t d) { return Divisor(static_cast<int>(d)); };
  QueryStationaryArgs a{
      .k_map = {},
      .v_map = {},
      .q = make_query_view<const bf16>(in, in.q),
      .o = make_query_view<bf16>(in, out.o),
      .lse = make_query_view<float>(in, out.lse),
      .combine = combine_rows(combine, first_token(in)),
      .lists = {block_index.ptr<int32_t>() - first * block_index.stride[1], block_index.stride[0],
                block_index.stride[1], block_index.stride[2], static_cast<int>(T), static_cast<int>(groups),
                static_cast<int>(blocks), static_cast<int>(n), static_cast<int>(first)},
      .n = divisor(n),
      .stages = divisor(stages),
      .tiles = divisor(tiles),
      .units = divisor(units),
      .tile_tokens = divisor(tile_tokens),
      .G = static_cast<int>(G),
      .all_tiles = static_cast<int>(B * groups * tiles),
      .block_begins = document_view(in.documents, T).block_begins,
      .ids = static_cast<int>(blocks),
      .entry_keys = in.documents.empty() ? static_cast<int>(l_sel) : 1,
      .stage_keys = static_cast<int>(stage_keys),
      .pieces = static_cast<int>(ceil_div(l_sel, kStageKeys)),
      .list_room = static_cast<int>(list_room),
      .table_bits = static_cast<int>(table_bits),
      .scale_log2 = kLog2e / std::sqrt(static_cast<float>(in.q.size(3))),
      .elsewhere = elsewhere == nullptr ? KvStationaryShare{} : *elsewhere};
  if (!ctx.planning) {
    a.k_map = make_box_map(make_view<const bf16>(in.k), B, in.k.size(1), groups, static_cast<int>(stage_keys));
    a.v_map = make_box_map(make_view<const bf16>(in.v), B, in.k.size(1), groups, static_cast<int>(stage_keys));
  }
  launch(ctx, op, fwd_query_stationary_kernel<Shape>,
         dim3(static_cast<unsigned>(std::min<int64_t>(ctx.num_sms, a.all_tiles))), dim3(Shape::kThreads),
         stages * Shape::kStageBytes + control, a);
}

}  // namespace

bool query_stationary_supports(const AttendOut& out, const AttendIn& in, const ConstTensor& block_index,
                               int64_t l_sel) {
  return forward_sm90_supports(out, in) && in.q.size(2) / in.k.size(2) <= 8 * kUnitRows && block_index.size(3) <= 64 &&
         (l_sel == 32 || l_sel == 64 || l_sel == 128) &&
         ceil_div(end_token(in), in.documents.empty() ? l_sel : 1) <= kMostBlocks;
}

// If a group's heads fill their units of 16, this kernel is the fastest for any lists. A missing head costs as much as
// a present one: with up to a quarter missing, the kernel is still as fast as others if the sequence has many more
// blocks than a list.
bool query_stationary_pays(const AttendIn& in, const ConstTensor& block_index, int64_t l_sel) {
  const int64_t G = in.q.size(2) / in.k.size(2), rows = ceil_div(G, kUnitRows) * kUnitRows;
  constexpr int64_t kManyMore = 6;  // this many of the sequence's blocks per list entry
  return G == rows || (4 * G >= 3 * rows && ceil_div(end_token(in), l_sel) >= kManyMore * block_index.size(3));
}

void forward_query_stationary(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                              const ConstTensor& block_index, int64_t l_sel, const CombineAlong* combine,
                              const KvStationaryShare* elsewhere) {
  const auto attend = [&]<class Shape>() {
    launch_query_stationary<Shape>(ctx, op, out, in, block_index, l_sel, combine, elsewhere);
  };
  if (in.q.size(3) == 64)
    attend.operator()<QueryStationaryShape<64, 64, 12, 152, 56>>();
  else if (in.q.size(3) == 128)
    attend.operator()<QueryStationaryShape<128, 128, 12, 152, 56>>();
  else  // dk = 192, where twelve warps would have too few registers each
    attend.operator()<QueryStationaryShape<192, 128, 8, 208, 88>>();
}

}  // namespace triad::cuda
