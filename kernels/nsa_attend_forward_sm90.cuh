// Forward of the attention branches on Hopper (bf16): each row (t, h) attends to one range of keys, or to listed
// blocks.
//
// A CTA takes kWarpgroups x 64 rows of one (sequence, group) and walks the key tiles that any of them sees, its plan.
// One thread has the copy engine bring keys and values into a ring of stages and refills a stage when all warpgroups
// have left it. A warpgroup keeps q in shared memory; scores, probabilities and sums stay in registers:
//   s = q k^T;  p = 2^(scale s - top);  o += p v, p being packed where s stood.
// The scores of the next tile are queued before the sums of this one, so that the tensor cores work while it weighs.
// `top` need not be the row's largest score, only close: it moves when a score passes it by kSlack powers of two, so
// that o is rescaled once or twice in all.
#pragma once
#include "kernels/nsa_attend_rows.cuh"
#include "kernels/tma_sm90.cuh"

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
  CUtensorMap k_map, v_map;
  Attend<__nv_bfloat16> in;
  View<__nv_bfloat16> o;
  View<float> lse;
  SeenKeys sight;
  int tiles;
  Divisor sequences_and_groups, groups;
};

// Tile sizes for heads (dk, dv): keys a step, warpgroups, stages, CTAs an SM.
template <int kDk_, int kDv_, int kKeys_, int kWarpgroups_, int kStages_, int kCtas_>
struct ForwardShape {
  static constexpr int kDk = kDk_, kDv = kDv_, kKeys = kKeys_, kWarpgroups = kWarpgroups_, kStages = kStages_,
                       kCtas = kCtas_;
  static constexpr int kRowsCta = 64 * kWarpgroups, kThreads = kWarpgroup * kWarpgroups;
  static constexpr int kPanelsK = kDk / kPanel, kPanelsV = kDv / kPanel;
  static constexpr int kQueryBytes = 64 * kDk * 2, kKeyBytes = kKeys * kDk * 2, kValueBytes = kKeys * kDv * 2;
  // A step's stage is refilled when the next one is left, by when the other warpgroups have left it too.
  static constexpr int kLag = kStages > 3 ? 1 : 0;
  struct Shared {
    unsigned char q[kWarpgroups][kQueryBytes];
    struct {
      unsigned char k[kKeyBytes], v[kValueBytes];
    } stage[kStages];
    Barrier keys_came[kStages], values_came[kStages], stage_free[kStages];
  };
};

// The rows [first, first + count) of one sequence b and group g.
struct CtaRows {
  int b, g, first, rows, first_token, last_token;  // `rows`: T * G, the end of the last CTA's
  __device__ __forceinline__ CtaRows(const RowForwardArgs& a, int turn, int count) {
    const int before = a.sequences_and_groups.quotient(turn);
    const int bg = turn - before * a.sequences_and_groups.value();
    b = a.groups.quotient(bg), g = bg - b * a.groups.value();
    first = (a.tiles - 1 - before) * count;  // the last rows see most: they come first
    rows = a.in.tokens * a.in.heads.value();
    first_token = a.in.heads.quotient(first), last_token = a.in.heads.quotient(min(first + count, rows) - 1);
  }
};

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

// A plan numbers the steps of a CTA: step n has the keys first(n) .. end(n) - 1, of which it takes Shape::kKeys at
// most. A warpgroup passes all steps from steps_seen on, and of a listed plan those that none of its rows sees; a step
// of which some row sees only a part needs a mask.
template <class Keys, class Shape>
class Plan;
template <class Shape>
class Plan<RangeKeys, Shape> {
 public:
  static constexpr bool kListed = false;
  static int64_t bytes(const RangeKeys&) { return 0; }  // of shared memory
  __device__ __forceinline__ Plan(const RowForwardArgs& a, const RangeKeys&, const CtaRows& tile, int w, unsigned char*)
      : sight_(a, tile, w),
        begin_(a.sight.low(tile.first_token)),
        end_(a.sight.high(tile.last_token)),
        steps(steps_to(end_)),
        steps_seen(steps_to(sight_.high_any)) {}
  __device__ __forceinline__ int first(int n) const { return begin_ + n * Shape::kKeys; }
  __device__ __forceinline__ int end(int) const { return end_; }
  __device__ __forceinline__ bool sees(int n) const { return first(n) + Shape::kKeys > sight_.low_any; }
  __device__ __forceinline__ bool sees_part(int n) const {
    return first(n) < sight_.low_all || first(n) + Shape::kKeys > sight_.high_all;
  }

