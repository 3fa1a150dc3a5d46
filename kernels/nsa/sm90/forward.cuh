// The attention branches' forward on Hopper (bf16): each row (t, h) attends to a key range, or to listed blocks.
//
// A tile is as many tokens in one (sequence, group) as have at most 192 rows. Its plan (nsa/sm90/forward_plan.cuh)
// lists the KV tiles that any of its rows sees: its steps. A CTA is persistent, or computes one tile.
//
// Roles. Producer warpgroup: one thread loads q, and K and V into a stage ring, by TMA; another stores o. Three
// consumer warpgroups, 64 rows each: q stays in shared memory; scores, probabilities and sums are in registers:
//   s = q k^T;  p = 2^(scale s - row_max);  o += p v, with p packed as a left operand;  o / (rounded p, summed)
//   (hopper/wgmma_ones.cuh);  lse from unrounded p's sum.
// A consumer issues the next step's scores before this one's o += p v, so that the tensor cores work during its
// softmax. It leaves o in q's memory.
//
// row_max is the largest of the first scores that a row sees, times scale, and is then kept: p has a relative rounding
// error, so it may exceed 1. Only if a later step's powers exceed 2^60, that step's scores are recomputed and row_max
// is raised.
//
// Memory: per stage 64 keys and values; 6 stages and two q tiles at d = 64, see launch_forward_sm90. Registers: 160 per
// consumer thread, 32 per producer thread. Bound: issue slots and exponentials; tests/baselines/findings/forward.md
// has the figures.
#pragma once
#include "kernels/hopper/warpgroup.cuh"
#include "kernels/nsa/gpu/combine.cuh"
#include "kernels/nsa/sm90/forward_plan.cuh"

