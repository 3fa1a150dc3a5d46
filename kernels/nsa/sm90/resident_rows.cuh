// The selected branch's forward with resident rows (nsa/sm90/resident_rows.cu explains tiles, steps, items and sums): a
// CTA's tile, its shared memory, and the producer warps. Loaders load keys and values, listers write the items.
#pragma once
#include <algorithm>

#include "kernels/nsa/gpu/combine.cuh"
#include "kernels/nsa/sm90/forward.cuh"

namespace triad::cuda {
namespace {

constexpr int kBlockKeys = 64;  // keys per block; a step visits one block
constexpr int kItemRows = 64;   // rows per item

struct ResidentRowsArgs {
  CUtensorMap q_map, k_map, v_map;
  View<__nv_bfloat16> o;
  View<float> lse;
  CombineRows combine;
  BlockLists lists;
  Divisor n, heads, sequences_and_groups;
  int tile_tokens;  // tokens per CTA
  int box_tokens;   // tokens that one TMA instruction loads
  int tiles;        // tiles per sequence and group
  float scale_log2;
};

// CTA sizes for heads with kColumns columns and tiles with up to kTileTokens tokens.
template <int kColumns, int kTileTokens>
struct ResidentRowsShape {
  static_assert(kColumns == 64 || kColumns == 128);
  static constexpr bool kWide = kColumns == 128;
  // Columns per row of q, k, v and o, and how many kPanel-column panels these are.
  static constexpr int kHead = kColumns, kPanels = kHead / kPanel;
  static constexpr int kRows = kWide ? 192 : 384, kTokens = kTileTokens;  // the most rows and tokens in a tile
  static constexpr int kStages = kWide ? 2 : 4;                           // key and value stages
  static constexpr int kWarpgroups = kWide ? 3 : 4;                       // consumer warpgroups
  // Whether one warp loads the keys and another one the values. At head width 128 there is room for only two stages.
  // There the key loader loads a stage again as soon as the step that used it has its scores, before that step's values
  // are used.
  static constexpr bool kApart = kWide;
  static constexpr int kLoaders = kApart ? 2 : 1, kListers = 4 - kLoaders;  // the four producer warps
  static constexpr int kConsumers = kWarpgroups * kWarpgroup, kThreads = kConsumers + kWarpgroup;
  static constexpr int kWords = (kTokens + 31) / 32;             // a block's mask has a bit for each token
  static constexpr int kStepItems = ceil_div(kRows, kItemRows);  // the most items in a step
  static constexpr int kOutputGroups = kHead / 16;               // o consists of 16-column groups
};

// The length of the item and barrier rings: item or step n uses entry n % kSlots, and its barrier's phase n / kSlots. A
// thread that waits for a phase gives only the phase's parity. The wait is right if the phase before is complete when
// the wait begins, and the phase after is not. The order of items and steps ensures this, except in two cases, where
// kSlots has to be large enough.
//
// Before a loader loads step n, it waits for step n - kStages's items. The phase after belongs to an item whose number
// is larger by kSlots. This item is in step n or later, since kStages steps have at most kSlots items. It cannot be
// computed yet, because step n is not loaded.
//
// Before a lister writes item i, it waits for item i - kSlots. The phase before is complete when item i - 2 kSlots is
// done. This lister may never have waited for item i - 2 kSlots itself, but three facts ensure that the item is done.
// First, the item that this lister wrote last has a number j >= i - (kListers - 1) * kStepItems - 1, and the lister
// wrote it only after item j - kSlots was done. Second, an item is done only after all earlier steps' items have set
// their bases. Third, a warpgroup sets an item's bases only when its earlier items are done. list_items() asserts that
// kSlots is large enough in both cases.
constexpr unsigned kSlots = 32;
static_assert((kSlots & (kSlots - 1)) == 0);  // ring_wait() counts modulo 2^32

// An item: up to 64 rows in the tile, whose tokens list the block of the item's step.
struct Item {
  unsigned header;                   // an ItemHeader
  unsigned short chunks[kItemRows];  // row_chunk() for the rows in ascending order, then for the last row repeatedly
};
// The numbers that describe an item. They are packed into one word, so that a warp can move all to uniform registers by
// one instruction.
struct ItemHeader {
  int count;     // row count; 0: there are no more items
  int arrivals;  // how often each thread that computes the item arrives at base_set and at merged (struct Shared)
  unsigned step;
  int block;
  __device__ __forceinline__ unsigned pack() const { return count | arrivals << 7 | step << 10 | block << 19; }
  __device__ __forceinline__ static ItemHeader unpack(unsigned word) {
    return {static_cast<int>(word % 128), static_cast<int>(word >> 7 & 7), word >> 10 & 511,
            static_cast<int>(word >> 19)};
  }
};
static_assert(kItemRows < 128);
// An ItemHeader has 9 bits for a step's number. A sequence of 512 blocks has at most 512 steps.
constexpr int kMostSteps = 512;
// A q tile consists of 16-byte chunks (hopper/shared_memory.cuh). row_chunk: the number of the chunk that holds a row's
// first columns. row_of: the row in such a chunk.
__device__ __forceinline__ int row_chunk(int row) { return 8 * row + row % 8; }
__device__ __forceinline__ int row_of(int chunk) { return chunk / 8; }

template <class Shape>
struct Shared {
  unsigned char q[Shape::kPanels][Shape::kRows * kPanelRowBytes];
  float o[Shape::kRows * Shape::kHead];  // ordered as in output_address()
  struct {
    unsigned char k[Shape::kPanels][kBlockKeys * kPanelRowBytes], v[Shape::kPanels][kBlockKeys * kPanelRowBytes];
  } stage[Shape::kStages];
  Item items[kSlots];
  float2 sums[Shape::kRows];  // x: a row's exponent M, y: its sum L
  float base[Shape::kRows];   // a row's base b; -inf before its first item
  // For each lister: the tokens that list the block in the step whose items it writes.
  short tokens[Shape::kListers][Shape::kTokens];
  // Barriers; the ones per item or step are rings.
  //   q_full     completes when the tile's q is loaded.
  //   item_full  (per item) completes when a lister has written the item.
  //   kv_full    (per step) completes when the keys and values in the step's block are loaded. With kApart, it
  //              completes when the keys are loaded.
  //   v_full     (per step) completes when the values in the step's block are loaded (only if kApart).
  //   k_done     (per item) completes when its scores are computed (only if kApart).
  //   item_done  (per item) completes when the consumers no longer need the item, nor its block's keys and values.
  //   base_set   (per step) completes when every row in every item in the step has a base.
  //   merged     (per step) completes when every item in the step has merged.
  // At base_set and merged, a warpgroup's 128 threads arrive once for each item in the step that it computes. The item
  // count varies, but a barrier expects a fixed number of arrivals, enough for kStepItems items. The threads that
  // compute a step's first item therefore also arrive for the missing items.
  Barrier q_full, item_full[kSlots], kv_full[kSlots], item_done[kSlots], base_set[kSlots], merged[kSlots];
  Barrier v_full[Shape::kApart ? kSlots : 1], k_done[Shape::kApart ? kSlots : 1];

