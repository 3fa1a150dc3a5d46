// Forward of the selected branch with resident rows (nsa/sm90/resident_rows.cu): the tile of tokens that a CTA
// computes, its shared memory, and the producer, which lists the tile's blocks and loads them.
#pragma once
#include <numbers>

#include "kernels/nsa/gpu/combine.cuh"
#include "kernels/nsa/sm90/forward.cuh"

namespace triad::cuda {
namespace {

constexpr int kBlockKeys = 64;      // keys of a block, which are those of a step
constexpr int kItemRows = 64;       // rows of an item
constexpr int kClusterTokens = 96;  // tokens of all CTAs of a cluster, at most
constexpr int kMostBlocks = 1024;   // blocks of a sequence, at most: shared memory has masks of all of them

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

// The sizes of a CTA for heads (d, d). kRows: rows of a tile, at most. kCtas: CTAs of a cluster, which have
// neighbouring tiles and load keys and values together. kWarpgroups: consumer warpgroups.
template <int kD_, int kRows_, int kStages_, int kCtas_, int kWarpgroups_>
struct ResidentRowsShape {
  static constexpr int kD = kD_, kRows = kRows_, kStages = kStages_, kCtas = kCtas_, kWarpgroups = kWarpgroups_;
  static constexpr int kConsumers = kWarpgroups * kWarpgroup, kThreads = kConsumers + 32;
  static constexpr int kPanels = kD / kPanel, kPanelBytes = kBlockKeys * kPanelRowBytes;
  static constexpr int kQueryPanelBytes = kRows * kPanelRowBytes;
  // A block's mask has a bit for each token of the CTA; in a cluster, the highest bit says whether a token of another
  // CTA lists the block.
  static constexpr int kTokens = kClusterTokens / kCtas, kWords = (kTokens + (kCtas > 1) + 31) / 32;
  static constexpr unsigned kOthers = 1u << 31;
  static_assert(kQueryPanelBytes % 1024 == 0 && kPanels % kCtas == 0);
  // A step: the tokens of this CTA that list its block.
  struct Step {
    int block, count;
    unsigned char tokens[kTokens];  // the first `count` are set, ascending, and counted from the tile's first token
  };
  struct Shared {
    unsigned char q[kPanels][kQueryPanelBytes];
    float o[kRows * kD];  // in the order of o_at()
    struct {
      unsigned char k[kPanels][kPanelBytes], v[kPanels][kPanelBytes];
    } stage[kStages];
    float2 sums[kRows];  // x: row_max, in powers of 2; y: the sum of 2^(scaled score - row_max)
    Barrier q_full, k_full[kStages], v_full[kStages], k_empty[kStages], v_empty[kStages];
    Step steps[kStages];  // the step of each stage; guarded by k_full, for which all lanes arrive, and k_empty
  };
  static_assert(sizeof(Shared) + kMostBlocks * kWords * sizeof(unsigned) <= 227 * 1024);
  static int64_t shared_bytes(int64_t blocks) {
    return static_cast<int64_t>(sizeof(Shared)) + blocks * kWords * static_cast<int64_t>(sizeof(unsigned));
  }
  static __device__ __forceinline__ unsigned* masks(Shared& shared) { return reinterpret_cast<unsigned*>(&shared + 1); }
  // The 16 columns [16 group, 16 group + 16) of a row of o: 64 bytes, of which lane c of four has the 16 bytes at 4 c,
  // in the order in which it has them in the sums of a product. Neighbouring rows have neighbouring groups exchanged,
  // so that they are in different banks.
  static __device__ __forceinline__ float4* o_at(Shared& shared, int row, int group) {
    const int c = threadIdx.x % 4;
    return reinterpret_cast<float4*>(shared.o + row * kD + ((group ^ (row & 3)) * 16 + c * 4));
  }
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
// The number of blocks that any token of the cluster lists. All threads of the CTA call it.
template <class Shape>
__device__ __forceinline__ int count_steps(const unsigned* masks, int blocks) {
  int steps = 0;
  for (int block0 = 0; block0 < blocks; block0 += Shape::kThreads) {
    const int block = block0 + static_cast<int>(threadIdx.x);
    unsigned any = 0;
#pragma unroll
    for (int w = 0; w < Shape::kWords; ++w) any |= block < blocks ? masks[block * Shape::kWords + w] : 0u;
    steps += __syncthreads_count(any != 0);
  }
  return steps;
}

// Loads the tile's q.
template <class Shape>
__device__ __forceinline__ void load_queries(const ResidentRowsArgs& a, const TokenTile& tile,
                                             typename Shape::Shared& shared) {
  if (tile.tokens == 0) return barrier_arrive(&shared.q_full);
  const int G = a.heads.value();
  barrier_expect(&shared.q_full, Shape::kPanels * a.tile_tokens * G * kPanelRowBytes);
#pragma unroll
  for (int i = 0; i < Shape::kPanels; ++i)
    copy_box(shared.q[i], a.q_map, kPanel * i, tile.g * G, tile.first - a.lists.first_token, tile.b, &shared.q_full);
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

// The producer: one warp lists the tokens of each step, in ascending order of blocks, and loads its keys and values.
template <class Shape>
__device__ __forceinline__ void produce_steps(const ResidentRowsArgs& a, const TokenTile& tile,
                                              typename Shape::Shared& shared) {
  constexpr int kWords = Shape::kWords;
  const int lane = threadIdx.x % 32, blocks = tile.blocks();
  const unsigned* const masks = Shape::masks(shared);
  PipelineState<Shape::kStages> state;
  for (int block0 = 0; block0 < blocks; block0 += 32) {
    unsigned any = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) any |= block0 + lane < blocks ? masks[(block0 + lane) * kWords + w] : 0u;
    for (unsigned left = __ballot_sync(kFullWarp, any != 0); left != 0; left &= left - 1) {
      const int block = block0 + __ffs(left) - 1;
      barrier_wait(&shared.k_empty[state.index], state.phase ^ 1);
      typename Shape::Step& step = shared.steps[state.index];
      int count = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        unsigned word = masks[block * kWords + w];
        if (Shape::kCtas > 1 && w == kWords - 1) word &= ~Shape::kOthers;
        if ((word >> lane & 1) != 0)
          step.tokens[count + __popc(word & ((1u << lane) - 1))] = static_cast<unsigned char>(32 * w + lane);
        count += __popc(word);
      }
      if (lane == 0) {
        step.block = block, step.count = count;
        load_panels<Shape>(shared.stage[state.index].k, a.k_map, tile, block, &shared.k_full[state.index]);
      } else {
        barrier_arrive(&shared.k_full[state.index]);  // this lane has written its tokens
      }
      // Lane 0 alone waits: a lane that waited more slowly could miss this phase and the next one, and wait forever.
      if (lane == 0) {
        barrier_wait(&shared.v_empty[state.index], state.phase ^ 1);
        load_panels<Shape>(shared.stage[state.index].v, a.v_map, tile, block, &shared.v_full[state.index]);
      }
      state.advance();
    }
  }
  __syncwarp();
}

}  // namespace
}  // namespace triad::cuda