namespace triad::cuda {
namespace {

// A mask for the lowest n bits. n may be negative (then no bit) or above 32 (then all bits).
__device__ __forceinline__ unsigned bits_below(int n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

__device__ __forceinline__ void warpgroup_barrier(int w) { named_barrier_sync<kWarpgroup>(1 + w); }

// A lane adds up the powers 2^(score - maximum) that it has for a row in one step. Up to this sum, the powers in bf16
// and their products with the values are finite. If the sum is larger, the row is computed again with a larger maximum.
constexpr float kMostSum = 0x1p60f;

// Prefetches the other branches' output rows that combine_panel will read for a warpgroup.
template <int kPanelsV>
__device__ __forceinline__ void prefetch_others(const RowForwardArgs& a, const CombineRows& combine,
                                                const CtaRows& tile, int w) {
  const int row = tile.first + 64 * w + static_cast<int>(threadIdx.x) % 64, t = a.in.heads.quotient(row);
  if (row >= tile.rows) return;
  const int h = tile.g * a.in.heads.value() + row - t * a.in.heads.value();
  for (int panel = threadIdx.x % kWarpgroup / 64; panel < kPanelsV; panel += 2)
    combine.prefetch(tile.b, t, h, kPanel * panel);
}
// Computes the branches' gated sum for 64 columns in a warp's 16 rows. This branch's o is at `o` in shared memory, the
// others are in global memory. Eight lanes process a row, and four rows are in flight.
__device__ __forceinline__ void combine_panel(const RowForwardArgs& a, const CombineRows& combine, const CtaRows& tile,
                                              int w, int panel, const unsigned char* o) {
  const int chunk = threadIdx.x % 8, first = threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 8;
  const int column = kPanel * panel + 8 * chunk, G = a.in.heads.value();
  const auto row_of = [&](int i) {
    const int row = min(tile.first + 64 * w + first + 4 * i, tile.rows - 1), t = a.in.heads.quotient(row);
    return CombineRows::Row(combine, tile.b, t, tile.g * G + row - t * G, tile.g);
  };
  const CombineRows::Row rows[4] = {row_of(0), row_of(1), row_of(2), row_of(3)};
  CombineRows::Row::Others others[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) others[i] = rows[i].others(column);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (tile.first + 64 * w + first + 4 * i < tile.rows)
      rows[i].store(column, *reinterpret_cast<const uint4*>(o + swizzled(first + 4 * i, chunk)), others[i]);
}

// Computes all of a CTA's tiles; w is the consumer warpgroup's number. This is one function with lambdas: as a struct
// with members, the loops over skipped steps were not unrolled, and the forward was 2 to 4% slower
// (tests/baselines/findings/forward.md).
template <class Shape, class Keys>
__device__ __forceinline__ void consume_tiles(const RowForwardArgs& a, const Keys& keys, typename Shape::Shared& shared,
                                              int w) {
  constexpr int kKeys = Shape::kKeys, kStages = Shape::kStages, kPanelsV = Shape::kPanelsV;
  constexpr bool kListed = Plan<Keys, Shape>::kListed;
  const int G = a.in.heads.value(), lane = threadIdx.x % 32;
  const int row0 = 16 * (threadIdx.x % kWarpgroup / 32);
  using State = PipelineState<kStages>;
  State state, next_state;  // ring positions for the steps `now` and `next`
  const WarpgroupTurns<Shape::kWarpgroups> turns{w};
  turns.begin();
  for (int round = 0, index; (index = tile_of_round(round)) < a.all_tiles; ++round) {
    const CtaRows tile(a, index);
    int low[2], high[2];      // each of the lane's two rows sees the keys [low, high)
    unsigned token_bits = 0;  // each row's token, as its index within the CTA: 16 bits per row
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = a.in.heads.quotient(tile.first + 64 * w + row0 + fragment_row() + 8 * i);
      const int2 seen = a.visible.template of<Keys::kPacked>(tile.b, t);
      low[i] = seen.x, high[i] = seen.y;
      if constexpr (kListed) token_bits |= (t - tile.first_token) << 16 * i;
    }
    const Plan<Keys, Shape> plan(a, keys, tile, w, reinterpret_cast<unsigned char*>(&shared + 1));
    const int query = round % Shape::kQueries;
    unsigned char* const own_q = shared.q[query][0] + 64 * w * kPanelRowBytes;
    // ---- the ring ----
    // Releases a stage: this warp does not read it any more.
    const auto release = [&](const State& at) {
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.kv_empty[at.index]);
    };
    // Skips a step in which this warpgroup sees no key.
    const auto skip = [&](State& at) {
      turns.wait();
      turns.pass_on();
      barrier_wait(&shared.k_full[at.index], at.phase);
      barrier_wait(&shared.v_full[at.index], at.phase);
      release(at);
      at.advance();
    };

    // ---- products ----
    // State for the lane's rows. rounded: p rounded to bf16 and summed, by which o is divided. sum: this lane's share
    // of the sums over unrounded p, from which lse is computed. row_max: largest score, times scale. rescale: if
    // `moved`, the factor by which o and `rounded` shrink.
    float s[kKeys / 8][4], o[kPanelsV][8][4] = {}, rounded[1][4] = {};
    uint32_t p[kKeys / 16][4];
    float row_max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, rescale[2];
    const float scale = a.in.scale_log2();
    const uint32_t q_descriptor = tile_descriptor(shared_address(own_q));
    const auto multiply_scores = [&](const State& at) {
      const uint32_t k = tile_descriptor(shared_address(shared.stage[at.index].k));
      wgmma_begin<Major::k, Major::k>(s, q_descriptor, k);
#pragma unroll
      for (int i = 1; i < Shape::kDk / 16; ++i)
        wgmma<Major::k, Major::k>(s, q_descriptor + i / 4 * (Shape::kPanelBytes >> 4) + i % 4 * 2,
                                  k + i / 4 * (kKeys * kPanelRowBytes >> 4) + i % 4 * 2);
      wgmma_commit();
    };
    const auto multiply_values = [&](const State& at) {
      const uint32_t ones = shared_address(shared.ones);
      uint32_t v = shared_address(shared.stage[at.index].v);
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i, v += 16 * kPanelRowBytes) {
        wgmma_add_and_sum(o[0], rounded[0], p[i], v, ones);
#pragma unroll
        for (int panel = 1; panel < kPanelsV; ++panel)
          wgmma<Major::mn>(o[panel], p[i], tile_descriptor(v + panel * kKeys * kPanelRowBytes));
      }
      wgmma_commit();
    };
    const auto pin_sums = [&] {
#pragma unroll
      for (auto& panel : o) pin(panel);
      pin(rounded);
    };
    // Packs p, which is in s, as the next product's left operand. All products have to end first, because ptxas writes
    // no left operand while one runs.
    const auto pack = [&] {
      pin(s);
      wgmma_wait<0>();
      pin_sums();
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) pack_operand(p[i], s, i);
    };

