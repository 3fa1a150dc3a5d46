// Forward of the attention branches on Hopper (bf16): each row (t, h) attends to one range of keys, or to listed
// blocks.
//
// A tile is as many tokens of one (sequence, group) as have kWarpgroups x 64 rows; a CTA takes one tile after the other
// and walks the key tiles that any of its rows sees, its plan. One thread, of a warpgroup apart, has the copy engine
// bring q, keys and values: keys and values into a ring of stages, each refilled when all warpgroups have left it, so
// that the next tile's are there before this one is done. Another one has it store o, which the warpgroups leave where
// q lay. A warpgroup keeps q in shared memory; scores, probabilities and sums stay in registers:
//   s = q k^T;  p = 2^(scale s - top);  o += p v, p being packed where s stood;  o / sum p, p as it was packed
//   (hopper/wgmma_ones.cuh), and lse from the sum of p itself.
// The scores of the next step are queued before the sums of this one, so that the tensor cores work while it weighs.
// `top` is the largest of the first scores that a row sees, and stays: p is rounded relative to its size and may have
// any that floats have. Only where a later step's powers pass 2^60 the row's scores of that step are computed once more
// and it gets a new top.
//
// One H200, us:                          d 64                                             d 128
//   window 512, 8 x 2048, 12/2 heads        68      1 x 65536  276    64/4, 1 x 8192  242   1 x 65536  2200
//   compressed                              32                 779                    151              6840
//   dense                                  113
// Of that the rounded p's sum takes 3% (d 64) and 7% (d 128: half of it for products of 64 columns instead of 128).
// The error of o along o, rms, of 1024 x 12 x 64, w 512, queries of deviation 1, 4, 10: 4.8e-4, 5.8e-4, 4.8e-4; with
// the sum of unrounded p 5.4e-4, 1.2e-3, 1.4e-3. Tried and left: that sum by ordinary instructions (6 to 18% slower, of
// truncated p too), a new top where p outweighs the sum (3 to 6%, where rows are peaked 25%), an eighth of the powers
// by polynomials (4 to 11% slower), 128 keys a step at d 64 (3 to 18% slower). Before: looking for the largest score in
// every step 5 to 10%, q and o not overlapped up to 20%, tiles dealt out in one direction 7% (dense), o stored by the
// warps themselves 2 to 4% (d 64), 3 to 15% (d 128). What a tile costs beside its steps is its instructions (12 warps
// issue in 50 to 57% of the slots), so the next tile's first scores queued with this one's last sums win nothing (d 64
// 2% slower, 8 x 2048 15%), and a fourth warpgroup, which leaves 112 registers, is slower (d 64, 4 to 10%).
#pragma once
#include "kernels/hopper/warpgroup.cuh"
#include "kernels/nsa/gpu/combine.cuh"
#include "kernels/nsa/sm90/forward_plan.cuh"

