// The selected branch's query-stationary forward (nsa/sm90/query_stationary.cu): the producer warps, which make each
// token tile's block list and load the blocks into a ring.
//
// One thread loads the blocks by TMA; one warp makes the next tile's list while the current one is computed. A list
// entry is a block and a mask with the warps whose tokens list it; in packed rows, whose blocks begin anywhere, the
// block's number in the entry is its first key. Each warp reads the list at its own pace, within the ring: for warps
// that don't need a stage, the load thread arrives at its `empty` barrier.
//
// A list's blocks may have any order. It is chosen so that the blocks in the ring belong to many warps: first every
// token's first block, then every token's second block, and so on, without repetition. Short lists are then reordered
// by how many blocks each warp has had so far.
//
// A hash table in shared memory maps a block to its list entry, so the memory doesn't depend on the block count.
#pragma once
#include "kernels/nsa/gpu/branch.cuh"
#include "kernels/nsa/gpu/combine.cuh"
#include "kernels/nsa/sm90/forward.cuh"
#include "kernels/nsa/sm90/kv_stationary_share.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kStageKeys = 64;  // keys per ring stage, at most
constexpr int kMaxStages = 16;  // ring stages, at most
constexpr int kWarpBits = 12;   // bits in a list entry that hold the warp mask; the higher bits are the block
// The most blocks per sequence that a list entry can number; for packed rows, the most keys.
constexpr int64_t kMostBlocks = int64_t{1} << (32 - kWarpBits);
constexpr unsigned short kEmptySlot = 0xffff;  // marks an empty slot in the hash table

struct QueryStationaryArgs {
  CUtensorMap k_map, v_map;
  View<const bf16> q;
  View<bf16> o;
  View<float> lse;
  CombineRows combine;
  BlockLists lists;
  Divisor n, stages, tiles;  // n, ring stages, tiles per sequence and group
  Divisor units;             // units per token; a unit is 16 heads in a group
  Divisor tile_tokens;
  int G, all_tiles;
  const int* block_begins;  // [B,ids] for packed rows, else nullptr: each block's first key
  int ids;
  int entry_keys;          // a list entry's block begins at its number times this: l', or 1 if it is a key
  int stage_keys, pieces;  // keys per stage; stages per block
  int list_room;           // entries per list, at most
  int table_bits;          // log2 of the hash table's slots
  float scale_log2;
  KvStationaryShare elsewhere;  // tokens whose results other kernels write afterwards
};

// CTA sizes: kWarps consumer warps and a producer warpgroup. Registers are per thread.
template <int kDk_, int kDv_, int kWarps_, int kConsumerRegisters_, int kProducerRegisters_>
struct QueryStationaryShape {
  static constexpr int kDk = kDk_, kDv = kDv_, kWarps = kWarps_;
  static constexpr int kConsumerRegisters = kConsumerRegisters_, kProducerRegisters = kProducerRegisters_;
  static constexpr int kThreads = 32 * kWarps + kWarpgroup;
  static constexpr int kPanelsK = kDk / kPanel, kPanelsV = kDv / kPanel, kPanelBytes = kStageKeys * kPanelRowBytes;
  static constexpr int kStageBytes = (kPanelsK + kPanelsV) * kPanelBytes;  // k's panels, then v's
  static_assert(kWarps <= kWarpBits && kWarps % 4 == 0);
};

// The barriers and counters in shared memory, after the stages. They are followed by two lists [2][list_room] and the
// hash table.
struct Control {
  Barrier full[kMaxStages], empty[kMaxStages], list_full[2], list_empty[2];
  int counts[2];  // each list's entry count
  int requested;  // how many stages the load thread has requested, over all tiles
};
// count_up and read_count: a counter that one thread increments and others read without a barrier. With release and
// acquire, a thread that has read a count also observes the barrier phases that ended before the increment.
__device__ __forceinline__ void count_up(int& x) {
  asm volatile("red.release.cta.shared::cta.add.s32 [%0], 1;" ::"r"(shared_address(&x)) : "memory");
}
__device__ __forceinline__ int read_count(int& x) {
  int value;
  asm volatile("atom.acquire.cta.shared::cta.add.s32 %0, [%1], 0;" : "=r"(value) : "r"(shared_address(&x)) : "memory");
  return value;
}
inline int64_t control_bytes(int64_t list_room, int64_t table_bits) {
  return sizeof(Control) + sizeof(unsigned) * 2 * list_room + (sizeof(unsigned short) << table_bits);
}

template <class Shape>
struct BlockRing {
  const QueryStationaryArgs& a;
  unsigned char* stages;
  Control& control;