    // ---- softmax ----
    // Sets scores to -inf for keys that row i doesn't see.
    const auto mask_row = [&](int n, int i) {
      const int first = plan.first(n) + fragment_column();
      const int from = low[i] - first, to = (kListed ? min(high[i], plan.end(n)) : high[i]) - first;
#pragma unroll
      for (int word = 0; word < kKeys / 32; ++word) {
        // Bit c is set if the row sees this lane's key 32 word + c.
        const unsigned visible = bits_below(to - 32 * word) & ~bits_below(from - 32 * word);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if ((visible & 1u << (8 * j + e)) == 0) s[4 * word + j][2 * i + e] = -INFINITY;
      }
    };
    // If `raise`, raises row i's row_max to its largest score. Sets rescale, the factor by which the row's previous
    // sums change.
    const auto update_max = [&](int i, bool raise) {
      float best = -INFINITY;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) best = fmaxf(best, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
      best = quad_max(best) * scale;
      const float higher = raise ? fmaxf(row_max[i], best) : row_max[i];
      rescale[i] = exp2_approx(higher == row_max[i] ? 0.0f : row_max[i] - higher);
      sum[i] *= rescale[i];
      row_max[i] = higher;
    };
    // Replaces row i's scores s by exp2(scale * s - minus), unless `keep` says that this is done. Returns this lane's
    // share of the row's sum.
    const auto exponentiate = [&](int i, float minus, bool keep) {
      float add[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[j][2 * i + e];
          const float power = exp2_approx(fmaf(x, scale, minus));
          x = keep ? x : power;
          add[e] += x;
        }
      return add[0] + add[1];
    };
    // Turns step n's scores into probabilities relative to row_max, the largest of the first scores that the row saw.
    // If a row's powers are huge, its scores are recomputed by mma.sync (the powers have replaced them) and its row_max
    // is raised. A row's result doesn't depend on other rows. moved: whether any row_max has changed in this step.
    bool all_have_max = false, moved;
    const auto softmax = [&](int n, auto is_first) {
      constexpr bool kFirst = decltype(is_first)::value;
      pin(s);
      bool listed[2] = {true, true};
      if constexpr (kListed) {
#pragma unroll
        for (int i = 0; i < 2; ++i) listed[i] = plan.lists(n, token_bits >> 16 * i & 0xffff);
      }
      if (plan.needs_mask(n)) mask_row(n, 0), mask_row(n, 1);
      moved = !all_have_max;
      if (kFirst || !all_have_max) {
#pragma unroll
        for (int i = 0; i < 2; ++i) update_max(i, listed[i] && row_max[i] == -INFINITY);
        all_have_max = __all_sync(kFullWarp, row_max[0] != -INFINITY && row_max[1] != -INFINITY);
      }
      float add[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        add[i] = exponentiate(i, listed[i] && row_max[i] != -INFINITY ? -row_max[i] : -INFINITY, false);
      // The warp's vote also keeps ptxas from moving the exponentials after the wait below; before it they overlap with
      // the last step's products. With a branch per lane instead of a vote, the loop's addresses would leave the
      // uniform registers (10% slower).
      if (!kFirst && __any_sync(kFullWarp, fmaxf(add[0], add[1]) > kMostSum)) {
        const bool over[2] = {quad_max(add[0]) > kMostSum, quad_max(add[1]) > kMostSum};
        const unsigned char* const k = shared.stage[next_state.index].k;
        const auto row_at = [](const unsigned char* at) { return reinterpret_cast<const __nv_bfloat16*>(at); };
#pragma unroll
        for (int j = 0; j < kKeys / 8; j += 2) {
          float again[2][4] = {};
#pragma unroll 1
          for (int i = 0; i < Shape::kDk / 16; ++i) {
            uint32_t left[4], right[4];
            load_matrices(
                left, row_at(own_q + i / 4 * Shape::kPanelBytes + swizzled(row0 + lane % 16, i % 4 * 2 + lane / 16)));
            load_matrices(right, row_at(k + i / 4 * kKeys * kPanelRowBytes +
                                        swizzled(8 * j + lane / 16 * 8 + lane % 8, i % 4 * 2 + lane / 8 % 2)));
            mma_m16n8k16(again[0], left, right[0], right[1]);
            mma_m16n8k16(again[1], left, right[2], right[3]);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float &x = s[j][e], &y = s[j + 1][e];
            x = over[e / 2] ? again[0][e] : x, y = over[e / 2] ? again[1][e] : y;
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (plan.needs_mask(n) && over[i]) mask_row(n, i);
          update_max(i, over[i]);
          add[i] = exponentiate(i, -row_max[i], !over[i]);
        }
        moved = true;
      }
      sum[0] += add[0], sum[1] += add[1];
    };
    if constexpr (kListed)
      if (keys.combine.active()) prefetch_others<kPanelsV>(a, keys.combine, tile, w);

    int now = 0;
    barrier_wait(&shared.q_full[query], round / Shape::kQueries & 1);
    for (; now < plan.steps_seen && !plan.sees(now); ++now) skip(state);
    if (now < plan.steps_seen) {
      barrier_wait(&shared.k_full[state.index], state.phase);
      turns.wait();
      wgmma_fence();
      multiply_scores(state);
      turns.pass_on();
      wgmma_wait<0>();
      softmax(now, std::true_type{});
      pack();
      for (int next = now + 1; next < plan.steps_seen; now = next++) {
        next_state = state;
        next_state.advance();
        // Skips steps in which this warpgroup sees no key, but only as far as their stages can be in the ring while
        // this warpgroup holds the stage for `now`. A later step is computed even if no key is visible, with all scores
        // masked.
        if constexpr (kListed)
          for (; !plan.sees(next) && next < now + kStages - 1; ++next) skip(next_state);
        barrier_wait(&shared.k_full[next_state.index], next_state.phase);
        turns.wait();
        wgmma_fence();
        multiply_scores(next_state);
        barrier_wait(&shared.v_full[state.index], state.phase);
        wgmma_fence();
        multiply_values(state);
        turns.pass_on();
        wgmma_wait<1>();
        softmax(next, std::false_type{});
        pack();
        release(state);
        state = next_state;
        if (moved) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            rounded[0][e] *= rescale[e / 2];
#pragma unroll
            for (int j = 0; j < Shape::kDv / 8; ++j) o[j / 8][j % 8][e] *= rescale[e / 2];
          }
        }
      }
      barrier_wait(&shared.v_full[state.index], state.phase);
      wgmma_fence();
      multiply_values(state);
      wgmma_wait<0>();
      pin_sums();
      release(state);
      state.advance();
      ++now;
    }
    for (; now < plan.steps; ++now) skip(state);  // the remaining steps, which only other warpgroups see

