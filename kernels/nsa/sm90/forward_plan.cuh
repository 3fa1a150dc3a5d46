// Forward of the attention branches on Hopper: which tile of rows a CTA has, the steps that it takes with it, its plan,
// and the two threads that have the copy engine bring what they need and store what they found
// (nsa/sm90/forward.cuh).
#pragma once
#include "kernels/hopper/tma.cuh"
#include "kernels/hopper/wgmma_ones.cuh"
#include "kernels/nsa/gpu/fwd_dq.cuh"

namespace triad::cuda {
namespace {

// KeyRange with its division made ready.
struct SeenKeys {
  KeyRange range;
  Divisor d;
  __device__ __forceinline__ int low(int t) const { return range.low(t); }
  __device__ __forceinline__ int high(int t) const {
    const int past = t + 1 - range.l;
    return past < 0 ? 0 : min(range.keys, d.quotient(past) + 1);
  }
};

struct RowForwardArgs {
  CUtensorMap q_map, k_map, v_map, o_map;
  Attend<__nv_bfloat16> in;
  View<float> lse;
  SeenKeys sight;
  int tiles, tile_tokens, turns;  // tiles of a sequence and group, the tokens of each; tiles in all
  Divisor sequences_and_groups, groups;
};

// Tile sizes for heads (dk, dv): keys a step, stages, tiles whose q fit into shared memory.
template <int kDk_, int kDv_, int kKeys_, int kStages_, int kQueries_>
struct ForwardShape {
  static constexpr int kDk = kDk_, kDv = kDv_, kKeys = kKeys_, kStages = kStages_, kQueries = kQueries_;
  static constexpr int kWarpgroups = 3, kRowsCta = 64 * kWarpgroups, kThreads = kWarpgroup * (kWarpgroups + 1);
  static constexpr int kPanelsK = kDk / kPanel, kPanelsV = kDv / kPanel;
  static constexpr int kPanelBytes = kRowsCta * kPanelRowBytes, kKeyBytes = kKeys * kDk * 2,
                       kValueBytes = kKeys * kDv * 2;
  static_assert((kPanelBytes | kKeyBytes | kValueBytes) % 1024 == 0);  // so all tiles of Shared begin at such multiples
  struct Shared {
    unsigned char q[kQueries][kPanelsK][kPanelBytes];  // later o
    struct {
      unsigned char k[kKeyBytes], v[kValueBytes];
    } stage[kStages];
    unsigned char ones[kOnesBytes];
    Barrier query_came[kQueries], sums_came[kQueries], query_free[kQueries];  // sums: o, in the place of q
    Barrier keys_came[kStages], values_came[kStages], stage_free[kStages];
  };
};

// A place in a ring of kCount, and the parity of its barriers' present phase.
template <int kCount>
struct Place {
  int at = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++at == kCount) at = 0, parity ^= 1;
  }
};

// The tokens [first_token, last_token] of one sequence b and group g, whose rows are [first, rows).
struct CtaRows {
  int b, g, first, rows, first_token, last_token;
  __device__ __forceinline__ CtaRows(const RowForwardArgs& a, int turn) {
    const int before = a.sequences_and_groups.quotient(turn);
    const int bg = turn - before * a.sequences_and_groups.value();
    b = a.groups.quotient(bg), g = bg - b * a.groups.value();
    first_token = (a.tiles - 1 - before) * a.tile_tokens;  // the last rows see most: they come first
    last_token = min(first_token + a.tile_tokens, a.in.tokens) - 1;
    first = first_token * a.in.heads.value(), rows = (last_token + 1) * a.in.heads.value();
  }
};

// The tile that this CTA takes in a round: every second round goes backwards, because the first tiles are the largest.
__device__ __forceinline__ int turn_of(int round) {
  const int cta = blockIdx.x, ctas = gridDim.x;
  return round * ctas + (round % 2 == 0 ? cta : ctas - 1 - cta);
}

// What a warpgroup's rows see: the keys that any and that all of them do.
struct WarpgroupSight {
  int low_any = 0, low_all = 0, high_any = 0, high_all = 0;
  __device__ __forceinline__ WarpgroupSight(const RowForwardArgs& a, const CtaRows& tile, int w) {
    const int first_row = tile.first + 64 * w;
    if (first_row >= tile.rows) return;
    const int first = a.in.heads.quotient(first_row), last = a.in.heads.quotient(min(first_row + 64, tile.rows) - 1);
    low_any = a.sight.low(first), low_all = a.sight.low(last);
    high_any = a.sight.high(last), high_all = a.sight.high(first);
  }
};