 private:
  __device__ __forceinline__ int steps_to(int end) const {
    return max(0, end - begin_ + Shape::kKeys - 1) / Shape::kKeys;
  }
  WarpgroupSight sight_;
  int begin_, end_;

 public:
  const int steps, steps_seen;
};

// The lower n of 32 bits; any n.
__device__ __forceinline__ unsigned bits_below(int n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

__device__ __forceinline__ void warpgroup_barrier(int w) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + w), "n"(kWarpgroup) : "memory");
}

template <class Shape, class Keys>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtas)
    row_forward_sm90_kernel(const __grid_constant__ RowForwardArgs a, const __grid_constant__ Keys keys) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the PTX for older cards holds an empty kernel, which is not chosen there
  constexpr int kKeys = Shape::kKeys, kStages = Shape::kStages, kPanelsV = Shape::kPanelsV, kHalves = kKeys / 64;
  constexpr float kSlack = 8.0f;
  constexpr bool kListed = Plan<Keys, Shape>::kListed;
  if constexpr (kListed)
    if (Plan<Keys, Shape>::is_idle(keys)) return;
  const CtaRows tile(a, blockIdx.x, Shape::kRowsCta);
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(aligned_shared());
  const int w = __shfl_sync(kFullWarp, threadIdx.x / kWarpgroup, 0), lane = threadIdx.x % 32;
  const int row0 = 16 * (threadIdx.x % kWarpgroup / 32), chunk = lane % 8, G = a.in.heads.value();
  unsigned char* const own_q = shared.q[w];

  // This lane's rows as the copies below take them: row0 + lane / 8 + 4 i; past the end the last row stands in.
  const HeadRows q_rows(a.in.q, tile.b, tile.g * G);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = row0 + lane / 8 + 4 * i, row = min(tile.first + 64 * w + r, tile.rows - 1);
    const int t = a.in.heads.quotient(row);
    const __nv_bfloat16* from = q_rows.at(t, row - t * G) + 8 * chunk;
#pragma unroll
    for (int panel = 0; panel < Shape::kPanelsK; ++panel)
      copy_async_16(own_q + panel * 64 * kPanelRowBytes + swizzled(r, chunk), from + kPanel * panel, 16);
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&shared.keys_came[s], 1);
      barrier_init(&shared.values_came[s], 1);
      barrier_init(&shared.stage_free[s], 4 * Shape::kWarpgroups);
    }
    barrier_init_done();
  }
  const Plan<Keys, Shape> plan(a, keys, tile, w, aligned_shared() + sizeof(typename Shape::Shared));
  // Step n lies in stage n % kStages.
  const auto await = [](Barrier(&came)[kStages], int n) {
    barrier_wait(&came[static_cast<unsigned>(n) % kStages], static_cast<unsigned>(n) / kStages & 1);
  };
  const auto load = [&](int n) {
    const int s = static_cast<unsigned>(n) % kStages, first = plan.first(n);
    auto& stage = shared.stage[s];
    barrier_expect(&shared.keys_came[s], Shape::kKeyBytes);
#pragma unroll
    for (int i = 0; i < Shape::kPanelsK; ++i)
      copy_box(stage.k + i * kKeys * kPanelRowBytes, a.k_map, kPanel * i, first, tile.g, tile.b, &shared.keys_came[s]);
    barrier_expect(&shared.values_came[s], Shape::kValueBytes);
#pragma unroll
    for (int i = 0; i < kPanelsV; ++i)
      copy_box(stage.v + i * kKeys * kPanelRowBytes, a.v_map, kPanel * i, first, tile.g, tile.b,
               &shared.values_came[s]);
  };
  if (threadIdx.x == 0)