    // ---- epilogue: lse, and o to q's memory, from where the producer stores it ----
    warpgroup_barrier(w);  // now all warps have read q
    int again = index;
    asm volatile(""
                 : "+r"(again));  // makes the compiler recompute the tile: keeping it would take registers from the
                                  // loop over steps
    const CtaRows done(a, again);
    const HeadRows lse_rows(a.lse, done.b, done.g * G);
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float total = quad_sum(sum[i]);
      inverse[i] = total == 0.0f ? 0.0f : reciprocal_approx(rounded[0][2 * i]);
      const int row = done.first + 64 * w + row0 + fragment_row() + 8 * i, t = a.in.heads.quotient(row);
      if (row < done.rows && lane % 4 == 0)
        *lse_rows.at(t, row - t * G) =
            total == 0.0f ? -INFINITY : (row_max[i] + log2_approx(total)) * 0.69314718055994531f;
    }
    const uint32_t staged = shared_address(own_q) + swizzled(row0 + lane / 8 % 2 * 8 + lane % 8, lane / 16);
#pragma unroll
    for (int panel = 0; panel < kPanelsV; ++panel)
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const float(&x)[4] = o[panel][j], (&y)[4] = o[panel][j + 1];
        store_matrices((staged ^ j << 4) + panel * Shape::kPanelBytes, pack_bf16(x[0] * inverse[0], x[1] * inverse[0]),
                       pack_bf16(x[2] * inverse[1], x[3] * inverse[1]), pack_bf16(y[0] * inverse[0], y[1] * inverse[0]),
                       pack_bf16(y[2] * inverse[1], y[3] * inverse[1]));
      }
    __syncwarp();
    if constexpr (kListed)
      if (keys.combine.active()) {
#pragma unroll 1
        for (int panel = 0; panel < kPanelsV; ++panel)
          combine_panel(a, keys.combine, done, w, panel, own_q + panel * Shape::kPanelBytes);
      }
    fence_async_proxy();  // TMA reads what these lanes have written, and later overwrites it with the next q
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.o_full[query]);
  }
  turns.end();
}