// A plan numbers the steps of a tile: step n has the keys first(n) .. end(n) - 1, of which it takes Shape::kKeys at
// most. A warpgroup passes all steps from steps_seen on, and of a listed plan those that none of its rows sees; a step
// of which some row sees only a part needs a mask. A plan is made by each warp for itself (w: its warpgroup; the
// copying one asks for steps and first alone, and has no rows), or together by all threads of a CTA, which then takes
// one tile. Where nothing_to_do(keys), a CTA ends at once.
template <class Keys, class Shape>
class Plan;
template <class Shape>
class Plan<RangeKeys, Shape> {
 public:
  static constexpr bool kListed = false, kMadeTogether = false;
  static int64_t bytes(const RangeKeys&) { return 0; }  // of shared memory
  static __device__ __forceinline__ bool nothing_to_do(const RangeKeys&) { return false; }
  __device__ __forceinline__ Plan(const RowForwardArgs& a, const RangeKeys&, const CtaRows& tile, int w, unsigned char*)
      : begin_(a.sight.low(tile.first_token)), end_(a.sight.high(tile.last_token)), steps(steps_to(end_)) {
    const WarpgroupSight sight(a, tile, w);
    first_seen_ = (sight.low_any - begin_) / Shape::kKeys;
    first_whole_ = steps_to(sight.low_all);
    end_whole_ = max(0, sight.high_all - begin_) / Shape::kKeys;
    steps_seen = steps_to(sight.high_any);
  }
  __device__ __forceinline__ int first(int n) const { return begin_ + n * Shape::kKeys; }
  __device__ __forceinline__ int end(int) const { return end_; }
  __device__ __forceinline__ bool sees(int n) const { return n >= first_seen_; }
  __device__ __forceinline__ bool sees_part(int n) const { return n < first_whole_ || n >= end_whole_; }

 private:
  __device__ __forceinline__ int steps_to(int end) const {
    return max(0, end - begin_ + Shape::kKeys - 1) / Shape::kKeys;
  }
  int begin_, end_, first_seen_, first_whole_, end_whole_;

 public:
  const int steps;
  int steps_seen;
};

// Until the engine has read all that this thread had it store: the memory may be written again.
__device__ __forceinline__ void await_stores_read() {
  bulk_commit();
  bulk_wait_read<0>();
}

template <class Shape, class Keys>
__device__ __forceinline__ void copy_tiles(const RowForwardArgs& a, const Keys& keys, typename Shape::Shared& shared) {
  constexpr int kKeys = Shape::kKeys, kStages = Shape::kStages;
  constexpr int kBringing = 0, kStoring = 32;  // of another warp: they wait for different things
  const int G = a.in.heads.value(), thread = threadIdx.x % kWarpgroup;
  Place<Shape::kQueries> query;  // either's
  Place<kStages> place;
  for (int round = 0, turn; (turn = turn_of(round)) < a.turns; ++round) {
    const CtaRows tile(a, turn);
    const Plan<Keys, Shape> plan(a, keys, tile, Plan<Keys, Shape>::kMadeTogether ? 0 : Shape::kWarpgroups,
                                 reinterpret_cast<unsigned char*>(&shared + 1));
    if (thread == kStoring) {
      barrier_wait(&shared.sums_came[query.at], query.parity);
#pragma unroll
      for (int i = 0; i < Shape::kPanelsV; ++i)
        store_box(a.o_map, shared.q[query.at][i], kPanel * i, tile.g * G, tile.first_token, tile.b);
      await_stores_read();
      barrier_arrive(&shared.query_free[query.at]);
      query.advance();
    }
    if (thread != kBringing) continue;  // all of them make the plan
    // A second tile's q may have to wait until the first is stored: its first keys and values need not.
    const int query_turn = Shape::kQueries > 1 || round == 0 ? 0 : min(kStages, plan.steps);
#pragma unroll 1
    for (int n = 0; n <= plan.steps; ++n) {
      if (n == query_turn) {
        barrier_wait(&shared.query_free[query.at], query.parity ^ 1);
        barrier_expect(&shared.query_came[query.at], Shape::kPanelsK * a.tile_tokens * G * kPanelRowBytes);
#pragma unroll
        for (int i = 0; i < Shape::kPanelsK; ++i)
          copy_box(shared.q[query.at][i], a.q_map, kPanel * i, tile.g * G, tile.first_token, tile.b,
                   &shared.query_came[query.at]);
        query.advance();
      }
      if (n == plan.steps) break;
      auto& stage = shared.stage[place.at];
      Barrier *const keys_came = &shared.keys_came[place.at], *const values_came = &shared.values_came[place.at];
      const int first = plan.first(n);
      barrier_wait(&shared.stage_free[place.at], place.parity ^ 1);
      barrier_expect(keys_came, Shape::kKeyBytes);
#pragma unroll
      for (int i = 0; i < Shape::kPanelsK; ++i)
        copy_box(stage.k + i * kKeys * kPanelRowBytes, a.k_map, kPanel * i, first, tile.g, tile.b, keys_came);
      barrier_expect(values_came, Shape::kValueBytes);
#pragma unroll
      for (int i = 0; i < Shape::kPanelsV; ++i)
        copy_box(stage.v + i * kKeys * kPanelRowBytes, a.v_map, kPanel * i, first, tile.g, tile.b, values_came);
      place.advance();
    }
  }
}

}  // namespace
}  // namespace triad::cuda