namespace triad::cuda {
namespace {

// The rows of a view that belong to a sequence and the heads from first_head on.
template <class T>
struct HeadRows {
  T* base;
  int row, head;
  __device__ __forceinline__ HeadRows(const View<T>& v, int b, int first_head)
      : base(v.at(b, 0, first_head)), row(static_cast<int>(v.row)), head(static_cast<int>(v.head)) {}
  __device__ __forceinline__ T* at(int t, int h) const {
    return base + static_cast<int64_t>(t) * row + static_cast<int64_t>(h) * head;
  }
};

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The lower n of 32 bits; any n.
__device__ __forceinline__ unsigned bits_below(int n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

__device__ __forceinline__ void warpgroup_barrier(int w) { named_barrier_sync<kWarpgroup>(1 + w); }

// The other branches' rows of a warpgroup, which combine_panel is going to read.
template <int kPanelsV>
__device__ __forceinline__ void prefetch_others(const RowForwardArgs& a, const CombineRows& combine,
                                                const CtaRows& tile, int w) {
  const int row = tile.first + 64 * w + static_cast<int>(threadIdx.x) % 64, t = a.in.heads.quotient(row);
  if (row >= tile.rows) return;
  const int h = tile.g * a.in.heads.value() + row - t * a.in.heads.value();
  for (int panel = threadIdx.x % kWarpgroup / 64; panel < kPanelsV; panel += 2)
    combine.prefetch(tile.b, t, h, kPanel * panel);
}
// 64 columns of a warp's 16 rows of o, which lie at `o`, with the other branches': eight lanes a row, four of its rows
// on their way at once.
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

template <class Shape, class Keys>
__device__ __forceinline__ void compute_tiles(const RowForwardArgs& a, const Keys& keys, typename Shape::Shared& shared,
                                              int w) {
  constexpr int kKeys = Shape::kKeys, kStages = Shape::kStages, kPanelsV = Shape::kPanelsV;
  constexpr float kMostSum = 0x1p60f;  // of a lane's powers in a step: their bf16, and sums with values, are finite
  constexpr bool kListed = Plan<Keys, Shape>::kListed;
  const int G = a.in.heads.value(), lane = threadIdx.x % 32;
  const int row0 = 16 * (threadIdx.x % kWarpgroup / 32);
  Place<kStages> here, there;  // of steps `now` and `next`
  const WarpgroupTurns<Shape::kWarpgroups> turns{w};
  turns.begin();
  for (int round = 0, turn; (turn = turn_of(round)) < a.turns; ++round) {
    const CtaRows tile(a, turn);
    const Plan<Keys, Shape> plan(a, keys, tile, w, reinterpret_cast<unsigned char*>(&shared + 1));
    const int query = round % Shape::kQueries;
    unsigned char* const own_q = shared.q[query][0] + 64 * w * kPanelRowBytes;
    // The lane's two rows of a product: the keys they see, and which tokens of the CTA theirs are.
    int low[2], high[2];
    unsigned token_bits = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = a.in.heads.quotient(tile.first + 64 * w + row0 + fragment_row() + 8 * i);
      low[i] = a.sight.low(t), high[i] = a.sight.high(t);
      if constexpr (kListed) token_bits |= (t - tile.first_token) << 16 * i;
    }
    // This warp has done with the step there.
    const auto leave = [&](const Place<kStages>& place) {
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.stage_free[place.at]);
    };
    // A step that this warpgroup does not see.
    const auto pass = [&](Place<kStages>& place) {
      turns.wait();
      turns.pass_on();
      barrier_wait(&shared.keys_came[place.at], place.parity);
      barrier_wait(&shared.values_came[place.at], place.parity);
      leave(place);
      place.advance();
    };

    // rounded: sums of p as the products see it, by which o is divided; sum: of p itself, which lse tells (this lane's
    // part). top: times scale.
    float s[kKeys / 8][4], o[kPanelsV][8][4] = {}, rounded[1][4] = {};
    uint32_t p[kKeys / 16][4];
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, shrink[2];
    const float scale = a.in.scale_log2();
    const uint32_t q_tile = tile_descriptor(shared_address(own_q));
    const auto multiply_scores = [&](const Place<kStages>& place) {
      const uint32_t k = tile_descriptor(shared_address(shared.stage[place.at].k));
      wgmma_begin<Major::k, Major::k>(s, q_tile, k);
#pragma unroll
      for (int i = 1; i < Shape::kDk / 16; ++i)
        wgmma<Major::k, Major::k>(s, q_tile + i / 4 * (Shape::kPanelBytes >> 4) + i % 4 * 2,
                                  k + i / 4 * (kKeys * kPanelRowBytes >> 4) + i % 4 * 2);
      wgmma_commit();
    };
    const auto multiply_values = [&](const Place<kStages>& place) {
      const uint32_t ones = shared_address(shared.ones);
      uint32_t v = shared_address(shared.stage[place.at].v);
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
    // -inf where row i does not see the key.
    const auto mask_row = [&](int n, int i) {
      const int first = plan.first(n) + fragment_column();
      const int from = low[i] - first, to = (kListed ? min(high[i], plan.end(n)) : high[i]) - first;
#pragma unroll
      for (int word = 0; word < kKeys / 32; ++word) {
        // Bit c: the row sees the lane's key 32 word + c.
        const unsigned seen = bits_below(to - 32 * word) & ~bits_below(from - 32 * word);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if ((seen & 1u << (8 * j + e)) == 0) s[4 * word + j][2 * i + e] = -INFINITY;
      }
    };
    // The top of row i becomes its largest score, and what was summed is to shrink.
    const auto raise_top = [&](int i, bool raise) {
      float best = -INFINITY;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) best = fmaxf(best, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
      best = quad_max(best) * scale;
      const float higher = raise ? fmaxf(top[i], best) : top[i];
      shrink[i] = exp2_approx(higher == top[i] ? 0.0f : top[i] - higher);
      sum[i] *= shrink[i];
      top[i] = higher;
    };
    // Powers of row i's scores; where `keep`, powers stand there already. Returns this lane's part of their sum.
    const auto raise_to_powers = [&](int i, float minus, bool keep) {
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
    // Scores become probabilities, relative to `top`: the largest of the first scores that the row saw. Where a row's
    // powers are huge, its scores are computed once more, by the slower products of a warp, and it gets a new top. What
    // a row gets depends on this row alone.
    bool placed = false, moved;
    const auto weigh = [&](int n, auto is_first) {
      constexpr bool kFirst = decltype(is_first)::value;
      pin(s);
      bool member[2] = {true, true};
      if constexpr (kListed) {
#pragma unroll
        for (int i = 0; i < 2; ++i) member[i] = plan.is_member(n, token_bits >> 16 * i & 0xffff);
      }
      if (plan.sees_part(n)) mask_row(n, 0), mask_row(n, 1);
      moved = !placed;
      if (kFirst || !placed) {
#pragma unroll
        for (int i = 0; i < 2; ++i) raise_top(i, member[i] && top[i] == -INFINITY);
        placed = __all_sync(kFullWarp, top[0] != -INFINITY && top[1] != -INFINITY);
      }
      float add[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        add[i] = raise_to_powers(i, member[i] && top[i] != -INFINITY ? -top[i] : -INFINITY, false);
      // This vote also keeps the exponentials where the sums of the last step run: ptxas would move them past the wait
      // that follows, where they overlap with nothing. A branch by lanes instead would have the loop's addresses leave
      // the uniform registers (10% slower).
      if (!kFirst && __any_sync(kFullWarp, fmaxf(add[0], add[1]) > kMostSum)) {
        const bool over[2] = {quad_max(add[0]) > kMostSum, quad_max(add[1]) > kMostSum};
        const unsigned char* const k = shared.stage[there.at].k;
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
          if (plan.sees_part(n) && over[i]) mask_row(n, i);
          raise_top(i, over[i]);
          add[i] = raise_to_powers(i, -top[i], !over[i]);
        }
        moved = true;
      }
      sum[0] += add[0], sum[1] += add[1];
    };
    // ptxas lets no register become a left operand while products run: so all of them end first.
    const auto pack = [&] {
      pin(s);
      wgmma_wait<0>();
      pin_sums();
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) pack_operand(p[i], s, i);
    };

    if constexpr (kListed)
      if (keys.combine.wanted()) prefetch_others<kPanelsV>(a, keys.combine, tile, w);

    int now = 0;
    barrier_wait(&shared.query_came[query], round / Shape::kQueries & 1);
    for (; now < plan.steps_seen && !plan.sees(now); ++now) pass(here);
    if (now < plan.steps_seen) {
      barrier_wait(&shared.keys_came[here.at], here.parity);
      turns.wait();
      wgmma_fence();
      multiply_scores(here);
      turns.pass_on();
      wgmma_wait<0>();
      weigh(now, std::true_type{});
      pack();
      for (int next = now + 1; next < plan.steps_seen; now = next++) {
        there = here;
        there.advance();
        // Steps that are not seen, but none for whose keys a stage is needed that this warpgroup has not left: rather
        // it takes an unseen step.
        if constexpr (kListed)
          for (; !plan.sees(next) && next < now + kStages - 1; ++next) pass(there);
        barrier_wait(&shared.keys_came[there.at], there.parity);
        turns.wait();
        wgmma_fence();
        multiply_scores(there);
        barrier_wait(&shared.values_came[here.at], here.parity);
        wgmma_fence();
        multiply_values(here);
        turns.pass_on();
        wgmma_wait<1>();
        weigh(next, std::false_type{});
        pack();
        leave(here);
        here = there;
        if (moved) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            rounded[0][e] *= shrink[e / 2];
#pragma unroll
            for (int j = 0; j < Shape::kDv / 8; ++j) o[j / 8][j % 8][e] *= shrink[e / 2];
          }
        }
      }
      barrier_wait(&shared.values_came[here.at], here.parity);
      wgmma_fence();
      multiply_values(here);
      wgmma_wait<0>();
      pin_sums();
      leave(here);
      here.advance();
      ++now;
    }
    for (; now < plan.steps; ++now) pass(here);  // the other warpgroups' steps