template <class Shape, class Keys>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    fwd_sm90_kernel(const __grid_constant__ RowForwardArgs a, const __grid_constant__ Keys keys) {
  if (Plan<Keys, Shape>::nothing_to_do(a, keys)) return;
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(aligned_shared());
  const int w = __shfl_sync(kFullWarp, threadIdx.x / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Shape::kWarpgroups;
    for (int i = 0; i < Shape::kQueries; ++i) {
      barrier_init(&shared.q_full[i], 1);
      barrier_init(&shared.o_full[i], kConsumerWarps);
      barrier_init(&shared.q_empty[i], 1);
    }
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(&shared.k_full[i], 1);
      barrier_init(&shared.v_full[i], 1);
      barrier_init(&shared.kv_empty[i], kConsumerWarps);
    }
    barrier_init_done();
  }
  // q rows past the tile's last row are set to zero, so that their scores are finite.
  const int filled = a.tile_tokens * a.in.heads.value() * kPanelRowBytes;
  for (int i = 16 * threadIdx.x; i < static_cast<int>(sizeof(shared.q)); i += 16 * Shape::kThreads)
    if (i % Shape::kPanelBytes >= filled) *reinterpret_cast<uint4*>(shared.q[0][0] + i) = make_uint4(0, 0, 0, 0);
  write_ones(shared.ones, threadIdx.x, Shape::kThreads);
  fence_async_proxy();
  __syncthreads();
  // registers per thread; each thread has 128 at launch
  constexpr int kRegistersProducer = 32, kRegistersConsumer = 160;
  static_assert(Shape::kWarpgroups == 3 && kRegistersProducer + 3 * kRegistersConsumer == 4 * 128);
  if (w == Shape::kWarpgroups) {
    decrease_registers<kRegistersProducer>();
    produce_tiles<Shape>(a, keys, shared);
  } else {
    increase_registers<kRegistersConsumer>();
    consume_tiles<Shape>(a, keys, shared, w);
  }
}