  __device__ __forceinline__ unsigned* list(int turn) const {
    return reinterpret_cast<unsigned*>(&control + 1) + (turn & 1) * a.list_room;
  }
  // A tile: the tokens from `first` on, in one sequence and group. Tiles with the last tokens, which see most keys,
  // start first.
  struct Tile {
    int b, g, first;
    __device__ __forceinline__ Tile(const QueryStationaryArgs& a, int i) {
      const int bg = a.tiles.quotient(i);
      b = bg / a.lists.groups, g = bg - b * a.lists.groups;
      first = a.lists.first_token + (a.tiles.value() - 1 - (i - bg * a.tiles.value())) * a.tile_tokens.value();
    }
  };
  // Calls f(tile, turn) for each of this CTA's tiles, with turn = 0, 1, ...
  template <class F>
  __device__ __forceinline__ void for_tiles(F&& f) const {
    for (int i = blockIdx.x, turn = 0; i < a.all_tiles; i += gridDim.x) {
      const Tile tile(a, i);
      const int last = min(tile.first + a.tile_tokens.value(), a.lists.tokens) - 1;
      if (a.elsewhere.is_packed() && a.elsewhere.has_all(tile.b, tile.first, last)) continue;
      f(tile, turn++);
    }
  }
};

template <class Shape>
struct Producer : BlockRing<Shape> {
  using typename BlockRing<Shape>::Tile;
  using BlockRing<Shape>::a, BlockRing<Shape>::stages, BlockRing<Shape>::control;

  // Loads the blocks in each tile's list into the ring. Called by one thread.
  __device__ __forceinline__ void load() const {
    int stage = 0, lap = 0;
    this->for_tiles([&](const Tile& tile, int turn) {
      barrier_wait(&control.list_full[turn & 1], turn >> 1 & 1);
      const int count = control.counts[turn & 1];
      const unsigned* const entries = this->list(turn);
      for (int e = 0; e < count; ++e) {
        const unsigned entry = entries[e];
        const int others = Shape::kWarps - __popc(entry & ((1u << kWarpBits) - 1));
        int key0 = static_cast<int>(entry >> kWarpBits) * a.entry_keys;
        for (int piece = 0; piece < a.pieces; ++piece, key0 += kStageKeys) {
          barrier_wait(&control.empty[stage], (lap & 1) ^ 1);
          if (others > 0) barrier_arrive(&control.empty[stage], others);
          Barrier* const full = &control.full[stage];
          barrier_expect(full, a.stage_keys * (Shape::kDk + Shape::kDv) * 2);
          count_up(control.requested);
          unsigned char* to = stages + stage * Shape::kStageBytes;
#pragma unroll
          for (int i = 0; i < Shape::kPanelsK; ++i, to += Shape::kPanelBytes)
            copy_box(to, a.k_map, kPanel * i, key0, tile.g, tile.b, full);
#pragma unroll
          for (int i = 0; i < Shape::kPanelsV; ++i, to += Shape::kPanelBytes)
            copy_box(to, a.v_map, kPanel * i, key0, tile.g, tile.b, full);
          if (++stage == a.stages.value()) stage = 0, ++lap;
        }
      }
      barrier_arrive(&control.list_empty[turn & 1]);
    });
  }

  // Returns, for each lane's block, its index in a list with `count` entries, or -1 for block -1. Blocks that are not
  // yet in the list are appended. The hash table uses linear probing.
  __device__ __forceinline__ int find_or_append(int block, unsigned short* table, unsigned* entries, int& count) const {
    const int lane = threadIdx.x % 32, last = (1 << a.table_bits) - 1;
    // Among lanes that have the same block, the first searches the table.
    const int first = __ffs(__match_any_sync(kFullWarp, block)) - 1;
    int at = kEmptySlot, slot = static_cast<unsigned>(block) * 0x9e3779b1u >> (32 - a.table_bits);
    __syncwarp();
    if (block >= 0 && lane == first)
      while ((at = table[slot]) != kEmptySlot && static_cast<int>(entries[at] >> kWarpBits) != block)
        slot = slot + 1 & last;
    const bool is_new = block >= 0 && lane == first && at == kEmptySlot;
    const unsigned all_new = __ballot_sync(kFullWarp, is_new);
    __syncwarp();
    if (is_new) {
      at = count + __popc(all_new & ((1u << lane) - 1));
      entries[at] = static_cast<unsigned>(block) << kWarpBits;
      while (atomicCAS(table + slot, kEmptySlot, static_cast<unsigned short>(at)) != kEmptySlot) slot = slot + 1 & last;
    }
    count += __popc(all_new);
    __syncwarp();
    return __shfl_sync(kFullWarp, at, first);
  }