    // o goes where q stood, for the copy engine to store.
    warpgroup_barrier(w);  // q is read no more
    int again = turn;
    asm volatile("" : "+r"(again));  // the tile, for which the steps have no registers to spare
    const CtaRows done(a, again);
    const HeadRows lse_rows(a.lse, done.b, done.g * G);
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float total = quad_sum(sum[i]);
      inverse[i] = total == 0.0f ? 0.0f : reciprocal_approx(rounded[0][2 * i]);
      const int row = done.first + 64 * w + row0 + fragment_row() + 8 * i, t = a.in.heads.quotient(row);
      if (row < done.rows && lane % 4 == 0)
        *lse_rows.at(t, row - t * G) = total == 0.0f ? -INFINITY : (top[i] + log2_approx(total)) * 0.69314718055994531f;
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
      if (keys.combine.wanted()) {
#pragma unroll 1
        for (int panel = 0; panel < kPanelsV; ++panel)
          combine_panel(a, keys.combine, done, w, panel, own_q + panel * Shape::kPanelBytes);
      }
    fence_async_proxy();  // the copy engine reads what these lanes wrote, and overwrites it
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.sums_came[query]);
  }
  turns.end();
}

template <class Shape, class Keys>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    fwd_sm90_kernel(const __grid_constant__ RowForwardArgs a, const __grid_constant__ Keys keys) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the PTX for older cards holds an empty kernel, which is not chosen there
  if (Plan<Keys, Shape>::nothing_to_do(keys)) return;
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(aligned_shared());
  const int w = __shfl_sync(kFullWarp, threadIdx.x / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    constexpr int kWarpsCompute = 4 * Shape::kWarpgroups;
    for (int i = 0; i < Shape::kQueries; ++i) {
      barrier_init(&shared.query_came[i], 1);
      barrier_init(&shared.sums_came[i], kWarpsCompute);
      barrier_init(&shared.query_free[i], 1);
    }
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(&shared.keys_came[i], 1);
      barrier_init(&shared.values_came[i], 1);
      barrier_init(&shared.stage_free[i], kWarpsCompute);
    }
    barrier_init_done();
  }
  // Rows of q that no token fills: zeros, so that they have scores as others do.
  const int filled = a.tile_tokens * a.in.heads.value() * kPanelRowBytes;
  for (int i = 16 * threadIdx.x; i < static_cast<int>(sizeof(shared.q)); i += 16 * Shape::kThreads)
    if (i % Shape::kPanelBytes >= filled) *reinterpret_cast<uint4*>(shared.q[0][0] + i) = make_uint4(0, 0, 0, 0);
  write_ones(shared.ones, threadIdx.x, Shape::kThreads);
  fence_async_proxy();
  __syncthreads();
  constexpr int kRegistersCopy = 32, kRegistersCompute = 160;  // 128 each at first
  static_assert(Shape::kWarpgroups == 3 && kRegistersCopy + 3 * kRegistersCompute == 4 * 128);
  if (w == Shape::kWarpgroups) {
    decrease_registers<kRegistersCopy>();
    copy_tiles<Shape>(a, keys, shared);
  } else {
    increase_registers<kRegistersCompute>();
    compute_tiles<Shape>(a, keys, shared, w);
  }