#pragma unroll 1
    for (int n = 0; n < min(kStages, plan.steps); ++n) load(n);
  // The lane's two rows of a product: the keys they see, and which tokens of the CTA theirs are.
  int low[2], high[2];
  unsigned token_bits = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = a.in.heads.quotient(tile.first + 64 * w + row0 + fragment_row() + 8 * i);
    low[i] = a.sight.low(t), high[i] = a.sight.high(t);
    if constexpr (kListed) token_bits |= (t - tile.first_token) << 16 * i;
  }

  copy_async_wait();
  fence_async_proxy();
  __syncthreads();

  // This warp has done with step n.
  const auto leave = [&](int n) {
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.stage_free[static_cast<unsigned>(n) % kStages]);
  };
  // This warpgroup has left all steps before n: stages that the others have left too are filled again.
  int refilled = 0;
  const auto refill = [&](int n) {
    if (threadIdx.x != 0) return;
    const auto refill_next = [&] {
      await(shared.stage_free, refilled);
      load(refilled + kStages);
      ++refilled;
    };
    const int end = min(n - Shape::kLag, plan.steps - kStages);
    if constexpr (kListed) {
#pragma unroll 1
      while (refilled < end) refill_next();
    } else {
      if (refilled < end) refill_next();  // one is left at a time
    }
  };
  // A step that this warpgroup does not see.
  const auto pass = [&](int n) {
    await(shared.keys_came, n);
    await(shared.values_came, n);
    leave(n);
  };

  float s[kHalves][8][4], o[kPanelsV][8][4] = {};
  uint32_t p[kKeys / 16][4];
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, shrink[2];  // top: times scale
  bool moved;
  const float scale = a.in.scale_log2();
  const uint32_t q_tile = tile_descriptor(shared_address(own_q));
  const auto multiply_scores = [&](int n) {
    const uint32_t k_tile = tile_descriptor(shared_address(shared.stage[static_cast<unsigned>(n) % kStages].k));
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint32_t k = k_tile + (half * 64 * kPanelRowBytes >> 4);
      wgmma_shared<false>(s[half], q_tile, k);
#pragma unroll
      for (int i = 1; i < Shape::kDk / 16; ++i)
        wgmma_shared<true>(s[half], q_tile + i / 4 * (64 * kPanelRowBytes >> 4) + i % 4 * 2,
                           k + i / 4 * (kKeys * kPanelRowBytes >> 4) + i % 4 * 2);
    }
    wgmma_commit();
  };
  const auto multiply_values = [&](int n) {
    const uint32_t v_tile = tile_descriptor(shared_address(shared.stage[static_cast<unsigned>(n) % kStages].v));
#pragma unroll
    for (int panel = 0; panel < kPanelsV; ++panel)
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i)
        wgmma_add<1>(o[panel], p[i], v_tile + panel * (kKeys * kPanelRowBytes >> 4) + i * (16 * kPanelRowBytes >> 4));
    wgmma_commit();
  };
  // Scores become probabilities, relative to `top`.
  const auto weigh = [&](int n) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) pin(s[half]);
    if (plan.sees_part(n)) {
      const int first = plan.first(n) + fragment_column();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int from = low[i] - first, to = (kListed ? min(high[i], plan.end(n)) : high[i]) - first;
#pragma unroll
        for (int word = 0; word < kKeys / 32; ++word) {
          // Bit c: the row sees the lane's key 32 word + c.
          const unsigned seen = bits_below(to - 32 * word) & ~bits_below(from - 32 * word);
#pragma unroll
          for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if ((seen & 1u << (8 * j + e)) == 0) s[word / 2][word % 2 * 4 + j][2 * i + e] = -INFINITY;
        }
      }
    }
    float best[2];
    bool member[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      best[i] = s[0][0][2 * i];
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int j = 0; j < 8; ++j) best[i] = fmaxf(best[i], fmaxf(s[half][j][2 * i], s[half][j][2 * i + 1]));
      member[i] = true;
      if constexpr (kListed) {
        member[i] = plan.is_member(n, token_bits >> 16 * i & 0xffff);
        if (!member[i]) best[i] = -INFINITY;
      }
    }
    moved = __any_sync(kFullWarp, fmaf(best[0], scale, -kSlack) > top[0] || fmaf(best[1], scale, -kSlack) > top[1]);
    if (moved) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Of this row alone: what a row gets does not depend on the others of the warp.
        const float largest = quad_max(best[i]);
        const float higher = fmaf(largest, scale, -kSlack) > top[i] ? largest * scale : top[i];
        shrink[i] = exp2_approx(higher == -INFINITY ? 0.0f : top[i] - higher);
        sum[i] *= shrink[i];
        top[i] = higher;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float minus = member[i] && top[i] != -INFINITY ? -top[i] : -INFINITY;
      float add[2] = {0.0f, 0.0f};
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[half][j][2 * i + e];
            x = exp2_approx(fmaf(x, scale, minus));
            add[e] += x;
          }
      sum[i] += add[0] + add[1];
    }
  };
  // ptxas lets no register become a left operand while products run: so all of them end first.
  const auto pack = [&] {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) pin(s[half]);
    wgmma_wait<0>();
