// The attention branches' forward on Hopper (nsa/sm90/forward.cuh): the row tile that a CTA computes, its step plan,
// shared memory, and the producer warpgroup, in which one thread loads q, K and V by TMA and another stores o.
#pragma once
#include "kernels/hopper/tma.cuh"
#include "kernels/hopper/warpgroup.cuh"
#include "kernels/hopper/wgmma_ones.cuh"
#include "kernels/nsa/gpu/fwd_dq.cuh"

namespace triad::cuda {
namespace {

// The key range that each row sees (DocumentRange), with a precomputed divisor.
struct VisibleKeys {
  KeyRange range;
  Divisor d;
  // The keys [x, y) that token t in sequence b sees; none if y <= x. Both bounds grow with t. t may be past the
  // sequence's end. kPacked: whether rows are packed.
  template <bool kPacked>
  __device__ __forceinline__ int2 of(int b, int t) const {
    return seen(t, kPacked ? document_begin(b, t) : 0);
  }
  // Same as of() for four tokens that are equal in all the warp's lanes, which must all call it: the results are in
  // uniform registers. Their documents' beginnings are loaded at once, because each load would delay the tile.
  template <bool kPacked>
  __device__ __forceinline__ void warp_ranges(int b, const int (&t)[4], int2 (&seen_by)[4]) const {
    int begin = 0;
    if constexpr (kPacked) {
      const int lane = threadIdx.x % 32;
      begin = document_begin(b, lane == 0 ? t[0] : lane == 1 ? t[1] : lane == 2 ? t[2] : t[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      seen_by[i] = seen(t[i], kPacked ? static_cast<int>(uniform(__shfl_sync(kFullWarp, begin, i))) : 0);
  }

 private:
  __device__ __forceinline__ int document_begin(int b, int t) const {
    const int T = range.documents.T;
    return range.documents.begins[static_cast<int64_t>(b) * T + min(t, T - 1)];
  }
  __device__ __forceinline__ int2 seen(int t, int begin) const {
    const int first = d.quotient(begin), past = t + 1 - begin - range.l;
    return make_int2(max(first, t + 1 - range.window),
                     past < 0 ? first : min(range.keys, first + d.quotient(past) + 1));
  }
};

struct RowForwardArgs {
  CUtensorMap q_map, k_map, v_map, o_map;
  Attend<__nv_bfloat16> in;
  View<float> lse;
  VisibleKeys visible;
  int tiles, tile_tokens, all_tiles;  // tiles per sequence and group; tokens per tile; tiles in all sequences and
                                      // groups
  Divisor sequences_and_groups, groups;
};

// Tile sizes for heads (dk, dv). kKeys: keys per step; kStages: stages in the ring; kQueries: q tiles in shared memory.
template <int kDk_, int kDv_, int kKeys_, int kStages_, int kQueries_>
struct ForwardShape {
  static constexpr int kDk = kDk_, kDv = kDv_, kKeys = kKeys_, kStages = kStages_, kQueries = kQueries_;
  static constexpr int kWarpgroups = 3, kRowsCta = 64 * kWarpgroups, kThreads = kWarpgroup * (kWarpgroups + 1);
  static constexpr int kPanelsK = kDk / kPanel, kPanelsV = kDv / kPanel;
  static constexpr int kPanelBytes = kRowsCta * kPanelRowBytes, kKeyBytes = kKeys * kDk * 2,
                       kValueBytes = kKeys * kDv * 2;
  static_assert((kPanelBytes | kKeyBytes | kValueBytes) % 1024 == 0);  // all tiles in Shared are 1024-byte aligned
  struct Shared {
    unsigned char q[kQueries][kPanelsK][kPanelBytes];  // later holds o
    struct {
      unsigned char k[kKeyBytes], v[kValueBytes];
    } stage[kStages];
    unsigned char ones[kOnesBytes];
    // o_full: o has replaced q in the tile and can be stored
    Barrier q_full[kQueries], o_full[kQueries], q_empty[kQueries];
    Barrier k_full[kStages], v_full[kStages], kv_empty[kStages];
  };
};

// A position in a ring of kCount stages, and its barriers' phase parity.
template <int kCount>
struct PipelineState {
  int index = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void advance() {
    if (++index == kCount) index = 0, phase ^= 1;
  }
};

// Tile number `index`'s query rows: the rows [first, rows) in sequence b and group g, for the tokens [first_token,
// last_token].
struct CtaRows {
  int b, g, first, rows, first_token, last_token;
  __device__ __forceinline__ CtaRows(const RowForwardArgs& a, int index) {
    const int before = a.sequences_and_groups.quotient(index);
    const int bg = index - before * a.sequences_and_groups.value();
    b = a.groups.quotient(bg), g = bg - b * a.groups.value();
    // The last rows start first, because they see most keys.
    first_token = a.in.first_token + (a.tiles - 1 - before) * a.tile_tokens;
    last_token = min(first_token + a.tile_tokens, a.in.tokens) - 1;
    first = first_token * a.in.heads.value(), rows = (last_token + 1) * a.in.heads.value();
  }
};

// The tile that this CTA computes in a round. Every second round assigns the tiles to the CTAs in reverse order. Tiles
// become smaller from round to round, so this balances the CTAs.
__device__ __forceinline__ int tile_of_round(int round) {
  const int cta = blockIdx.x, ctas = gridDim.x;
  return round * ctas + (round % 2 == 0 ? cta : ctas - 1 - cta);
}

// A tile's plan: the steps over its keys, at most Shape::kKeys each.
//   steps                step count
//   first(n), end(n)     step n has the keys [first(n), end(n))
//   nothing_to_do(a, keys)  whether the CTA returns at once
//   kListed              rows have block lists
//   kMadeTogether        all the CTA's threads build one plan in shared memory, and the CTA computes one tile;
//                        otherwise each warp builds its own plan
//   bytes(keys)          the plan's size in shared memory, where it follows Shape::Shared
// For consumer warpgroup w's 64 rows, w a constructor argument (the producer uses steps and first() only):
//   steps_seen           no row sees a key in the steps from steps_seen on
//   sees(n)              false if no row sees a key in step n
//   needs_mask(n)        whether some row doesn't see all keys in step n
template <class Keys, class Shape>
class Plan;

// The keys for branches in which a token sees one range. kPacked: whether rows are packed (common/documents.h).
template <bool kPacked_>
struct RowRangeKeys {
  static constexpr bool kPacked = kPacked_;
  KeyRange range;
};

template <bool kPacked, class Shape>
class Plan<RowRangeKeys<kPacked>, Shape> {
 public:
  static constexpr bool kListed = false, kMadeTogether = false;
  static int64_t bytes(const RowRangeKeys<kPacked>&) { return 0; }
  static __device__ __forceinline__ bool nothing_to_do(const RowForwardArgs&, const RowRangeKeys<kPacked>&) {
    return false;
  }
  __device__ __forceinline__ Plan(const RowForwardArgs& a, const RowRangeKeys<kPacked>&, const CtaRows& tile, int w,
                                  unsigned char*) {
    // The tile's first and last token, and the warpgroup's.
    const int first_row = tile.first + 64 * w, last_row = min(first_row + 64, tile.rows) - 1;
    const int tokens[4] = {tile.first_token, tile.last_token, a.in.heads.quotient(first_row),
                           a.in.heads.quotient(max(last_row, 0))};
    int2 seen[4];
    a.visible.warp_ranges<kPacked>(tile.b, tokens, seen);
    begin_ = seen[0].x, end_ = seen[1].y, steps = steps_to(end_);
    if (first_row >= tile.rows) return;
    // The warpgroup's rows together see [the first's low, the last's high); the keys that all of them see are [the
    // last's low, the first's high).
    first_seen_ = (seen[2].x - begin_) / Shape::kKeys;
    first_whole_ = steps_to(seen[3].x);
    end_whole_ = max(0, seen[2].y - begin_) / Shape::kKeys;
    steps_seen = steps_to(seen[3].y);
  }
  __device__ __forceinline__ int first(int n) const { return begin_ + n * Shape::kKeys; }
  __device__ __forceinline__ int end(int) const { return end_; }
  __device__ __forceinline__ bool sees(int n) const { return n >= first_seen_; }
  __device__ __forceinline__ bool needs_mask(int n) const { return n < first_whole_ || n >= end_whole_; }

 private:
  __device__ __forceinline__ int steps_to(int end) const {
    return max(0, end - begin_ + Shape::kKeys - 1) / Shape::kKeys;
  }
  int begin_, end_, first_seen_ = 0, first_whole_ = 0, end_whole_ = 0;

 public:
  int steps, steps_seen = 0;
};

// Waits until TMA has read all the data that this thread told it to store, so that the shared memory may be
// overwritten.
__device__ __forceinline__ void await_stores_read() {
  bulk_commit();
  bulk_wait_read<0>();
}

template <class Shape, class Keys>
__device__ __forceinline__ void produce_tiles(const RowForwardArgs& a, const Keys& keys,
                                              typename Shape::Shared& shared) {
  constexpr int kKeys = Shape::kKeys, kStages = Shape::kStages;
  constexpr int kLoadThread = 0, kStoreThread = 32;  // two threads in different warps, because they wait for different
                                                     // barriers
  const int G = a.in.heads.value(), thread = threadIdx.x % kWarpgroup;
  PipelineState<Shape::kQueries> query;  // the position in q's ring, for the load thread or the store thread
  PipelineState<kStages> state;
  for (int round = 0, index; (index = tile_of_round(round)) < a.all_tiles; ++round) {
    const CtaRows tile(a, index);
    const Plan<Keys, Shape> plan(a, keys, tile, Plan<Keys, Shape>::kMadeTogether ? 0 : Shape::kWarpgroups,
                                 reinterpret_cast<unsigned char*>(&shared + 1));
    if (thread == kStoreThread) {
      barrier_wait(&shared.o_full[query.index], query.phase);
#pragma unroll
      for (int i = 0; i < Shape::kPanelsV; ++i)
        store_box(a.o_map, shared.q[query.index][i], kPanel * i, tile.g * G, tile.first_token - a.in.first_token,
                  tile.b);
      await_stores_read();
      barrier_arrive(&shared.q_empty[query.index]);
      query.advance();
    }
    if (thread != kLoadThread) continue;  // the other threads only help to build the plan
    // With one q tile in shared memory, the next q can be loaded only after o is stored. Keys and values for the next
    // tile's first steps are loaded before.
    const int query_turn = Shape::kQueries > 1 || round == 0 ? 0 : min(kStages, plan.steps);
#pragma unroll 1
    for (int n = 0; n <= plan.steps; ++n) {
      if (n == query_turn) {
        barrier_wait(&shared.q_empty[query.index], query.phase ^ 1);
        barrier_expect(&shared.q_full[query.index], Shape::kPanelsK * a.tile_tokens * G * kPanelRowBytes);
#pragma unroll
        for (int i = 0; i < Shape::kPanelsK; ++i)
          copy_box(shared.q[query.index][i], a.q_map, kPanel * i, tile.g * G, tile.first_token - a.in.first_token,
                   tile.b, &shared.q_full[query.index]);
        query.advance();
      }
      if (n == plan.steps) break;
      auto& stage = shared.stage[state.index];
      Barrier *const k_full = &shared.k_full[state.index], *const v_full = &shared.v_full[state.index];
      const int first = plan.first(n);
      barrier_wait(&shared.kv_empty[state.index], state.phase ^ 1);
      barrier_expect(k_full, Shape::kKeyBytes);
#pragma unroll
      for (int i = 0; i < Shape::kPanelsK; ++i)
        copy_box(stage.k + i * kKeys * kPanelRowBytes, a.k_map, kPanel * i, first, tile.g, tile.b, k_full);
      barrier_expect(v_full, Shape::kValueBytes);
#pragma unroll
      for (int i = 0; i < Shape::kPanelsV; ++i)
        copy_box(stage.v + i * kKeys * kPanelRowBytes, a.v_map, kPanel * i, first, tile.g, tile.b, v_full);
      state.advance();
    }
  }
}

}  // namespace
}  // namespace triad::cuda