  // A list entry's warps, as one byte per warp: 1 if its token lists the block, else 0.
  struct Warps {
    unsigned bytes[3] = {};
    __device__ __forceinline__ explicit Warps(unsigned entry) {
#pragma unroll
      for (int i = 0; i < 3; ++i) bytes[i] = (entry >> 4 * i & 15) * 0x204081 & 0x1010101;
    }
  };
  // Reorders a list to keep all warps busy. The next entry is always the one whose warps have had the fewest blocks so
  // far, on average, minus a tenth of a block for each of its warps. Long lists keep their order: reordering them would
  // take longer than computing the previous tile.
  __device__ __forceinline__ void order(unsigned* entries, int count) const {
    constexpr int kPerLane = 3, kWhole = 27720;  // kPerLane: list entries per lane; kWhole: a common multiple of 1 ..
                                                 // 12, to divide by the warp count
    static_assert(kWarpBits == 12);
    const int lane = threadIdx.x % 32;
    if (count > 32 * kPerLane) return;
    const auto entry_of = [&](int i) { return 32 * i + lane < count ? entries[32 * i + lane] : 0u; };
    unsigned entry[kPerLane] = {entry_of(0), entry_of(1), entry_of(2)};
    const Warps warps[kPerLane] = {Warps(entry[0]), Warps(entry[1]), Warps(entry[2])};
    int share[kPerLane];
    unsigned key0[kPerLane];  // the sort key's constant part; its low byte is the entry's index, for ties. ~0: already
                              // placed
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int n = __popc(entry[i] & ((1 << kWarpBits) - 1));
      share[i] = (kWhole / max(n, 1)) << 8;
      key0[i] = n == 0 ? ~0u : (kWhole / 10 * (20 - n)) << 8 | (32 * i + lane);
    }
    unsigned had[3] = {};  // how many blocks each warp has had so far, one byte per warp
    __syncwarp();
#pragma unroll 1
    for (int at = 0; at < count; ++at) {
      unsigned best = ~0u;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (32 * i >= count) break;
        unsigned sum = 0;
#pragma unroll
        for (int j = 0; j < 3; ++j) sum = __dp4a(warps[i].bytes[j], had[j], sum);
        best = min(best, key0[i] == ~0u ? ~0u : sum * share[i] + key0[i]);
      }
      const int from =
          static_cast<int>(__reduce_min_sync(kFullWarp, best) & 255);  // the chosen entry's index in the original order
      unsigned taken = entry[0];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        taken = from >= 32 * i ? entry[i] : taken;
        if (from == 32 * i + lane) key0[i] = ~0u;
      }
      taken = __shfl_sync(kFullWarp, taken, from % 32);
      if (lane == 0) entries[at] = taken;
      const Warps taken_warps(taken);
#pragma unroll
      for (int j = 0; j < 3; ++j) had[j] += taken_warps.bytes[j];
    }
  }

  // Makes each tile's list: the blocks that its tokens list. Called by one warp.
  __device__ __forceinline__ void make_lists() const {
    const int lane = threadIdx.x % 32, n = a.n.value();
    const unsigned units = (1u << a.units.value()) - 1;
    unsigned short* const table = reinterpret_cast<unsigned short*>(this->list(0) + 2 * a.list_room);
    this->for_tiles([&](const Tile& tile, int turn) {
      const int tokens = min(a.tile_tokens.value(), a.lists.tokens - tile.first);
      // The block number at one place in a token's list, as an entry has it; -1 if there is none or if the block begins
      // after the token.
      const auto block_at = [&](int token, int place) {
        const int block = a.lists.at(tile.b, tile.first + token, tile.g)[place];
        int number = block;
        if (a.block_begins != nullptr && block >= 0) number = a.block_begins[int64_t{tile.b} * a.ids + block];
        return number * a.entry_keys <= tile.first + token ? number : -1;
      };
      if (lane < tokens)
        for (int i = 0; i < n; i += 16) prefetch_l2(a.lists.at(tile.b, tile.first + lane, tile.g) + i);
      for (int i = lane; i < 1 << a.table_bits; i += 32) table[i] = kEmptySlot;
      barrier_wait(&control.list_empty[turn & 1], (turn >> 1 & 1) ^ 1);
      unsigned* const entries = this->list(turn);
      int count = 0;
      // All tokens' first blocks, then their second blocks, ...
      for (int e0 = 0; e0 < a.tile_tokens.value() * n; e0 += 32) {
        const int place = a.tile_tokens.quotient(e0 + lane), token = e0 + lane - place * a.tile_tokens.value();
        const int block = place < n && token < tokens ? block_at(token, place) : -1;
        const int at = find_or_append(block, table, entries, count);
        if (block >= 0) atomicOr(&entries[at], units << token * a.units.value());
      }
      __syncwarp();
      order(entries, count);
      if (lane == 0) control.counts[turn & 1] = count;
      barrier_arrive(&control.list_full[turn & 1]);  // each lane arrives when it has written to the list
    });
  }
};

}  // namespace
}  // namespace triad::cuda