#pragma unroll
    for (int panel = 0; panel < kPanelsV; ++panel) pin(o[panel]);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) pack_operand(p[i], s[i / 4], i % 4);
  };

  // ptxas moves exponentials past a wait that follows them, where they overlap with nothing; not past a branch that
  // asks for their sum, which is never -1.
  const auto settle = [&] {
    asm volatile("{\n.reg .pred p;\nsetp.eq.f32 p, %0, 0fBF800000;\n@p nanosleep.u32 1;\n}" ::"f"(sum[0] + sum[1]));
  };

  int now = 0;
  for (; now < plan.steps_seen && !plan.sees(now); ++now) pass(now), refill(now + 1);
  if (now < plan.steps_seen) {
    await(shared.keys_came, now);
    wgmma_fence();
    multiply_scores(now);
    wgmma_wait<0>();
    weigh(now);
    pack();
    for (int next = now + 1; next < plan.steps_seen; now = next++) {
      // Steps that are not seen, but none for whose keys a stage is needed that this warpgroup has not left: rather it
      // takes an unseen step.
      if constexpr (kListed)
        for (; !plan.sees(next) && next < now + kStages - 1 - Shape::kLag; ++next) pass(next);
      await(shared.keys_came, next);
      wgmma_fence();
      multiply_scores(next);
      await(shared.values_came, now);
      wgmma_fence();
      multiply_values(now);
      wgmma_wait<1>();
      weigh(next);
      settle();
      pack();
      leave(now);
      refill(next);
      if (moved) {
#pragma unroll
        for (int panel = 0; panel < kPanelsV; ++panel)
#pragma unroll
          for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[panel][j][e] *= shrink[e / 2];
      }
    }
    await(shared.values_came, now);
    wgmma_fence();
    multiply_values(now);
    wgmma_wait<0>();
#pragma unroll
    for (int panel = 0; panel < kPanelsV; ++panel) pin(o[panel]);
    leave(now);
    refill(++now);
  }
  for (; now < plan.steps; ++now) pass(now), refill(now + 1);  // the other warpgroups' steps

  // o by way of shared memory, where q stood, so that eight lanes write 128 bytes of a row.
  warpgroup_barrier(w);  // q is read no more
  const HeadRows lse_rows(a.lse, tile.b, tile.g * G);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float total = quad_sum(sum[i]), inverse = total == 0.0f ? 0.0f : reciprocal_approx(total);
    const int r = row0 + fragment_row() + 8 * i, row = tile.first + 64 * w + r;
#pragma unroll
    for (int panel = 0; panel < kPanelsV; ++panel)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        *reinterpret_cast<uint32_t*>(own_q + panel * 64 * kPanelRowBytes + swizzled(r, j) + lane % 4 * 4) =
            pack_bf16(o[panel][j][2 * i] * inverse, o[panel][j][2 * i + 1] * inverse);
    const int t = a.in.heads.quotient(row);
    if (row < tile.rows && lane % 4 == 0)
      *lse_rows.at(t, row - t * G) = total == 0.0f ? -INFINITY : (top[i] + log2_approx(total)) * 0.69314718055994531f;
  }
  __syncwarp();
  const HeadRows o_rows(a.o, tile.b, tile.g * G);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = row0 + lane / 8 + 4 * i, row = tile.first + 64 * w + r, t = a.in.heads.quotient(row);
    if (row >= tile.rows) continue;
    __nv_bfloat16* to = o_rows.at(t, row - t * G) + 8 * chunk;
