// The portable attention kernels for forward and for dq. A CTA keeps one tile of query rows (64; 32 in CompactTile) in
// one sequence and group, 16 per warp, and iterates over the key tiles that any of its tokens sees. The template
// parameter Keys describes which keys these are (RangeKeys below, or SelectedKeys) and enumerates these tiles:
//   keys.range                    the keys that each token sees, regardless of block lists (KeyRange)
//   Keys::Walk walk(keys, rows)   an iterator over a RowTile's key tiles, in ascending order; one in each thread
//   walk.next(tile, most)         sets `tile` to the next tile, at most `most` keys; returns false after the last
//                                 tile. All of a warp's lanes must call it, and it gives all warps the same tiles.
//
// Forward has 2 matrix products per key tile and computes the softmax in one pass over the tiles. For each query row it
// needs these numbers:
//   score  q . key, for each key
//   top    one of this row's scores
//   power  2^((score - top) * scale_log2) for each key, with scale_log2 = log2(e) / sqrt(dk)
// The kernel adds up the powers, and also the values multiplied by their powers. The row's output is the second sum
// divided by the first. Any `top` gives the same output, as long as no power leaves the float range. The kernel takes
// the largest score in the first tile in which the row sees a key, even if a later tile has a larger score. Each lane
// holds the powers for some of the tile's keys. If a row's powers in one lane sum to more than 2^60, the warp computes
// the tile's scores again. The largest one becomes that row's `top`, and both the row's sums are multiplied by 2^((old
// top - new top) * scale_log2). Whether a row's `top` changes depends on that row's scores alone.
//
// The dq kernel has 3 matrix products per key tile. It computes p from the lse that forward has saved. In both kernels,
// a warp skips tiles in which none of its rows sees a key. It masks scores unless all its rows see all the tile's kKeys
// keys.
//
// Shared memory bandwidth, 128 bytes per clock and SM, limits both kernels' speed. In each step a CTA reads one tile of
// k and v from L2 (16 KiB at head width 64 in bf16), and each of its warps (four, if the CTA keeps 64 rows) reads the
// whole tile from shared memory.
#pragma once
#include "kernels/nsa/gpu/attend.cuh"

namespace triad::cuda {
namespace {

// A CTA's query rows. In sequence b and group g, rows are numbered t * G + h. The members:
//   first        the CTA's first row; the CTA has the rows [first, first + tile_rows)
//   rows         where the call's rows end; in the last tile, rows from `rows` on don't exist
//   first_token  the token in the CTA's first row
//   last_token   the token in the CTA's last row that exists
struct RowTile {
  int b, g, first, rows, first_token, last_token;
  template <class T>
  __device__ __forceinline__ RowTile(const Attend<T>& a, int tile, int sequence_and_group, int tile_rows = kRows)
      : b(sequence_and_group / a.groups),
        g(sequence_and_group % a.groups),
        first(a.first_token * a.heads.value() + tile * tile_rows),
        rows(a.tokens * a.heads.value()),
        first_token(a.heads.quotient(first)),
        last_token(a.heads.quotient(min(first + tile_rows, rows) - 1)) {}
};

// A lane's two query rows in mma fragments: rows lane/4 and lane/4 + 8 among its warp's 16.
struct LaneRows {
  bool exists[2];                  // whether the row is before the sequence's end
  int token[2], head[2];           // token t; the head's index among all Hq
  int low[2], high[2];             // the row sees the keys [low, high)
  int bit[2];                      // the token's index in KeyTile::token_mask
  template <class T, class Range>  // Range: KeyRange or DocumentRange
  __device__ __forceinline__ LaneRows(const Attend<T>& a, const RowTile& tile, const Range& range) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile.first + 16 * (threadIdx.x / 32) + fragment_row() + 8 * i;
      exists[i] = row < tile.rows;
      token[i] = a.heads.quotient(row);
      head[i] = tile.g * a.heads.value() + row - token[i] * a.heads.value();
      low[i] = exists[i] ? range.low(token[i]) : 0;
      high[i] = exists[i] ? range.high(token[i]) : 0;
      bit[i] = exists[i] ? token[i] - tile.first_token : 0;
    }
  }
};

