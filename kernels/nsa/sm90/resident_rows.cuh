// Forward of the selected branch with resident rows (nsa/sm90/resident_rows.cu explains tiles, steps, items and sums):
// the tile of a CTA, its shared memory, and the producer warps. One loads keys and values, the others list the items.
#pragma once
#include <numbers>

#include "kernels/nsa/gpu/combine.cuh"
#include "kernels/nsa/sm90/forward.cuh"

namespace triad::cuda {
namespace {

constexpr int kBlockKeys = 64;  // keys of a block; a step visits one block
constexpr int kItemRows = 64;   // rows of an item

struct ResidentRowsArgs {
  CUtensorMap q_map, k_map, v_map;
  View<__nv_bfloat16> o;
  View<float> lse;
  CombineRows combine;
  BlockLists lists;
  Divisor n, heads, sequences_and_groups;
  int tile_tokens;  // tokens per CTA
  int tiles;        // per sequence and group
  float scale_log2;
};

// Sizes of a CTA: rows and tokens of a tile, at most; stages of keys and values; consumer warpgroups; producer warps
// that list items.
constexpr int kResidentRows = 384, kResidentTokens = 96, kStages = 4, kWarpgroups = 4, kListers = 3;
constexpr int kHead = kPanel;  // columns of q, k, v and o
constexpr int kConsumers = kWarpgroups * kWarpgroup, kCtaThreads = kConsumers + kWarpgroup;
constexpr int kWords = (kResidentTokens + 31) / 32;             // a block's mask has a bit for each token
constexpr int kStepItems = ceil_div(kResidentRows, kItemRows);  // of a step, at most
// The blocks of a sequence, at most. ItemHeader has 9 bits for a block's number and for a step's; shared memory has a
// mask for each block.
constexpr int kMostBlocks = 512;
// The length of the rings of items and of barriers. A wait passes the parity of a phase alone. So when it begins, the
// phase before must be complete, and the phase after must not.
//   The loader waits, at step n, for the items of step n - kStages. The item kSlots after one of these is not done: it
//   is in step n or later, which is not loaded, because kStages steps have at most kSlots items. A lister waits for
//   item i - kSlots before it writes item i, but may not have waited for item i - 2 kSlots, which another lister has
//   replaced. That item is done: up to (kListers - 1) * kStepItems items are between two items of a lister, and each
//   warpgroup has one open item.
constexpr unsigned kSlots = 32;
static_assert(kStages * kStepItems <= kSlots && kListers * kStepItems + kWarpgroups < kSlots);
static_assert((kSlots & (kSlots - 1)) == 0);  // ring_wait() counts modulo 2^32

// An item: up to 64 rows of the tile whose tokens list a block.
struct Item {
  unsigned header;                   // an ItemHeader
  unsigned short chunks[kItemRows];  // row_chunk() of the rows, ascending; after them, of the last row
};
// The numbers of an item, which are packed into one word: a warp makes them uniform by one instruction.
struct ItemHeader {
  int count;     // rows; 0: there are no more items
  int arrivals;  // of each thread of the item's warpgroup, at base_set and at merged of the step
  unsigned step;
  int block;
  __device__ __forceinline__ unsigned pack() const { return count | arrivals << 7 | step << 10 | block << 19; }
  __device__ __forceinline__ static ItemHeader unpack(unsigned word) {
    return {static_cast<int>(word % 128), static_cast<int>(word >> 7 & 7), word >> 10 & 511,
            static_cast<int>(word >> 19)};
  }
};
static_assert(kItemRows < 128 && kStepItems < 8 && kMostBlocks <= 512);
// The number of the 16-byte chunk of the tile of q where the first chunk of a row is (hopper/shared_memory.cuh).
__device__ __forceinline__ int row_chunk(int row) { return 8 * row + row % 8; }
__device__ __forceinline__ int row_of(int chunk) { return chunk / 8; }

struct Shared {
  unsigned char q[kResidentRows * kPanelRowBytes];
  float o[kResidentRows * kHead];  // in the order of output_address()
  struct {
    unsigned char k[kBlockKeys * kPanelRowBytes], v[kBlockKeys * kPanelRowBytes];
  } stage[kStages];
  Item items[kSlots];
  float2 sums[kResidentRows];  // x: the exponent M of a row, y: its sum L
  float base[kResidentRows];   // the base b of a row; -inf before its first item
  // For each warp that lists items, the tokens that list the block of its step.
  short tokens[kListers][kResidentTokens];
  // A barrier of an item, or of a step, completes when
  //   item_full: the item is written;
  //   kv_full:   keys and values of the step are loaded;
  //   item_done: the consumers have read the item, and the keys and values of its block;
  //   base_set:  each row of the step's items has a base;
  //   merged:    the sums of the step's items are added to those of their rows.
  // base_set and merged of a step expect kStepItems arrivals of each of a warpgroup's 128 threads. The threads of the
  // warpgroup that computes an item arrive once for it. A step may have fewer than kStepItems items: with its first
  // item, the threads also arrive for those that it lacks.
  Barrier q_full, item_full[kSlots], kv_full[kSlots], item_done[kSlots], base_set[kSlots], merged[kSlots];
};
static_assert(sizeof(Shared) + kMostBlocks * kWords * sizeof(unsigned) <= 227 * 1024);
inline int64_t shared_bytes(int64_t blocks) {
  return static_cast<int64_t>(sizeof(Shared)) + blocks * kWords * static_cast<int64_t>(sizeof(unsigned));
}
__device__ __forceinline__ unsigned* block_masks(Shared& shared) { return reinterpret_cast<unsigned*>(&shared + 1); }
// A row of o consists of groups of 16 columns, 64 bytes each. Four lanes share a row: lane c has bytes [16 c, 16 c +
// 16) of each group, the four columns that it has in the sums of a product (wgmma.cuh). The groups of a row are
// permuted, differently in neighbouring rows, so that these are in different banks. output_address: the address of this
// lane's part of group 0 of a row. output_group: the address of the same part of `group`.
constexpr int kOutputGroups = kHead / 16;
__device__ __forceinline__ uint32_t output_address(Shared& shared, int row) {
  return shared_address(shared.o + threadIdx.x % 4 * 4) + row * (kHead * sizeof(float)) + row % kOutputGroups * 64;
}
__device__ __forceinline__ uint32_t output_group(uint32_t address, int group) { return address ^ group << 6; }

// Waits for event n of a ring: phase n / kSlots of barrier n % kSlots. Events -kSlots to -1 count as complete.
__device__ __forceinline__ void ring_wait(Barrier* ring, unsigned n) {
  barrier_wait(&ring[n % kSlots], n / kSlots & 1);
}

// The tokens [first, first + tokens) of sequence b and group g, which this CTA computes. The tiles of the last tokens,
// which see most keys, start first.
struct TokenTile {
  int b, g, first, tokens;
  __device__ __forceinline__ TokenTile(const ResidentRowsArgs& a) {
    const int index = static_cast<int>(blockIdx.x), before = a.sequences_and_groups.quotient(index);
    const int bg = index - before * a.sequences_and_groups.value();
    b = bg / a.lists.groups, g = bg - b * a.lists.groups;
    first = a.lists.first_token + (a.tiles - 1 - before) * a.tile_tokens;
    tokens = min(a.tile_tokens, a.lists.tokens - first);
  }
  __device__ __forceinline__ int blocks() const { return (first + tokens - 1) / kBlockKeys + 1; }
};

// Sets bit t of a block's mask if token t of the tile lists the block. All threads of the CTA call it, with masks that
// are zero. A list entry is left out if its block begins after the token, or if it is -1, which fills up short lists.
__device__ __forceinline__ void read_lists(const ResidentRowsArgs& a, const TokenTile& tile, unsigned* masks) {
  const int entries = tile.tokens * a.n.value();
  const int* const lists = a.lists.at(tile.b, tile.first, tile.g);
  for (int i = threadIdx.x; i < entries; i += kCtaThreads) {
    const int token = a.n.quotient(i);
    const int block = __ldg(lists + token * a.lists.row + i - token * a.n.value());
    if (block >= 0 && block * kBlockKeys <= tile.first + token)
      atomicOr(masks + block * kWords + token / 32, 1u << token % 32);
  }
}

// Loads the tile's q.
__device__ __forceinline__ void load_queries(const ResidentRowsArgs& a, const TokenTile& tile, Shared& shared) {
  const int G = a.heads.value();
  barrier_expect(&shared.q_full, a.tile_tokens * G * kPanelRowBytes);
  copy_box(shared.q, a.q_map, 0, tile.g * G, tile.first - a.lists.first_token, tile.b, &shared.q_full);
}

// Calls step(block, tokens) for each block that a token of the tile lists, in ascending order. tokens: the number of
// tokens that list it. All lanes of a warp call it.
template <class Step>
__device__ __forceinline__ void for_each_step(const unsigned* masks, int blocks, Step&& step) {
  const int lane = threadIdx.x % 32;
  for (int block0 = 0; block0 < blocks; block0 += 32) {
    int tokens = 0;
    if (block0 + lane < blocks)
#pragma unroll
      for (int w = 0; w < kWords; ++w) tokens += __popc(masks[(block0 + lane) * kWords + w]);
    for (unsigned left = __ballot_sync(kFullWarp, tokens != 0); left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1;
      step(block0 + from, __shfl_sync(kFullWarp, tokens, from));
    }
  }
}

// The first producer warp: loads the keys and values of each step. Step n uses stage n % kStages, as step n - kStages
// did, and waits until the items of that step are done.
__device__ __forceinline__ void load_steps(const ResidentRowsArgs& a, const TokenTile& tile, Shared& shared) {
  const int lane = threadIdx.x % 32, G = a.heads.value();
  unsigned n = 0, item = 0;
  unsigned first = 0;  // in lane i: number of the first item of the last step in stage i,
  int items = 0;       // and how many it has
  for_each_step(block_masks(shared), tile.blocks(), [&](int block, int tokens) {
    const int stage = n % kStages;
    const unsigned before = __shfl_sync(kFullWarp, first, stage) + lane;
    if (lane < __shfl_sync(kFullWarp, items, stage)) ring_wait(shared.item_done, before);
    __syncwarp();
    if (lane == 0) {
      Barrier* const full = &shared.kv_full[n % kSlots];
      auto& [k, v] = shared.stage[stage];
      barrier_expect(full, sizeof k + sizeof v);
      copy_box(k, a.k_map, 0, block * kBlockKeys, tile.g, tile.b, full);
      copy_box(v, a.v_map, 0, block * kBlockKeys, tile.g, tile.b, full);
    }
    const int own = ceil_div(tokens * G, kItemRows);
    if (lane == stage) first = item, items = own;
    item += own, ++n;
  });
}

// The other producer warps list the items. Each takes every kListers-th step, because one warp would not keep up with
// the consumers. After the last step, the first of them writes one item without rows for each consumer warpgroup, which
// ends its loop. lister: 0 to kListers - 1.
__device__ __forceinline__ void list_items(const ResidentRowsArgs& a, const TokenTile& tile, Shared& shared,
                                           unsigned lister) {
  const int lane = threadIdx.x % 32, G = a.heads.value();
  const unsigned* const masks = block_masks(shared);
  short* const listing = shared.tokens[lister];
  unsigned step = 0, item = 0;
  const auto write_item = [&](const ItemHeader& header, auto&& write_rows) {
    ring_wait(shared.item_done, item - kSlots);  // the item that had the slot before
    Item& to = shared.items[item % kSlots];
    write_rows(to);
    if (lane == 0) to.header = header.pack();
    barrier_arrive(&shared.item_full[item % kSlots]);  // each lane has written its part
    ++item;
  };
  for_each_step(masks, tile.blocks(), [&](int block, int tokens) {
    const int rows = tokens * G, items = ceil_div(rows, kItemRows);
    const unsigned n = step++;
    if (n % kListers != lister) {
      item += items;
      return;
    }
    int listed = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const unsigned word = masks[block * kWords + w];
      if ((word >> lane & 1) != 0)
        listing[listed + __popc(word & ((1u << lane) - 1))] = static_cast<short>(32 * w + lane);
      listed += __popc(word);
    }
    __syncwarp();
    for (int row0 = 0; row0 < rows; row0 += kItemRows) {
      const int arrivals = row0 == 0 ? 1 + kStepItems - items : 1;
      write_item({min(kItemRows, rows - row0), arrivals, n, block}, [&](Item& to) {
#pragma unroll
        for (int i = lane; i < kItemRows; i += 32) {
          const int index = min(row0 + i, rows - 1), place = a.heads.quotient(index);
          const int row = listing[place] * G + index - place * G;
          to.chunks[i] = static_cast<unsigned short>(row_chunk(row));
        }
      });
    }
    __syncwarp();  // all lanes have read the tokens
  });
  if (lister == 0)
    for (int w = 0; w < kWarpgroups; ++w) write_item({}, [](Item&) {});
}

}  // namespace
}  // namespace triad::cuda