#pragma unroll
    for (int panel = 0; panel < kPanelsV; ++panel)
      *reinterpret_cast<uint4*>(to + kPanel * panel) =
          *reinterpret_cast<const uint4*>(own_q + panel * 64 * kPanelRowBytes + swizzled(r, chunk));
  }
#endif
}

// ---- launches ----

// Whether rows can be read by the copy engine and in vectors of 16 bytes; strides of rows and heads fit 31 bits.
inline bool forward_rows_fit(const ConstTensor& t) {
  return t.dtype == DType::bf16 && make_view<const __nv_bfloat16>(t).vector && t.stride[0] < (int64_t{1} << 38) &&
         t.stride[1] < (int64_t{1} << 31) && t.stride[2] < (int64_t{1} << 31);
}
inline bool forward_heads_fit(int64_t dk, int64_t dv) {
  return (dk == 64 && dv == 64) || (dk == 128 && dv == 128) || (dk == 192 && dv == 128);
}
// The choice, a pure function of card and problem.
inline bool attend_forward_sm90_applies(const Context& ctx, const AttendOut& out, const AttendIn& in) {
  return ctx.compute_capability == 90 && forward_heads_fit(in.q.size(3), in.v.size(3)) && forward_rows_fit(in.q) &&
         forward_rows_fit(in.k) && forward_rows_fit(in.v) && forward_rows_fit(out.o);
}

template <class Shape, class Keys>
void launch_row_forward(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in, const Keys& keys) {
  using bf16 = __nv_bfloat16;
  const int64_t bgs = in.k.size(0) * in.k.size(2), rows = in.q.size(1) * (in.q.size(2) / in.k.size(2));
  const int64_t tiles = ceil_div(rows, Shape::kRowsCta);
  TRIAD_CHECK(bgs * tiles < (int64_t{1} << 31), "{}: {} tiles of rows do not fit 31 bits", op, bgs * tiles);
  RowForwardArgs a{.k_map = {},
                   .v_map = {},
                   .in = make_attend<bf16>(op, in),
                   .o = make_view<bf16>(out.o),
                   .lse = make_view<float>(out.lse),
                   .sight = {keys.range, Divisor(keys.range.d)},
                   .tiles = static_cast<int>(tiles),
                   .sequences_and_groups = Divisor(static_cast<int>(bgs)),
                   .groups = Divisor(static_cast<int>(in.k.size(2)))};
  if (!ctx.planning && keys.range.keys > 0) {  // else no copy is asked for
    a.k_map = make_box_map(a.in.k, in.k.size(0), in.k.size(1), in.k.size(2), Shape::kKeys);
    a.v_map = make_box_map(a.in.v, in.v.size(0), in.v.size(1), in.v.size(2), Shape::kKeys);
  }
  launch(ctx, op, row_forward_sm90_kernel<Shape, Keys>, dim3(static_cast<unsigned>(bgs * tiles)), dim3(Shape::kThreads),
         sizeof(typename Shape::Shared) + Plan<Keys, Shape>::bytes(keys), a, keys);
}

// The window, the compressed (RangeKeys) and the selected branch (UnionKeys, nsa_attend_union_sm90.cuh).
template <class Keys>
void attend_rows_forward_sm90(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                              const Keys& keys) {
  if (in.q.size(3) == 64)
    launch_row_forward<ForwardShape<64, 64, 64, 2, 4, 2>>(ctx, op, out, in, keys);
  else if (in.q.size(3) == 128)
    launch_row_forward<ForwardShape<128, 128, 64, 3, 4, 1>>(ctx, op, out, in, keys);
  else
    launch_row_forward<ForwardShape<192, 128, 64, 3, 3, 1>>(ctx, op, out, in, keys);
}

}  // namespace
}  // namespace triad::cuda
