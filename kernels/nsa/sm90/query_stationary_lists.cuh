// The selected branch's forward from the side of the tokens: which blocks a tile of tokens needs, in which order, and
// the ring that they are brought into (nsa/sm90/query_stationary.cu).
//
// A thread asks the copy engine for the blocks, and a warp makes the next tile's list while this one's is worked off. A
// list entry is a block and the warps that list it. A warp follows the list at its own pace, as far as the ring
// reaches: the loader arrives on a stage's `empty` barrier for the warps that do not want it. In which order the blocks
// are visited is free, so the list is dealt out: every token's first block, then every token's second one, and so on,
// without those that were dealt before. Then the blocks in the ring at a time belong to many warps, and none of them
// has several while others have none. Lists of few blocks are put in order besides, by how many blocks each warp has
// had: in a model of the ring (7 stages, 12 tokens with random lists at T = 8192) warps then wait 15% of their time,
// not 28%.
//
// Which blocks a tile's list has so far is asked of a table in shared memory by the block's number (hashed), so that
// any number of blocks takes the same room.
#pragma once
#include "kernels/nsa/gpu/combine.cuh"
#include "kernels/nsa/sm90/forward.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kStageKeys = 64;  // keys of a stage
constexpr int kMaxStages = 16;  // of a ring
constexpr int kWarpBits = 12;   // of a list's entry: the warps; the block has the others
constexpr int64_t kMostBlocks = int64_t{1} << (32 - kWarpBits);  // of a sequence
constexpr unsigned short kNowhere = 0xffff;

// block_index [B,T,Hkv,n]
struct TokenLists {
  const int* data;
  int64_t batch, row, head;
  int tokens, groups;
  __device__ __forceinline__ const int* at(int b, int t, int g) const {
    return data + b * batch + static_cast<int64_t>(t) * row + g * head;
  }
};

struct TokensArgs {
  CUtensorMap k_map, v_map;
  View<const bf16> q;
  View<bf16> o;
  View<float> lse;
  CombineRows combine;  // if wanted
  TokenLists lists;
  Divisor n, block_keys, stages, tiles;  // stages of the ring; tiles of one (b, g)
  Divisor units;                         // of a token
  Divisor tile_tokens;
  int G, all_tiles;
  int stage_keys, pieces;  // of a block, which takes `pieces` stages
  int list_room;           // entries of a tile's list at most
  int table_bits;          // log2 of the places of the table of those that are in it
  float scale_log2;
  const int* unless;  // not nullptr: where *unless is not 0 there is nothing to be done
};

// kWarps take units. The CTA's registers go to them and to four warps that serve.
template <int kDk_, int kDv_, int kWarps_, int kUnitRegisters_, int kServiceRegisters_>
struct TokensShape {
  static constexpr int kDk = kDk_, kDv = kDv_, kWarps = kWarps_;
  static constexpr int kUnitRegisters = kUnitRegisters_, kServiceRegisters = kServiceRegisters_;
  static constexpr int kThreads = 32 * kWarps + kWarpgroup;
  static constexpr int kPanelsK = kDk / kPanel, kPanelsV = kDv / kPanel, kPanelBytes = kStageKeys * kPanelRowBytes;
  static constexpr int kStageBytes = (kPanelsK + kPanelsV) * kPanelBytes;  // panels of k, then those of v
  static_assert(kWarps <= kWarpBits && kWarps % 4 == 0);
};

// Shared memory after the stages; then two lists [2][list_room], and the table that their maker finds blocks with.
struct Control {
  Barrier full[kMaxStages], empty[kMaxStages], list_full[2], list_empty[2];
  int counts[2];  // entries of the lists
  int asked;      // stages that the loader has asked for, all tiles together
};
// One thread counts up, others look when they like. Both by atomics, as no barrier stands between. Who has seen a count
// has seen the barriers' phases end that ended before: hence release and acquire. (Plain loads and stores with the same
// order, which racecheck reports, are 2% faster at 8192 tokens and 0.3% at 65536.)
__device__ __forceinline__ void count_up(int& x) {
  asm volatile("red.release.cta.shared::cta.add.s32 [%0], 1;" ::"r"(shared_address(&x)) : "memory");
}
__device__ __forceinline__ int look_at(int& x) {
  int value;
  asm volatile("atom.acquire.cta.shared::cta.add.s32 %0, [%1], 0;" : "=r"(value) : "r"(shared_address(&x)) : "memory");
  return value;
}
inline int64_t control_bytes(int64_t list_room, int64_t table_bits) {
  return sizeof(Control) + sizeof(unsigned) * 2 * list_room + (sizeof(unsigned short) << table_bits);
}

