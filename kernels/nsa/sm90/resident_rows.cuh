// Forward of the selected branch with resident rows (nsa/sm90/resident_rows.cu): the tile of tokens that a CTA
// computes, its shared memory, and the two producer warps: one loads keys and values, the other lists the items.
#pragma once
#include <numbers>

#include "kernels/nsa/gpu/combine.cuh"
#include "kernels/nsa/sm90/forward.cuh"
#include "kernels/nsa/sm90/kv_stationary_share.cuh"

namespace triad::cuda {
namespace {

constexpr int kBlockKeys = 64;  // keys of a block, which are those of a step
constexpr int kItemRows = 64;   // rows of an item

struct ResidentRowsArgs {
  CUtensorMap q_map, k_map, v_map;
  View<__nv_bfloat16> o;
  View<float> lse;
  CombineRows combine;
  BlockLists lists;
  KvStationaryShare share;  // the tokens that the kernel computes, if it has a decision; otherwise all
  Divisor n, heads, sequences_and_groups;
  int tile_tokens;  // tokens per CTA
  int tiles;        // per sequence and group
  float scale_log2;
};

__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_shared(uint32_t address, const float4& x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

// The sizes of a CTA for heads (d, d). kRows, kTokens: rows and tokens of a tile, at most. kWarpgroups: consumer
// warpgroups.
template <int kD_, int kRows_, int kTokens_, int kStages_, int kWarpgroups_>
struct ResidentRowsShape {
  static constexpr int kD = kD_, kRows = kRows_, kTokens = kTokens_, kStages = kStages_, kWarpgroups = kWarpgroups_;
  static constexpr int kConsumers = kWarpgroups * kWarpgroup, kThreads = kConsumers + 64;
  static constexpr int kPanels = kD / kPanel, kPanelBytes = kBlockKeys * kPanelRowBytes;
  static constexpr int kQueryPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kWords = (kTokens + 31) / 32;  // a block's mask has a bit for each token
  // The slots of the ring of items, which must hold those of kStages steps: the loader waits for the items of the step
  // kStages ago. k_full and v_full have kSlots barriers too, and step n uses number n % kSlots. With one for each
  // stage, a consumer could wait there before the stage's previous load is complete, and a wait for the next phase but
  // one returns at once.
  static constexpr int kSlots = 32;
  static_assert(kStages * ceil_div(kRows, kItemRows) <= kSlots);
  static_assert(kQueryPanelBytes % 1024 == 0 && kStages <= kSlots);
  // An item: up to 64 rows of the tile, whose tokens list the block that begins at first_key.
  struct alignas(16) Item {
    int first_key, step;
    int count;  // rows; 0: there are no more items
    // The numbers of the first items of the previous step and of this step.
    int previous_first, first;
    short rows[kItemRows];  // ascending; those past `count` are ~r, where r is the last row
  };
  struct Shared {
    unsigned char q[kPanels][kQueryPanelBytes];
    float o[kRows * kD];  // in the order of o_address()
    struct {
      unsigned char k[kPanels][kPanelBytes], v[kPanels][kPanelBytes];
    } stage[kStages];
    Item items[kSlots];
    float2 sums[kRows];     // x: M, y: L (resident_rows.cu)
    float base[kRows];      // -inf before the row's first item
    short tokens[kTokens];  // the tokens that list the block whose items are written
    Barrier q_full, k_full[kSlots], v_full[kSlots];
    // item_full: the item is written. k_done: its block's keys are read; v_done: its values too, and the item.
    // base_set: its rows have bases; merged: they have its sums.
    Barrier item_full[kSlots], k_done[kSlots], v_done[kSlots], base_set[kSlots], merged[kSlots];
  };
  static constexpr int64_t kMostBlocks = 512;  // whose masks fit
  static_assert(sizeof(Shared) + kMostBlocks * kWords * sizeof(unsigned) <= 227 * 1024);
  static int64_t shared_bytes(int64_t blocks) {
    return static_cast<int64_t>(sizeof(Shared)) + blocks * kWords * static_cast<int64_t>(sizeof(unsigned));
  }
  static __device__ __forceinline__ unsigned* masks(Shared& shared) { return reinterpret_cast<unsigned*>(&shared + 1); }
  // The columns [16 g, 16 g + 16) of a row of o, group g, are 64 bytes. Lane c of four has the 16 bytes from 16 c on,
  // in the order in which it has them in the sums of a product. Neighbouring rows have groups exchanged, so that they
  // are in different banks. o_address: the address of this lane's part of group 0; o_group: of another group, from it.
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

// Sets the masks of the blocks. All threads of the CTA call it; the masks must be zero before. Blocks that begin after
// their token are left out, and so is the -1 that fills up a list.
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

// Calls step(block, tokens) for each block that any token lists, in ascending order. tokens: how many list it. All
// lanes of a warp call it.
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

// The first producer warp: loads the keys and values of each step into the stage of the step kStages ago, when the
// items of that step have read what it has.
template <class Shape>
__device__ __forceinline__ void load_steps(const ResidentRowsArgs& a, const TokenTile& tile,
                                           typename Shape::Shared& shared) {
  constexpr int kStages = Shape::kStages, kSlots = Shape::kSlots;
  const int lane = threadIdx.x % 32, G = a.heads.value();
  int n = 0, item = 0;
  int first = 0, items = 0;  // lane i: the items of the last step that stage i has had
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

// The second producer warp: writes the items.
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