  static int64_t bytes(int64_t blocks) {
    return static_cast<int64_t>(sizeof(Shared)) + blocks * Shape::kWords * static_cast<int64_t>(sizeof(unsigned));
  }
  __device__ __forceinline__ unsigned* block_masks() { return reinterpret_cast<unsigned*>(this + 1); }
};
// The most blocks in a sequence. Two things limit it: the bits in an ItemHeader, and the shared memory for the masks,
// one per block.
template <class Shape>
constexpr int64_t most_blocks() {
  return std::min<int64_t>(kMostSteps, (227 * 1024 - sizeof(Shared<Shape>)) / (Shape::kWords * sizeof(unsigned)));
}
// An o row consists of 16-column groups, 64 bytes each. Four lanes share a row: lane c has bytes [16 c, 16 c + 16) in
// each group, the four columns that it has in a product's sums (wgmma.cuh). A row's groups are permuted, differently in
// neighbouring rows, so that these are in different banks. output_address: the address of this lane's part in a row's
// group 0. output_group: the address of the same part in `group`.
template <class Shape>
__device__ __forceinline__ uint32_t output_address(Shared<Shape>& shared, int row) {
  return shared_address(shared.o + threadIdx.x % 4 * 4) + row * (Shape::kHead * sizeof(float)) +
         row % Shape::kOutputGroups * 64;
}
__device__ __forceinline__ uint32_t output_group(uint32_t address, int group) { return address ^ group << 6; }

// Waits until item or step n's barrier is complete (kSlots explains rings). It returns at once for n from -kSlots to
// -1, which precede the first one.
__device__ __forceinline__ void ring_wait(Barrier* ring, unsigned n) {
  barrier_wait(&ring[n % kSlots], n / kSlots & 1);
}

// The tokens [first, first + tokens) in sequence b and group g, which this CTA computes. Tiles with the last tokens,
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

// Reads the lists of the tile's tokens, kAtOnce entries per thread at a time. All the CTA's threads use it.
template <class Shape>
struct ListReader {
  static constexpr int kAtOnce = 4, kEntries = kAtOnce * Shape::kThreads;
  const ResidentRowsArgs& a;
  const TokenTile& tile;
  int block[kAtOnce];  // this thread's entries

