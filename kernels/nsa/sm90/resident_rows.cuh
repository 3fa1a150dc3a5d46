// Forward of the selected branch with resident rows (nsa/sm90/resident_rows.cu explains tiles, steps, items and sums):
// the tile of a CTA, its shared memory, and the two producer warps. One loads keys and values, the other lists the
// items.
#pragma once
#include <numbers>

#include "kernels/nsa/gpu/combine.cuh"
#include "kernels/nsa/sm90/forward.cuh"
#include "kernels/nsa/sm90/kv_stationary_share.cuh"

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
  KvStationaryShare share;  // if share.all is set, it says whether the kernel computes all tokens or none; if not, all
  Divisor n, heads, sequences_and_groups;
  int tile_tokens;  // tokens per CTA
  int tiles;        // per sequence and group
  float scale_log2;
};

// The sizes of a CTA for heads (d, d). kRows, kTokens: rows and tokens of a tile, at most. kWarpgroups: consumer
// warpgroups.
template <int kD_, int kRows_, int kTokens_, int kStages_, int kWarpgroups_>
struct ResidentRowsShape {
  static constexpr int kD = kD_, kRows = kRows_, kTokens = kTokens_, kStages = kStages_, kWarpgroups = kWarpgroups_;
  static constexpr int kConsumers = kWarpgroups * kWarpgroup, kThreads = kConsumers + 64;
  static constexpr int kPanels = kD / kPanel, kPanelBytes = kBlockKeys * kPanelRowBytes;
  static constexpr int kQueryPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kWords = (kTokens + 31) / 32;  // a block's mask has a bit for each token
  // The length of the ring of items. Before the loader fills a stage again, it waits for the items of the step that
  // used the stage before, kStages steps ago. Until then their slots must not be reused, so the ring holds kStages
  // steps.
  //
  // k_full and v_full are rings of the same length: step n uses barrier n % kSlots. A barrier for each stage would not
  // do: a consumer can be ahead of the loads by more than kStages steps. It would then wait for a phase of the barrier
  // while the phase before is still incomplete, and such a wait returns at once.
  static constexpr int kSlots = 32;
  static_assert(kStages * ceil_div(kRows, kItemRows) <= kSlots);
  static_assert(kQueryPanelBytes % 1024 == 0 && kStages <= kSlots);
  // An item: up to 64 rows of the tile whose tokens list the block that begins at key first_key.
  struct alignas(16) Item {
    int first_key, step;
    int count;                  // rows; 0: there are no more items
    int previous_first, first;  // the numbers of the first items of the previous step and of this step
    short rows[kItemRows];      // ascending; from `count` on ~r, where r is the last row
  };
  struct Shared {
    unsigned char q[kPanels][kQueryPanelBytes];
    float o[kRows * kD];  // in the order of o_address()
    struct {
      unsigned char k[kPanels][kPanelBytes], v[kPanels][kPanelBytes];
    } stage[kStages];
    Item items[kSlots];
    float2 sums[kRows];     // x: the exponent M of a row, y: its sum L
    float base[kRows];      // the base b of a row; -inf before its first item
    short tokens[kTokens];  // the tokens that list the block whose items list_items() writes
    Barrier q_full, k_full[kSlots], v_full[kSlots];
    // The barriers of an item complete when
    //   item_full: the producer has written the item;
    //   k_done:    the consumers have read the keys of its block;
    //   v_done:    the consumers have read the values of its block, and the item itself;
    //   base_set:  each of its rows has a base;
    //   merged:    its sums are added to those of its rows.
    Barrier item_full[kSlots], k_done[kSlots], v_done[kSlots], base_set[kSlots], merged[kSlots];
  };
  static constexpr int64_t kMostBlocks = 512;  // of a sequence; shared memory has a mask for each
  static_assert(sizeof(Shared) + kMostBlocks * kWords * sizeof(unsigned) <= 227 * 1024);
  static int64_t shared_bytes(int64_t blocks) {
    return static_cast<int64_t>(sizeof(Shared)) + blocks * kWords * static_cast<int64_t>(sizeof(unsigned));
  }
  static __device__ __forceinline__ unsigned* masks(Shared& shared) { return reinterpret_cast<unsigned*>(&shared + 1); }
  // A row of o consists of groups of 16 columns, 64 bytes each. Four lanes share a row: lane c has bytes [16 c, 16 c +
  // 16) of each group, the four columns that it has in the sums of a product (wgmma.cuh). The groups of a row are
  // permuted, differently in neighbouring rows, so that these are in different banks. o_address: the address of this
  // lane's part of group 0 of a row. o_group: the address of the same part of `group`.
  static __device__ __forceinline__ uint32_t o_address(Shared& shared, int row) {
    return shared_address(shared.o + row * kD + (row & 3) * 16 + threadIdx.x % 4 * 4);
  }
  static __device__ __forceinline__ uint32_t o_group(uint32_t address, int group) { return address ^ group << 6; }
};

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
template <class Shape>
__device__ __forceinline__ void read_lists(const ResidentRowsArgs& a, const TokenTile& tile, unsigned* masks) {
  const int entries = tile.tokens * a.n.value();
  const int* const lists = a.lists.at(tile.b, tile.first, tile.g);
  for (int i = threadIdx.x; i < entries; i += Shape::kThreads) {
    const int token = a.n.quotient(i);
    const int block = __ldg(lists + token * a.lists.row + i - token * a.n.value());
    if (block >= 0 && block * kBlockKeys <= tile.first + token)
      atomicOr(masks + block * Shape::kWords + token / 32, 1u << token % 32);
  }
}