template <class Shape>
struct TokenRing {
  const TokensArgs& a;
  unsigned char* stages;
  Control& control;

  __device__ __forceinline__ unsigned* list(int turn) const {
    return reinterpret_cast<unsigned*>(&control + 1) + (turn & 1) * a.list_room;
  }
  // The tokens from `first` on of one (b, g). The last ones see most: they come first.
  struct Tile {
    int b, g, first;
    __device__ __forceinline__ Tile(const TokensArgs& a, int i) {
      const int bg = a.tiles.quotient(i);
      b = bg / a.lists.groups, g = bg - b * a.lists.groups;
      first = (a.tiles.value() - 1 - (i - bg * a.tiles.value())) * a.tile_tokens.value();
    }
  };
  // f(tile, turn) for this CTA's tiles, turn after turn.
  template <class F>
  __device__ __forceinline__ void for_tiles(F&& f) const {
    for (int i = blockIdx.x, turn = 0; i < a.all_tiles; i += gridDim.x, ++turn) f(Tile(a, i), turn);
  }
};

template <class Shape>
struct TokenService : TokenRing<Shape> {
  using typename TokenRing<Shape>::Tile;
  using TokenRing<Shape>::a, TokenRing<Shape>::stages, TokenRing<Shape>::control;

  // The thread that asks for the blocks of each list.
  __device__ __forceinline__ void load() const {
    int stage = 0, lap = 0;
    this->for_tiles([&](const Tile& tile, int turn) {
      barrier_wait(&control.list_full[turn & 1], turn >> 1 & 1);
      const int count = control.counts[turn & 1];
      const unsigned* const entries = this->list(turn);
      for (int e = 0; e < count; ++e) {
        const unsigned entry = entries[e];
        const int others = Shape::kWarps - __popc(entry & ((1u << kWarpBits) - 1));
        int key0 = static_cast<int>(entry >> kWarpBits) * a.block_keys.value();
        for (int piece = 0; piece < a.pieces; ++piece, key0 += kStageKeys) {
          barrier_wait(&control.empty[stage], (lap & 1) ^ 1);
          if (others > 0) barrier_arrive(&control.empty[stage], others);
          Barrier* const full = &control.full[stage];
          barrier_expect(full, a.stage_keys * (Shape::kDk + Shape::kDv) * 2);
          count_up(control.asked);
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

  // Where the block of each lane (-1: none) lies in a list of `count` entries, which grows by the blocks that it
  // lacked. A block is found through the table, in which it lies at its hash or behind it, where there is room (linear
  // probing).
  __device__ __forceinline__ int place_of(int block, unsigned short* table, unsigned* entries, int& count) const {
    const int lane = threadIdx.x % 32, last = (1 << a.table_bits) - 1;
    // The first of the lanes that have a block looks for it.
    const int first = __ffs(__match_any_sync(kFullWarp, block)) - 1;
    int at = kNowhere, slot = static_cast<unsigned>(block) * 0x9e3779b1u >> (32 - a.table_bits);
    __syncwarp();
    if (block >= 0 && lane == first)
      while ((at = table[slot]) != kNowhere && static_cast<int>(entries[at] >> kWarpBits) != block)
        slot = slot + 1 & last;
    const bool is_new = block >= 0 && lane == first && at == kNowhere;
    const unsigned all_new = __ballot_sync(kFullWarp, is_new);
    __syncwarp();
    if (is_new) {
      at = count + __popc(all_new & ((1u << lane) - 1));
      entries[at] = static_cast<unsigned>(block) << kWarpBits;
      while (atomicCAS(table + slot, kNowhere, static_cast<unsigned short>(at)) != kNowhere) slot = slot + 1 & last;
    }
    count += __popc(all_new);
    __syncwarp();
    return __shfl_sync(kFullWarp, at, first);
  }

  // The warps of an entry, a byte each, 1 or 0.
  struct Warps {
    unsigned bytes[3] = {};
    __device__ __forceinline__ explicit Warps(unsigned entry) {
#pragma unroll
      for (int i = 0; i < 3; ++i) bytes[i] = (entry >> 4 * i & 15) * 0x204081 & 0x1010101;
    }
  };
  // Puts a list into the order that keeps the warps busy: next comes the entry whose warps have had the fewest blocks
  // so far, on average, and rather one of many warps: a tenth of a block for each. Long lists stay as they are: their
  // order would not be ready when the tile before is done.
  __device__ __forceinline__ void order(unsigned* entries, int count) const {
    constexpr int kPerLane = 3, kWhole = 27720;  // divided by 1 .. 12 without a rest
    static_assert(kWarpBits == 12);
    const int lane = threadIdx.x % 32;
    if (count > 32 * kPerLane) return;
    const auto entry_of = [&](int i) { return 32 * i + lane < count ? entries[32 * i + lane] : 0u; };
    unsigned entry[kPerLane] = {entry_of(0), entry_of(1), entry_of(2)};
    const Warps warps[kPerLane] = {Warps(entry[0]), Warps(entry[1]), Warps(entry[2])};
    int share[kPerLane];
    unsigned key0[kPerLane];  // before its warps' blocks; below all else its place, so that no two are alike. ~0: taken
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int n = __popc(entry[i] & ((1 << kWarpBits) - 1));
      share[i] = (kWhole / max(n, 1)) << 8;
      key0[i] = n == 0 ? ~0u : (kWhole / 10 * (20 - n)) << 8 | (32 * i + lane);
    }
    unsigned had[3] = {};  // the warps' blocks so far, a byte each
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
      const int from = static_cast<int>(__reduce_min_sync(kFullWarp, best) & 255);  // where it stood
      unsigned taken = entry[0];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        taken = from >= 32 * i ? entry[i] : taken;
        if (from == 32 * i + lane) key0[i] = ~0u;
      }
      taken = __shfl_sync(kFullWarp, taken, from % 32);
      if (lane == 0) entries[at] = taken;
      const Warps of_taken(taken);
#pragma unroll
      for (int j = 0; j < 3; ++j) had[j] += of_taken.bytes[j];
    }
  }

  // The warp that makes the lists.
  __device__ __forceinline__ void make_lists() const {
    const int lane = threadIdx.x % 32, n = a.n.value();
    const unsigned units = (1u << a.units.value()) - 1;
    unsigned short* const table = reinterpret_cast<unsigned short*>(this->list(0) + 2 * a.list_room);
    this->for_tiles([&](const Tile& tile, int turn) {
      const int tokens = min(a.tile_tokens.value(), a.lists.tokens - tile.first);
      // The block that a token has at a place of its list; -1: none, or one that shows it nothing.
      const auto block_at = [&](int token, int place) {
        const int block = a.lists.at(tile.b, tile.first + token, tile.g)[place];
        return block <= a.block_keys.quotient(tile.first + token) ? block : -1;
      };
      if (lane < tokens)
        for (int i = 0; i < n; i += 16) CombineRows::prefetch_l2(a.lists.at(tile.b, tile.first + lane, tile.g) + i);
      for (int i = lane; i < 1 << a.table_bits; i += 32) table[i] = kNowhere;
      barrier_wait(&control.list_empty[turn & 1], (turn >> 1 & 1) ^ 1);
      unsigned* const entries = this->list(turn);
      int count = 0;
      for (int e0 = 0; e0 < a.tile_tokens.value() * n; e0 += 32) {  // the tokens' first blocks, their second ones ..
        const int place = a.tile_tokens.quotient(e0 + lane), token = e0 + lane - place * a.tile_tokens.value();
        const int block = place < n && token < tokens ? block_at(token, place) : -1;
        const int at = place_of(block, table, entries, count);
        if (block >= 0) atomicOr(&entries[at], units << token * a.units.value());
      }
      __syncwarp();
      order(entries, count);
      if (lane == 0) control.counts[turn & 1] = count;
      barrier_arrive(&control.list_full[turn & 1]);  // every lane, for what it wrote
    });
  }
};

}  // namespace
}  // namespace triad::cuda
