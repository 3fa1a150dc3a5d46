// Forward of the selected branch with resident rows (nsa/sm90/resident_rows.cu): the tile of tokens that a CTA
// computes, its shared memory, and the two producer warps: one loads keys and values, the other lists the items.
#pragma once
#include <numbers>

#include "kernels/nsa/gpu/combine.cuh"
#include "kernels/nsa/sm90/forward.cuh"

namespace triad::cuda {
namespace {

constexpr int kBlockKeys = 64;  // keys of a block, which are those of a step
constexpr int kItemRows = 64;   // rows of an item
constexpr int kQueryBox = 192;  // tokens that one TMA copy of q has, at most; the copy engine allows 256

struct ResidentRowsArgs {
  CUtensorMap q_map, k_map, v_map;
  View<__nv_bfloat16> o;
  View<float> lse;
  CombineRows combine;
  BlockLists lists;
  Divisor n, heads, sequences_and_groups;
  int tile_tokens;  // tokens per CTA
  int clusters;     // per sequence and group
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

// The sizes of a CTA for heads (d, d). kRows, kTokens: rows and tokens of a tile, at most. kCtas: CTAs of a cluster,
// which have neighbouring tiles and load keys and values together. kWarpgroups: consumer warpgroups.
template <int kD_, int kRows_, int kTokens_, int kStages_, int kCtas_, int kWarpgroups_>
struct ResidentRowsShape {
  static constexpr int kD = kD_, kRows = kRows_, kTokens = kTokens_, kStages = kStages_, kCtas = kCtas_;
  static constexpr int kWarpgroups = kWarpgroups_, kConsumers = kWarpgroups * kWarpgroup, kThreads = kConsumers + 64;
  static constexpr int kPanels = kD / kPanel, kPanelBytes = kBlockKeys * kPanelRowBytes;
  static constexpr int kQueryPanelBytes = kRows * kPanelRowBytes;
  // A block's mask has a bit for each token of the CTA; in a cluster, the highest bit says whether a token of another
  // CTA lists the block.
  static constexpr int kWords = (kTokens + (kCtas > 1) + 31) / 32;
  static constexpr unsigned kOthers = kCtas > 1 ? 1u << 31 : 0;
  // The slots of the ring of items. Loads have as many barriers, step n those of number n % kSlots: a barrier tells
  // apart only a phase and the next one, and each step has an item, so no warp waits for a phase when an earlier one is
  // not complete. The producer waits for the items of kStages steps ago, so their slots must not have other items yet.
  static constexpr int kSlots = 32;
  static_assert(kStages * kRows <= kSlots * kItemRows);
  static_assert(kQueryPanelBytes % 1024 == 0 && kPanels % kCtas == 0 && kCtas <= 2 && kStages <= kSlots);
  // An item: up to 64 rows of the tile, whose tokens list the block that begins at first_key.
  struct alignas(16) Item {
    int first_key, step;
    int count;              // rows; negative: there are no more items
    short rows[kItemRows];  // ascending; those past `count` are ~r, where r is the last row, or 0
  };
  struct Shared {
    unsigned char q[kPanels][kQueryPanelBytes];
    float o[kRows * kD];  // in the order of o_at()
    struct {
      unsigned char k[kPanels][kPanelBytes], v[kPanels][kPanelBytes];
    } stage[kStages];
    Item items[kSlots];
    float2 sums[kRows];     // x: the maximum M of resident_rows.cu; y: the sum L
    float base[kRows];      // -inf before the row's first item
    short tokens[kTokens];  // the tokens that list the block whose items are written
    Barrier q_full, k_full[kSlots], v_full[kSlots];
    Barrier k_peer[kStages], v_peer[kStages];  // the cluster's other CTA does not need what this stage has any more
    // item_full: the item is written. k_done: its block's keys are read; v_done: its values too, and the item.
    // base_set: its rows have bases; merged: they have its sums.
    Barrier item_full[kSlots], k_done[kSlots], v_done[kSlots], base_set[kSlots], merged[kSlots];
  };
  static constexpr int64_t kMostBlocks =
      (227 * 1024 - static_cast<int64_t>(sizeof(Shared))) / (kWords * static_cast<int64_t>(sizeof(unsigned)));
  static int64_t shared_bytes(int64_t blocks) {
    return static_cast<int64_t>(sizeof(Shared)) + blocks * kWords * static_cast<int64_t>(sizeof(unsigned));
  }
  static __device__ __forceinline__ unsigned* masks(Shared& shared) { return reinterpret_cast<unsigned*>(&shared + 1); }
  // The 16 columns [16 group, 16 group + 16) of a row of o are 64 bytes, of which lane c of four has the 16 bytes at 4
  // c, in the order in which it has them in the sums of a product. Neighbouring rows have neighbouring groups
  // exchanged, so that they are in different banks. o_address: of this lane's part of group 0; o_group: of any other,
  // from it.
  static __device__ __forceinline__ uint32_t o_address(Shared& shared, int row) {
    return shared_address(shared.o + row * kD + (row & 3) * 16 + threadIdx.x % 4 * 4);
  }
  static __device__ __forceinline__ uint32_t o_group(uint32_t address, int group) { return address ^ group << 6; }
};

// The tokens [first, first + tokens) of sequence b and group g, which this CTA computes, and the last token of its
// cluster. The tiles of the last tokens, which see most keys, start first. `tokens` may be 0 in a cluster.
struct TokenTile {
  int b, g, rank, cluster_first, cluster_last, first, tokens;
  __device__ __forceinline__ TokenTile(const ResidentRowsArgs& a, int ctas) {
    const int cluster = static_cast<int>(blockIdx.x) / ctas, before = a.sequences_and_groups.quotient(cluster);
    const int bg = cluster - before * a.sequences_and_groups.value();
    rank = static_cast<int>(blockIdx.x) % ctas;
    b = bg / a.lists.groups, g = bg - b * a.lists.groups;
    cluster_first = a.lists.first_token + (a.clusters - 1 - before) * ctas * a.tile_tokens;
    cluster_last = min(cluster_first + ctas * a.tile_tokens, a.lists.tokens) - 1;
    first = cluster_first + rank * a.tile_tokens;
    tokens = max(0, min(a.tile_tokens, a.lists.tokens - first));
  }
  __device__ __forceinline__ int blocks() const { return cluster_last / kBlockKeys + 1; }
};

// Sets the masks of the blocks. All threads of the CTA call it; the masks must be zero before. Blocks that begin after
// their token are left out, and so is the -1 that fills up a list.
template <class Shape>
__device__ __forceinline__ void read_lists(const ResidentRowsArgs& a, const TokenTile& tile, unsigned* masks) {
  const int entries = (tile.cluster_last + 1 - tile.cluster_first) * a.n.value();
  const int* const lists = a.lists.at(tile.b, tile.cluster_first, tile.g);
  for (int i = threadIdx.x; i < entries; i += Shape::kThreads) {
    const int token = a.n.quotient(i);
    const int block = __ldg(lists + token * a.lists.row + i - token * a.n.value());
    if (block < 0 || block * kBlockKeys > tile.cluster_first + token) continue;
    const int own = token - tile.rank * a.tile_tokens;
    const bool is_own = 0 <= own && own < tile.tokens;
    atomicOr(masks + block * Shape::kWords + (is_own ? own / 32 : Shape::kWords - 1),
             is_own ? 1u << own % 32 : Shape::kOthers);
  }
}

// Loads the tile's q.
template <class Shape>
__device__ __forceinline__ void load_queries(const ResidentRowsArgs& a, const TokenTile& tile,
                                             typename Shape::Shared& shared) {
  if (tile.tokens == 0) return barrier_arrive(&shared.q_full);
  const int G = a.heads.value(), box = min(a.tile_tokens, kQueryBox);
  barrier_expect(&shared.q_full, Shape::kPanels * a.tile_tokens * G * kPanelRowBytes);
  for (int i = 0; i < Shape::kPanels; ++i)
    for (int token = 0; token < a.tile_tokens; token += box)
      copy_box(shared.q[i] + token * G * kPanelRowBytes, a.q_map, kPanel * i, tile.g * G,
               tile.first - a.lists.first_token + token, tile.b, &shared.q_full);
}

// Loads the panels of a block's keys or values. In a cluster, each CTA loads its share of the panels for all CTAs; a
// barrier waits for the panels of all.
template <class Shape>
__device__ __forceinline__ void load_panels(unsigned char (&to)[Shape::kPanels][Shape::kPanelBytes],
                                            const CUtensorMap& map, const TokenTile& tile, int block, Barrier* full) {
  barrier_expect(full, Shape::kPanels * Shape::kPanelBytes);
#pragma unroll
  for (int i = 0; i < Shape::kPanels / Shape::kCtas; ++i) {
    const int panel = i * Shape::kCtas + tile.rank;
    if constexpr (Shape::kCtas == 1)
      copy_box(to[panel], map, kPanel * panel, block * kBlockKeys, tile.g, tile.b, full);
    else
      copy_box_multicast(to[panel], map, kPanel * panel, block * kBlockKeys, tile.g, tile.b, full,
                         (1 << Shape::kCtas) - 1);
  }
}

// Calls step(block, tokens) for each block that any token of the cluster lists, in ascending order. tokens: how many of
// this CTA's tokens list it. All lanes of a warp call it.
template <class Shape, class Step>
__device__ __forceinline__ void for_each_step(const unsigned* masks, int blocks, Step&& step) {
  const int lane = threadIdx.x % 32;
  for (int block0 = 0; block0 < blocks; block0 += 32) {
    unsigned any = 0;
    int tokens = 0;
#pragma unroll
    for (int w = 0; w < Shape::kWords; ++w) {
      const unsigned word = block0 + lane < blocks ? masks[(block0 + lane) * Shape::kWords + w] : 0u;
      any |= word;
      tokens += __popc(w == Shape::kWords - 1 ? word & ~Shape::kOthers : word);
    }
    for (unsigned left = __ballot_sync(kFullWarp, any != 0); left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1;
      step(block0 + from, __shfl_sync(kFullWarp, tokens, from));
    }
  }
}
// The number of items of a step. A step without rows in this CTA has one, whose count is 0.
__device__ __forceinline__ int count_items(int rows) { return max(1, ceil_div(rows, kItemRows)); }

// The first producer warp: loads the keys and values of each step into the stage of the step kStages ago, when the
// items of that step are done, here and in the cluster's other CTA.
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
    const auto wait_for_stage = [&](Barrier* done, Barrier* peer) {
      if (waits) barrier_wait(&done[before % kSlots], before / kSlots & 1);
      __syncwarp();
      if (Shape::kCtas == 1 || n < kStages || lane > 0) return;
      barrier_arrive_at(&peer[stage], tile.rank ^ 1);
      barrier_wait(&peer[stage], (n / kStages & 1) ^ 1);
    };
    wait_for_stage(shared.k_done, shared.k_peer);
    if (lane == 0) load_panels<Shape>(shared.stage[stage].k, a.k_map, tile, block, &shared.k_full[full]);
    wait_for_stage(shared.v_done, shared.v_peer);
    if (lane == 0) load_panels<Shape>(shared.stage[stage].v, a.v_map, tile, block, &shared.v_full[full]);
    const int own = count_items(tokens * G);
    if (lane == stage) first = item, items = own;
    item += own, ++n;
  });
  __syncwarp();
}