// Loads the tile's q.
template <class Shape>
__device__ __forceinline__ void load_queries(const ResidentRowsArgs& a, const TokenTile& tile,
                                             typename Shape::Shared& shared) {
  const int G = a.heads.value();
  barrier_expect(&shared.q_full, Shape::kPanels * a.tile_tokens * G * kPanelRowBytes);
#pragma unroll
  for (int i = 0; i < Shape::kPanels; ++i)
    copy_box(shared.q[i], a.q_map, kPanel * i, tile.g * G, tile.first - a.lists.first_token, tile.b, &shared.q_full);
}

// Loads the panels of a block's keys or values.
template <class Shape>
__device__ __forceinline__ void load_panels(unsigned char (&to)[Shape::kPanels][Shape::kPanelBytes],
                                            const CUtensorMap& map, const TokenTile& tile, int block, Barrier* full) {
  barrier_expect(full, Shape::kPanels * Shape::kPanelBytes);
#pragma unroll
  for (int i = 0; i < Shape::kPanels; ++i) copy_box(to[i], map, kPanel * i, block * kBlockKeys, tile.g, tile.b, full);
}

// Calls step(block, tokens) for each block that a token of the tile lists, in ascending order. tokens: the number of
// tokens that list it. All lanes of a warp call it.
template <class Shape, class Step>
__device__ __forceinline__ void for_each_step(const unsigned* masks, int blocks, Step&& step) {
  const int lane = threadIdx.x % 32;
  for (int block0 = 0; block0 < blocks; block0 += 32) {
    int tokens = 0;
    if (block0 + lane < blocks)
#pragma unroll
      for (int w = 0; w < Shape::kWords; ++w) tokens += __popc(masks[(block0 + lane) * Shape::kWords + w]);
    for (unsigned left = __ballot_sync(kFullWarp, tokens != 0); left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1;
      step(block0 + from, __shfl_sync(kFullWarp, tokens, from));
    }
  }
}

// The first producer warp: loads the keys and values of each step. Step n uses stage n % kStages, as step n - kStages
// did, and waits until the items of that step have read their keys, and then their values.
template <class Shape>
__device__ __forceinline__ void load_steps(const ResidentRowsArgs& a, const TokenTile& tile,
                                           typename Shape::Shared& shared) {
  constexpr int kStages = Shape::kStages, kSlots = Shape::kSlots;
  const int lane = threadIdx.x % 32, G = a.heads.value();
  int n = 0, item = 0;
  int first = 0, items = 0;  // in lane i: number of the first item, and number of items, of the last step in stage i
  for_each_step<Shape>(Shape::masks(shared), tile.blocks(), [&](int block, int tokens) {
    const int stage = n % kStages, full = n % kSlots;
    const int before = __shfl_sync(kFullWarp, first, stage) + lane;
    const bool waits = lane < __shfl_sync(kFullWarp, items, stage);
    if (waits) barrier_wait(&shared.k_done[before % kSlots], before / kSlots & 1);
    __syncwarp();
    if (lane == 0) load_panels<Shape>(shared.stage[stage].k, a.k_map, tile, block, &shared.k_full[full]);
    if (waits) barrier_wait(&shared.v_done[before % kSlots], before / kSlots & 1);
    __syncwarp();
    if (lane == 0) load_panels<Shape>(shared.stage[stage].v, a.v_map, tile, block, &shared.v_full[full]);
    const int own = ceil_div(tokens * G, kItemRows);
    if (lane == stage) first = item, items = own;
    item += own, ++n;
  });
}

// The second producer warp: writes the items of each step, and after the last one an item without rows for each
// consumer warpgroup.
template <class Shape>
__device__ __forceinline__ void list_items(const ResidentRowsArgs& a, const TokenTile& tile,
                                           typename Shape::Shared& shared) {
  constexpr int kWords = Shape::kWords, kSlots = Shape::kSlots;
  const int lane = threadIdx.x % 32, G = a.heads.value();
  const unsigned* const masks = Shape::masks(shared);
  int n = 0, item = 0, previous_first = 0;
  const auto wait_for_slot = [&] { barrier_wait(&shared.v_done[item % kSlots], (item / kSlots & 1) ^ 1); };
  for_each_step<Shape>(masks, tile.blocks(), [&](int block, int tokens) {
    int listed = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const unsigned word = masks[block * kWords + w];
      if ((word >> lane & 1) != 0)
        shared.tokens[listed + __popc(word & ((1u << lane) - 1))] = static_cast<short>(32 * w + lane);
      listed += __popc(word);
    }
    __syncwarp();
    const int rows = tokens * G, first = item;
    for (int row0 = 0; row0 < rows; row0 += kItemRows, ++item) {
      wait_for_slot();
      typename Shape::Item& to = shared.items[item % kSlots];
#pragma unroll
      for (int i = lane; i < kItemRows; i += 32) {
        const int index = min(row0 + i, rows - 1), place = a.heads.quotient(index);
        const int row = shared.tokens[place] * G + index - place * G;
        to.rows[i] = static_cast<short>(row0 + i < rows ? row : ~row);
      }
      if (lane == 0) {
        to.first_key = block * kBlockKeys, to.step = n, to.count = min(kItemRows, rows - row0);
        to.previous_first = previous_first, to.first = first;
      }
      barrier_arrive(&shared.item_full[item % kSlots]);  // each lane has written its part
    }
    __syncwarp();  // all lanes have read the tokens
    previous_first = first, ++n;
  });
  for (int w = 0; w < Shape::kWarpgroups; ++w, ++item) {
    wait_for_slot();
    if (lane == 0) shared.items[item % kSlots].count = 0;
    barrier_arrive(&shared.item_full[item % kSlots]);
  }
}

}  // namespace
}  // namespace triad::cuda