// Masks a lane's two rows in a key tile: row i sees the tile's keys low[i] .. high[i] - 1. any: whether any of the
// warp's rows sees a key in the tile. all: whether all the warp's rows see all kKeys keys. apply() sets unseen keys'
// scores to -inf.
template <int kKeys>
struct RowMask {
  int low[2], high[2];
  bool any, all;
  __device__ __forceinline__ RowMask(const LaneRows& rows, const KeyTile& tile) {
    bool lane_any = false, lane_all = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      low[i] = max(rows.low[i] - tile.first, 0);
      high[i] = (tile.token_mask >> rows.bit[i] & 1) != 0 ? min(rows.high[i], tile.end) - tile.first : 0;
      lane_any = lane_any || low[i] < high[i];
      lane_all = lane_all && low[i] == 0 && high[i] >= kKeys;
    }
    any = __any_sync(kFullWarp, lane_any);
    all = __all_sync(kFullWarp, lane_all);
  }
  __device__ __forceinline__ void apply(float (&scores)[kKeys / 8][4]) const {
    if (all) return;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = 8 * j + fragment_column() + e % 2;
        if (column < low[e / 2] || column >= high[e / 2]) scores[j][e] = -INFINITY;
      }
  }
};

// Loads the CTA's q or dout rows into shared memory. Each row has `padded` columns there, and begins `stride` elements
// after the row before. Rows that do not exist, and columns past the view's width, become zeros.
template <class Tile, class T>
__device__ __forceinline__ void load_query_rows(T* to, int stride, int padded, const View<const T>& view,
                                                const Attend<T>& a, const RowTile& tile) {
  load_rows<Tile::kRows, Tile::kThreads>(to, stride, padded, view, [&](int r) -> const T* {
    const int row = tile.first + r, t = a.heads.quotient(row), G = a.heads.value();
    return row < tile.rows ? view.at(tile.b, t, tile.g * G + row - t * G) : nullptr;
  });
}

// Loads a key tile's keys or values into shared memory, in the layout that load_query_rows() describes.
template <class Tile, class T>
__device__ __forceinline__ void load_key_rows(T* to, int stride, int padded, const View<const T>& view,
                                              const RowTile& rows, const KeyTile& tile) {
  const T* first = view.at(rows.b, tile.first, rows.g);
  const int count = tile.end - tile.first;
  // If rows need no zero columns, a thread multiplies for its first address only, and then adds a constant.
  if (view.vector && view.width == padded) {
    constexpr int kCopy = 16 / sizeof(T), kLanes = 8, kCopiedRows = Tile::kThreads / kLanes;
    const int row = threadIdx.x / kLanes, column = threadIdx.x % kLanes * kCopy;
    const T* from = first + row * view.row + column;
#pragma unroll
    for (int i = 0; i < Tile::kKeys / kCopiedRows; ++i) {
      const int r = row + i * kCopiedRows;
      for (int c = 0; c < padded; c += kLanes * kCopy)
        copy_async_16(to + r * stride + column + c, (r < count ? from : first) + c, r < count ? 16 : 0);
      from += kCopiedRows * view.row;
    }
    return;
  }
  load_rows<Tile::kKeys, Tile::kThreads>(to, stride, padded, view,
                                         [&](int r) -> const T* { return r < count ? first + r * view.row : nullptr; });
}

// A lane holds some of a row's powers for each key tile, and adds them up. If any lane's sum exceeds kMostAdded, the
// row gets a higher top. Otherwise none of its powers exceeds 2^60. Rounded to bf16, such a power is finite, and so is
// its product with a value below 2^67.
constexpr float kMostAdded = 0x1p60f;

template <class T>
struct ForwardArgs {
  Attend<T> in;
  View<T> o;
  View<float> lse;
};