// The second producer warp: writes the items.
template <class Shape>
__device__ __forceinline__ void list_items(const ResidentRowsArgs& a, const TokenTile& tile,
                                           typename Shape::Shared& shared) {
  constexpr int kWords = Shape::kWords, kSlots = Shape::kSlots;
  const int lane = threadIdx.x % 32, G = a.heads.value();
  const unsigned* const masks = Shape::masks(shared);
  int n = 0, item = 0;
  const auto wait_for_slot = [&] { barrier_wait(&shared.v_done[item % kSlots], (item / kSlots & 1) ^ 1); };
  for_each_step<Shape>(masks, tile.blocks(), [&](int block, int tokens) {
    int listed = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      unsigned word = masks[block * kWords + w];
      if (w == kWords - 1) word &= ~Shape::kOthers;
      if ((word >> lane & 1) != 0)
        shared.tokens[listed + __popc(word & ((1u << lane) - 1))] = static_cast<short>(32 * w + lane);
      listed += __popc(word);
    }
    __syncwarp();
    const int rows = tokens * G, items = count_items(rows);
    for (int i = 0; i < items; ++i, ++item) {
      wait_for_slot();
      typename Shape::Item& to = shared.items[item % kSlots];
#pragma unroll
      for (int j = lane; j < kItemRows; j += 32) {
        const int index = i * kItemRows + j, last = max(0, min(index, rows - 1)), place = a.heads.quotient(last);
        const int row = rows == 0 ? 0 : shared.tokens[place] * G + last - place * G;
        to.rows[j] = static_cast<short>(index < rows ? row : ~row);
      }
      if (lane == 0) to.first_key = block * kBlockKeys, to.count = min(kItemRows, rows - i * kItemRows), to.step = n;
      barrier_arrive(&shared.item_full[item % kSlots]);  // each lane has written its part
    }
    __syncwarp();  // all lanes have read the tokens
    ++n;
  });
  for (int w = 0; w < Shape::kWarpgroups; ++w, ++item) {
    wait_for_slot();
    if (lane == 0) shared.items[item % kSlots].count = -1;
    barrier_arrive(&shared.item_full[item % kSlots]);
  }
  __syncwarp();
}

}  // namespace
}  // namespace triad::cuda