#endif
}

// ---- launches ----

// Boxes of box_tokens tokens and box_heads heads, the heads of a token being neighbours.
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
                   .lse = make_view<float>(out.lse),
                   .sight = {keys.range, Divisor(keys.range.d)},
                   .tiles = static_cast<int>(tiles),
                   .tile_tokens = static_cast<int>(tile_tokens),
                   .turns = static_cast<int>(bgs * tiles),
                   .sequences_and_groups = Divisor(static_cast<int>(bgs)),
                   .groups = Divisor(static_cast<int>(in.k.size(2)))};
  if (!ctx.planning) {
    const auto map = [&](const View<const bf16>& rows) {
      return make_query_map(rows, in.q.size(0), in.q.size(1), in.q.size(2), static_cast<int>(G),
                            static_cast<int>(tile_tokens));
    };
    a.q_map = map(a.in.q), a.o_map = map(make_view<const bf16>(out.o));
  }
  if (!ctx.planning && keys.range.keys > 0) {  // else no copy is asked for
    a.k_map = make_box_map(a.in.k, in.k.size(0), in.k.size(1), in.k.size(2), Shape::kKeys);
    a.v_map = make_box_map(a.in.v, in.v.size(0), in.v.size(1), in.v.size(2), Shape::kKeys);
  }
  const int64_t ctas = Plan<Keys, Shape>::kMadeTogether ? bgs * tiles : std::min<int64_t>(bgs * tiles, ctx.num_sms);
  launch(ctx, op, fwd_sm90_kernel<Shape, Keys>, dim3(static_cast<unsigned>(ctas)), dim3(Shape::kThreads),
         sizeof(typename Shape::Shared) + Plan<Keys, Shape>::bytes(keys), a, keys);
}

// The window, the compressed (RangeKeys) and the selected branch (UnionKeys, nsa/sm90/shared_tile.cu).
template <class Keys>
void launch_forward_sm90(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in, const Keys& keys) {
  // One tile's q for a CTA that takes one tile; its plan needs the memory.
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