// Forward. Grid: x the row tile, y the sequence and group, z the chunk of kColumns o columns. Shared memory: q
// [rows][dk]; per stage k [keys][dk] and v [keys][kColumns].
template <class T, class Tile, class Keys>
__global__ void __launch_bounds__(Tile::kThreads, resident_ctas<T, Tile>(4, 3))
    fwd_portable_kernel(const ForwardArgs<T> a, const Keys keys) {
  constexpr int kKeys = Tile::kKeys, kColumns = Tile::kColumns, kStrideV = tile_stride<T>(kColumns);
  const int depth = padded_depth<Tile>(a.in.depth_k), stride = padded_stride<T, Tile>(a.in.depth_k);
  const int column0 = blockIdx.z * kColumns;
  // CTAs for the last rows, which see the most keys, start first.
  const RowTile tile(a.in, gridDim.x - 1 - blockIdx.x, blockIdx.y, Tile::kRows);
  const LaneRows rows(a.in, tile, DocumentRange(keys.range, tile.b));

  T* q = reinterpret_cast<T*>(dynamic_shared());
  T* stages = q + Tile::kRows * stride;
  const int stage_size = kKeys * (stride + kStrideV);
  load_query_rows<Tile>(q, stride, depth, a.in.q, a.in, tile);

  // Heads up to 64 columns wide in bf16: a warp keeps its q rows in registers.
  constexpr bool kKeepsQueries = std::is_same_v<T, __nv_bfloat16> && Tile::kColumns == kDepth;
  const T* warp_q = q + 16 * (threadIdx.x / 32) * stride;
  uint32_t q_fragment[kDepth / 16][4];
  if constexpr (kKeepsQueries) {
    copy_async_wait();
    __syncthreads();
    load_left_operand(q_fragment, warp_q, stride);
  }

  float out[kColumns / 8][4] = {};
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};  // sum: over this lane's keys only
  bool all_have_top = false;                                     // whether all the warp's rows have seen a key
  const float scale = a.in.scale_log2();
  const View<const T> v_columns = a.in.v.columns(column0, kColumns);
  typename Keys::Walk walk(keys, tile);
  pipeline<KeyTile>(
      a.in.stages, [&](KeyTile& next) { return walk.next(next, kKeys); },
      [&](const KeyTile& next, int stage) {
        T* k = stages + stage * stage_size;
        load_key_rows<Tile>(k, stride, depth, a.in.k, tile, next);
        load_key_rows<Tile>(k + kKeys * stride, kStrideV, kColumns, v_columns, tile, next);
      },
      [&](const KeyTile& now, int stage) {
        const RowMask<kKeys> mask(rows, now);
        if (!mask.any) return;
        const T* k = stages + stage * stage_size;
        float p[kKeys / 8][4];  // the tile's scores, then their powers
        float added[2];         // this lane's powers, summed for each row
        const auto compute_scores = [&] {
#pragma unroll
          for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) p[j][e] = 0.0f;
          if constexpr (kKeepsQueries)
            multiply_nt<kKeys>(p, q_fragment, k, stride);
          else
            multiply_nt<kKeys>(p, warp_q, k, stride, depth);
          mask.apply(p);
        };
        const auto compute_powers = [&] {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float base = top[i] == -INFINITY ? 0.0f : top[i] * scale;  // 0 avoids inf - inf before the first key
            added[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
              for (int e = 2 * i; e < 2 * i + 2; ++e) added[i] += p[j][e] = exp2_approx(fmaf(p[j][e], scale, -base));
          }
        };
        // For each row i with raises[i]: if the row's largest score in the tile is above its top, makes that score the
        // top and scales the row's sums to it.
        const auto raise_tops = [&](const bool(&raises)[2]) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float best = -INFINITY;
#pragma unroll
            for (int j = 0; j < kKeys / 8; ++j) best = fmaxf(best, fmaxf(p[j][2 * i], p[j][2 * i + 1]));
            best = quad_max(best);
            if (!raises[i] || best <= top[i]) continue;
            const float rescale = exp2_approx((top[i] - best) * scale);
            top[i] = best;
            sum[i] *= rescale;
#pragma unroll
            for (int j = 0; j < kColumns / 8; ++j) out[j][2 * i] *= rescale, out[j][2 * i + 1] *= rescale;
          }
        };
        compute_scores();
        if (!all_have_top) {
          raise_tops({top[0] == -INFINITY, top[1] == -INFINITY});
          all_have_top = __all_sync(
              kFullWarp, (top[0] != -INFINITY || !rows.exists[0]) && (top[1] != -INFINITY || !rows.exists[1]));
        }
        compute_powers();
        if (__any_sync(kFullWarp, fmaxf(added[0], added[1]) > kMostAdded)) {
          compute_scores();
          raise_tops({quad_max(added[0]) > kMostAdded, quad_max(added[1]) > kMostAdded});
          compute_powers();
        }
        sum[0] += added[0], sum[1] += added[1];
        multiply_nn<kKeys, kColumns>(out, p, k + kKeys * stride, kStrideV);
      });

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float total = quad_sum(sum[i]);
    if (!rows.exists[i]) continue;
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    T* o = a.o.at(tile.b, rows.token[i], rows.head[i]);
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int column = column0 + 8 * j + fragment_column();
      store_pair(o + column, a.o.width - column, out[j][2 * i] * inverse, out[j][2 * i + 1] * inverse);
    }
    if (column0 == 0 && threadIdx.x % 4 == 0)
      *a.lse.at(tile.b, rows.token[i], rows.head[i]) =
          total == 0.0f ? -INFINITY : fmaf(top[i], a.in.scale, logf(total));
  }
}