  __device__ __forceinline__ int entries() const { return tile.tokens * a.n.value(); }
  // Loads kEntries entries from number `first` on. A thread without an entry gets -1.
  __device__ __forceinline__ void load(int first) {
    const int* const lists = a.lists.at(tile.b, tile.first, tile.g);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = entry(first, k), token = a.n.quotient(i);
      block[k] = i < entries() ? __ldg(lists + token * a.lists.row + i - token * a.n.value()) : -1;
    }
  }
  // For each entry that was loaded: sets bit t in the block's mask, where t is the tile's token that lists the block.
  // An entry is left out if its block begins after the token, or if it is -1, which fills up short lists.
  __device__ __forceinline__ void mark(int first, unsigned* masks) const {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int token = a.n.quotient(entry(first, k));
      if (block[k] >= 0 && block[k] * kBlockKeys <= tile.first + token)
        atomicOr(masks + block[k] * Shape::kWords + token / 32, 1u << token % 32);
    }
  }

 private:
  static __device__ __forceinline__ int entry(int first, int k) {
    return first + k * Shape::kThreads + static_cast<int>(threadIdx.x);
  }
};

// Loads the tile's q, in one box or two. One thread calls it.
template <class Shape>
__device__ __forceinline__ void load_queries(const ResidentRowsArgs& a, const TokenTile& tile, Shared<Shape>& shared) {
  const int G = a.heads.value();
  barrier_expect(&shared.q_full, a.tile_tokens * G * Shape::kPanels * kPanelRowBytes);
  for (int token = 0; token < a.tile_tokens; token += a.box_tokens)
#pragma unroll
    for (int panel = 0; panel < Shape::kPanels; ++panel)
      copy_box(shared.q[panel] + token * G * kPanelRowBytes, a.q_map, panel * kPanel, tile.g * G,
               tile.first + token - a.lists.first_token, tile.b, &shared.q_full);
}

// Calls step(block, tokens) for each block that a token in the tile lists, in ascending order. tokens: how many tokens
// list it. All the warp's lanes call it.
template <int kWords, class Step>
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

// A loader, one warp: loads each step n's keys, values, or both into stage n % kStages. The stage still holds what was
// loaded for step n - kStages, so the loader first waits until that step's items no longer need it.
template <class Shape, bool kKeys, bool kValues>
__device__ __forceinline__ void load_steps(const ResidentRowsArgs& a, const TokenTile& tile, Shared<Shape>& shared) {
  constexpr int kStages = Shape::kStages;
  const int lane = threadIdx.x % 32, G = a.heads.value();
  Barrier* const done = kValues ? shared.item_done : shared.k_done;
  Barrier* const full = kKeys ? shared.kv_full : shared.v_full;
  unsigned n = 0, item = 0;
  unsigned first = 0;  // lane i: the first item's number in the step that stage i is loaded for
  int items = 0;       // lane i: how many items that step has
  for_each_step<Shape::kWords>(shared.block_masks(), tile.blocks(), [&](int block, int tokens) {
    const int stage = n % kStages;
    const unsigned before = __shfl_sync(kFullWarp, first, stage) + lane;
    if (lane < __shfl_sync(kFullWarp, items, stage)) ring_wait(done, before);
    __syncwarp();
    if (lane == 0) {
      Barrier* const loaded = &full[n % kSlots];
      auto& [k, v] = shared.stage[stage];
      barrier_expect(loaded, (kKeys ? sizeof k : 0) + (kValues ? sizeof v : 0));
#pragma unroll
      for (int panel = 0; panel < Shape::kPanels; ++panel) {
        if (kKeys) copy_box(k[panel], a.k_map, panel * kPanel, block * kBlockKeys, tile.g, tile.b, loaded);
        if (kValues) copy_box(v[panel], a.v_map, panel * kPanel, block * kBlockKeys, tile.g, tile.b, loaded);
      }
    }
    const int own = ceil_div(tokens * G, kItemRows);
    if (lane == stage) first = item, items = own;
    item += own, ++n;
  });
}

// A lister, one warp: writes the items in every kListers-th step. There are several listers, each with its own number
// `lister` from 0 on, because the consumers would have to wait for a single one. After the last step, lister 0 writes
// one item without rows for each consumer warpgroup, which then stops.
template <class Shape>
__device__ __forceinline__ void list_items(const ResidentRowsArgs& a, const TokenTile& tile, Shared<Shape>& shared,
                                           unsigned lister) {
  static_assert(Shape::kStages * Shape::kStepItems <= kSlots && Shape::kStepItems < 8 &&
                Shape::kListers * Shape::kStepItems + Shape::kWarpgroups < kSlots);
  constexpr int kWords = Shape::kWords;
  const int lane = threadIdx.x % 32, G = a.heads.value();
  const unsigned* const masks = shared.block_masks();
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
  for_each_step<kWords>(masks, tile.blocks(), [&](int block, int tokens) {
    const int rows = tokens * G, items = ceil_div(rows, kItemRows);
    const unsigned n = step++;
    if (n % Shape::kListers != lister) {
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
      const int arrivals = row0 == 0 ? 1 + Shape::kStepItems - items : 1;
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
    for (int w = 0; w < Shape::kWarpgroups; ++w) write_item({}, [](Item&) {});
}

}  // namespace
}  // namespace triad::cuda