// ---- launcher ----

// Makes a TMA map for boxes with box_tokens tokens and box_heads heads, in the order [token][head].
inline CUtensorMap make_query_map(View<const __nv_bfloat16> q, int64_t batch, int64_t tokens, int64_t heads,
                                  int box_heads, int box_tokens) {
  std::swap(q.row, q.head);
  return make_box_map(q, batch, heads, tokens, box_heads, box_tokens);
}

template <class Shape, class Keys>
void launch_row_forward(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in, const Keys& keys) {
  using bf16 = __nv_bfloat16;
  const int64_t bgs = in.k.size(0) * in.k.size(2);
  const int64_t G = in.q.size(2) / in.k.size(2), tile_tokens = Shape::kRowsCta / G;
  const int64_t tiles = ceil_div(in.q.size(1), tile_tokens);
  TRIAD_CHECK(bgs * tiles < (int64_t{1} << 30), "{}: {} tiles of rows do not fit 30 bits", op, bgs * tiles);
  RowForwardArgs a{.q_map = {},
                   .k_map = {},
                   .v_map = {},
                   .o_map = {},
                   .in = make_attend<bf16>(op, in),
                   .lse = make_query_view<float>(in, out.lse),
                   .visible = {keys.range, Divisor(keys.range.d)},
                   .tiles = static_cast<int>(tiles),
                   .tile_tokens = static_cast<int>(tile_tokens),
                   .all_tiles = static_cast<int>(bgs * tiles),
                   .sequences_and_groups = Divisor(static_cast<int>(bgs)),
                   .groups = Divisor(static_cast<int>(in.k.size(2)))};
  if (!ctx.planning) {
    const auto map = [&](const View<const bf16>& rows) {
      return make_query_map(rows, in.q.size(0), in.q.size(1), in.q.size(2), static_cast<int>(G),
                            static_cast<int>(tile_tokens));
    };
    a.q_map = map(make_view<const bf16>(in.q)), a.o_map = map(make_view<const bf16>(out.o));
  }
  if (!ctx.planning && keys.range.keys > 0) {  // nothing is loaded without keys, so no map is needed
    a.k_map = make_box_map(a.in.k, in.k.size(0), in.k.size(1), in.k.size(2), Shape::kKeys);
    a.v_map = make_box_map(a.in.v, in.v.size(0), in.v.size(1), in.v.size(2), Shape::kKeys);
  }
  const int64_t ctas = Plan<Keys, Shape>::kMadeTogether ? bgs * tiles : std::min<int64_t>(bgs * tiles, ctx.num_sms);
  launch(ctx, op, fwd_sm90_kernel<Shape, Keys>, dim3(static_cast<unsigned>(ctas)), dim3(Shape::kThreads),
         sizeof(typename Shape::Shared) + Plan<Keys, Shape>::bytes(keys), a, keys);
}

// Launches the forward. Keys is RowRangeKeys for the window branch, the compressed branch and dense attention;
// SharedTileKeys or BitmapKeys for the selected branch (nsa/sm90/shared_tile.cuh).
template <class Keys>
void launch_forward_sm90(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in, const Keys& keys) {
  // How many q tiles are in shared memory. With kMadeTogether a CTA computes a single tile, and its plan uses the
  // memory that a second q tile would need.
  constexpr int kQueries = Plan<Keys, ForwardShape<64, 64, 64, 6, 1>>::kMadeTogether ? 1 : 2;
  if (in.q.size(3) == 64)
    launch_row_forward<ForwardShape<64, 64, 64, 6, kQueries>>(ctx, op, out, in, keys);
  else if (in.q.size(3) == 128)
    launch_row_forward<ForwardShape<128, 128, 64, 4, kQueries>>(ctx, op, out, in, keys);
  else
    launch_row_forward<ForwardShape<192, 128, 64, 3, 1>>(ctx, op, out, in, keys);
}

}  // namespace
}  // namespace triad::cuda