template <class T>
struct DqArgs {
  Attend<T> in;
  View<const T> dout;
  View<const float> lse, delta, gate;
  View<float> dq;
};

// The part of backward that adds to dq. Grid: x the row tile, y the sequence and group, z the chunk of kColumns dq
// columns. Shared memory: q [rows][dk], dout [rows][dv]; per stage k [keys][dk] and v [keys][dv].
template <class T, class Tile, class Keys>
__global__ void __launch_bounds__(Tile::kThreads, resident_ctas<T, Tile>(4, 3))
    bwd_dq_portable_kernel(const DqArgs<T> a, const Keys keys) {
  constexpr int kKeys = Tile::kKeys, kColumns = Tile::kColumns;
  const int depth_k = padded_depth<Tile>(a.in.depth_k), stride_k = padded_stride<T, Tile>(a.in.depth_k);
  const int depth_v = padded_depth<Tile>(a.in.depth_v), stride_v = padded_stride<T, Tile>(a.in.depth_v);
  const int column0 = blockIdx.z * kColumns, warp_row = 16 * (threadIdx.x / 32);
  const RowTile tile(a.in, gridDim.x - 1 - blockIdx.x, blockIdx.y, Tile::kRows);
  const LaneRows rows(a.in, tile, DocumentRange(keys.range, tile.b));

  T* q = reinterpret_cast<T*>(dynamic_shared());
  T* dout = q + Tile::kRows * stride_k;
  T* stages = dout + Tile::kRows * stride_v;
  const int stage_size = kKeys * (stride_k + stride_v);
  load_query_rows<Tile>(q, stride_k, depth_k, a.in.q, a.in, tile);
  load_query_rows<Tile>(dout, stride_v, depth_v, a.dout, a.in, tile);

  // A row without keys keeps lse_log2 = inf, so that p = 2^(score * scale - lse_log2) is 0.
  float lse_log2[2] = {INFINITY, INFINITY}, delta[2] = {}, gate[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!rows.exists[i]) continue;
    const float lse = *a.lse.at(tile.b, rows.token[i], rows.head[i]);
    if (lse != -INFINITY) lse_log2[i] = lse * kLog2e;
    delta[i] = *a.delta.at(tile.b, rows.token[i], rows.head[i]);
    gate[i] = a.gate.data == nullptr ? 1.0f : *a.gate.at(tile.b, rows.token[i], tile.g);
  }

  float dq[kColumns / 8][4] = {};
  const float scale = a.in.scale_log2();
  typename Keys::Walk walk(keys, tile);
  pipeline<KeyTile>(
      a.in.stages, [&](KeyTile& next) { return walk.next(next, kKeys); },
      [&](const KeyTile& next, int stage) {
        T* k = stages + stage * stage_size;
        load_key_rows<Tile>(k, stride_k, depth_k, a.in.k, tile, next);
        load_key_rows<Tile>(k + kKeys * stride_k, stride_v, depth_v, a.in.v, tile, next);
      },
      [&](const KeyTile& now, int stage) {
        const RowMask<kKeys> mask(rows, now);
        if (!mask.any) return;
        const T* k = stages + stage * stage_size;
        float p[kKeys / 8][4] = {}, ds[kKeys / 8][4] = {};
        multiply_nt<kKeys>(p, q + warp_row * stride_k, k, stride_k, depth_k);
        multiply_nt<kKeys>(ds, dout + warp_row * stride_v, k + kKeys * stride_k, stride_v, depth_v);
        mask.apply(p);
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            ds[j][e] = score_gradient<T>(exp2_approx(fmaf(p[j][e], scale, -lse_log2[e / 2])),
                                         fmaf(gate[e / 2], ds[j][e], -delta[e / 2]), a.in.alone);
        multiply_nn<kKeys, kColumns>(dq, ds, k + column0, stride_k);
      });

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!rows.exists[i]) continue;
    float* to = a.dq.at(tile.b, rows.token[i], rows.head[i]);
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int column = column0 + 8 * j + fragment_column(), room = a.dq.width - column;
      const float x = room >= 1 ? to[column] : 0.0f, y = room >= 2 ? to[column + 1] : 0.0f;
      store_pair(to + column, room, fmaf(dq[j][2 * i], a.in.scale, x), fmaf(dq[j][2 * i + 1], a.in.scale, y));
    }
  }
}

// ---- launchers ----

// The grid for forward and dq: x the query row tiles, y the sequences and groups, z the output column chunks.
template <class T>
dim3 row_grid(const Attend<T>& a, const AttendIn& in, int columns, int columns_per_cta, int tile_rows = kRows) {
  const int64_t rows = in.q.size(1) * (in.q.size(2) / in.k.size(2));
  return dim3(static_cast<unsigned>(ceil_div(rows, tile_rows)), static_cast<unsigned>(in.q.size(0) * a.groups),
              static_cast<unsigned>(ceil_div(columns, columns_per_cta)));
}

// Queues forward for the branch `keys`; `op` names the launch in profiles and errors.
template <class Keys>
void launch_forward(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in, const Keys& keys) {
  dispatch_attend(ctx, op, PortableKernel::forward, in, 0, [&]<class T, class Tile>(const TilePlan& plan) {
    const ForwardArgs<T> a{make_attend<T>(op, in, plan.stages), make_query_view<T>(in, out.o),
                           make_query_view<float>(in, out.lse)};
    launch(ctx, op, fwd_portable_kernel<T, Tile, Keys>, row_grid(a.in, in, a.o.width, Tile::kColumns, Tile::kRows),
           dim3(Tile::kThreads), plan.bytes, a, keys);
  });
}

// Queues the kernel that adds to dq. dk and dv are computed by nsa/gpu/dkdv.cu.
template <class Keys>
void launch_dq(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
               const Keys& keys) {
  dispatch_attend(ctx, op, PortableKernel::dq, in, 0, [&]<class T, class Tile>(const TilePlan& plan) {
    const DqArgs<T> a{make_attend<T>(op, in, grad, plan.stages),   make_query_view<const T>(in, grad.dout),
                      make_query_view<const float>(in, grad.lse),  make_query_view<const float>(in, grad.delta),
                      make_query_view<const float>(in, grad.gate), make_query_view<float>(in, out.dq)};
    launch(ctx, op, bwd_dq_portable_kernel<T, Tile, Keys>, row_grid(a.in, in, a.dq.width, Tile::kColumns, Tile::kRows),
           dim3(Tile::kThreads), plan.bytes, a, keys);
  });
}

}  // namespace
// The `Keys` for a branch whose rows see all keys in their range (window, compressed, dense): the key tiles cover the
// ranges of all the CTA's rows.
struct RangeKeys {
  KeyRange range;
  class Walk {
   public:
    __device__ __forceinline__ Walk(const RangeKeys& keys, const RowTile& rows)
        : at_(DocumentRange(keys.range, rows.b).low(rows.first_token)),
          end_(DocumentRange(keys.range, rows.b).high(rows.last_token)) {}
    __device__ __forceinline__ bool next(KeyTile& tile, int most) {
      tile = {at_, min(at_ + most, end_), ~uint64_t{0}};
      at_ += most;
      return tile.first < tile.end;
    }

   private:
    int at_, end_;  // the keys that are left: [at_, end_)
  };
};

}  // namespace triad::cuda
