// The portable kernel that computes dk and dv, for all three branches and dense attention. For bf16 heads (64, 64) or
// (128, 128), if the caller passes a rounding unit, the same kernel also computes dq (template parameter kAddsDq).
//
// A CTA keeps 64 keys in one sequence and group, 16 per warp, and iterates over the query rows that see them, 64 per
// step. Other tiles (portable_tiles.h) have other sizes: LargeHeadTile takes 32 rows per step, CompactTile keeps 32
// keys and takes 16 rows, and WideTile keeps 96 keys and takes 96 rows. The numbers below are for 64 keys and 64 rows.
// Scores are computed transposed, s^T = k q^T, so that p^T and ds^T are in the registers that the next products' left
// operands need:
//   dv += (gate p)^T dout   and   dk += ds^T q,   summed in registers over all rows and all the group's heads.
// A step has 4 matrix products; the kernel for dq (nsa/gpu/fwd_dq.cuh) has 3. Per step a CTA reads 64 rows of q and
// dout from L2: 16 KiB at head width 64 in bf16, for 2.1 MFLOP. Shared memory bandwidth limits this kernel's speed, and
// also the dq kernel's. At head widths up to 64 in bf16, a warp therefore keeps its 16 keys' k and v in registers, as
// left operands for the first two products. To have registers for them, it computes the scores for 32 of the 64 rows at
// a time. In a step a warp then takes 64 ldmatrix, 512 bytes each, for 128 mma.m16n8k16.
//
// With kAddsDq there is a fifth product, dq = ds k, and the dq kernel is not needed: 5 products instead of 7. The fifth
// product sums over the CTA's keys, but each warp has ds for only 16. Every warp therefore writes its ds^T to shared
// memory, and after a barrier multiplies ds for 32 rows and all 64 keys by 32 columns of k. Let r be the row's element
// in AttendGradIn::rounding_unit, a power of two. A step's sums are rounded to multiples of r / 2^23 and added to dq in
// L2. r is so large that all these additions are exact. Their order therefore does not change the result, and dq has
// the same bits in every run. For the fifth product, a warp executes 16 ldmatrix and 32 mma per step. With kAddsDq, the
// kernel reads two numbers for each query row, which include the gate (nsa/gpu/row_stats.cuh). Without kAddsDq, the
// kernel reads lse, delta and the gate.
//
// In all branches but the window branch, many more rows see the first keys than the last ones. The rows that see a key
// block are therefore divided into pieces (KeyWork), and each CTA computes one piece. There are three ways:
//   - In the selected branch, a piece's tokens have a fixed limit (PiecePlan).
//   - find_work() divides each block's rows into about equally large pieces.
//   - find_part() cuts all blocks' rows at the same tokens.
// A second kernel adds the pieces' partial sums for a block in order.
#include <algorithm>
#include <optional>

#include "kernels/nsa/gpu/add_dq.cuh"
#include "kernels/nsa/gpu/attend.cuh"
#include "kernels/nsa/gpu/dkdv_merge.cuh"
#include "kernels/nsa/gpu/row_stats.cuh"

namespace triad::cuda {
namespace {

template <class T>
struct DkdvArgs {
  Attend<T> in;
  View<const T> dout;
  View<const float> lse, delta, gate;  // used without kAddsDq only
  GradView dk, dv;
  KeyRange range;
  KeyWorkList list;
  Divisor key_stride;  // range.d, the tokens from one key to the next, as a divisor
  RowVectors q_rows, dout_rows;
  // Whether 16-byte copies can load all rows of q and dout: q_rows and dout_rows both fit, and the widths of q and dout
  // are multiples of 64, so that no zero columns have to be appended.
  bool whole_rows;
  // The next members are used with kAddsDq only. Then whole_rows is true, and q, k, v and dout have Tile::kColumns
  // columns.
  const RowStats* row_stats;  // the result of compute_row_stats() for this call
  View<const float> rounding_unit;
  View<float> dq;
  RowVectors dq_rows;
  // If positive: the tokens first_token + i * part_tokens, i = 1, 2, ..., divide every block's rows into pieces
  // (find_part). If 0: find_work() divides each block's rows, or reads the pieces from `list`.
  int part_tokens;
};

// The numbers that the kernel keeps in shared memory for each query row in a step, in addition to q and dout. range:
// among the CTA's keys, the row sees exactly [range.x, range.y). range.x may lie before the CTA's first key. range.y is
// at most where the CTA's keys end.
template <int kCount, bool kAddsDq>
struct StageRows {
  float lse[kCount], delta[kCount], gate[kCount];
  int2 range[kCount];
};
// With kAddsDq, a row has its RowStats instead of lse, delta and gate, and two numbers for add_dq():
//   rounding_unit  a power of two r. add_dq() rounds what it adds to dq to multiples of r / 2^23.
//   dq_place       where the row's dq begins, in 16-byte vectors after the dq of the first query row in the sequence
//                  and group
// A row that doesn't exist has an existing row's dq_place. This is harmless if k is finite: the row's ds is 0, so
// add_dq() adds zeros.
template <int kCount>
struct StageRows<kCount, true> {
  RowStats stats[kCount];
  int2 range[kCount];
  float rounding_unit[kCount];
  uint32_t dq_place[kCount];
};

// Computes one piece of work (KeyWork) for Tile::kRows keys and kColumns columns of dk and dv. It is one function
// because its phases share nearly all their state: the loads, the step and the epilogue use the same piece and shared
// memory layout, and dk, dv and the key fragments stay in registers from the first step to the last, across the
// barriers. The parts that need less state, the products and add_dq(), are functions already. The grid:
//   x  the piece
//   y  the sequence b and the group g, as b * Hkv + g
//   z  the chunk of kColumns columns, times the key tiles per block, plus the key tile
// Shared memory, in this order:
//   k [keys][dk], v [keys][dv]
//   the piece's tokens, in the selected branch if Tile::kHoldsTokens: kWorkTokens or, with kAddsDq, kDqWorkTokens
//   ds^T [keys][rows], with kAddsDq
//   for each buffer (a.in.stages in all): q [rows][dk], dout [rows][dv] and StageRows
// At small heads in bf16, the launch bounds leave registers for 12 warps per SM: three CTAs with four warps, or two
// with six warps (WideTile). Where shared memory is smaller than Hopper's, fewer four-warp CTAs may fit.
template <class T, class Tile, bool kAddsDq>
__global__ void __launch_bounds__(Tile::kThreads, resident_ctas<T, Tile>(12 * 32 / Tile::kThreads, 2))
    bwd_dkdv_portable_kernel(const DkdvArgs<T> a) {
  constexpr int kCount = Tile::kKeys, kColumns = Tile::kColumns;  // rows per step; this CTA's output columns
  const int depth_k = padded_depth<Tile>(a.in.depth_k), stride_k = padded_stride<T, Tile>(a.in.depth_k);
  const int depth_v = padded_depth<Tile>(a.in.depth_v), stride_v = padded_stride<T, Tile>(a.in.depth_v);
  const int b = blockIdx.y / a.in.groups, g = blockIdx.y % a.in.groups;
  const int key_tiles = ceil_div(a.list.block_keys, Tile::kRows);  // key tiles per block
  const int key_tile = blockIdx.z % key_tiles, column0 = blockIdx.z / key_tiles * kColumns;
  const DocumentRange range(a.range, b);
  const KeyWork work =
      kAddsDq && a.part_tokens > 0
          ? find_part(a.list, range, a.range.keys, a.in.tokens, blockIdx.x, blockIdx.y, a.part_tokens, a.in.first_token)
          : find_work(a.list, range, a.range.keys, a.in.tokens, blockIdx.x, blockIdx.y, gridDim.y, a.in.first_token);
  if (work.count < 0) return;
  const int2 block_keys = keys_of_block(a.list, a.range, b, work.block);
  const int key0 = block_keys.x + key_tile * Tile::kRows, key_end = min(block_keys.y, key0 + Tile::kRows);
  if (key0 >= key_end) return;

  T* k = reinterpret_cast<T*>(dynamic_shared());
  T* v = k + Tile::kRows * stride_k;
  int* held = reinterpret_cast<int*>(v + Tile::kRows * stride_v);
  // No branch with block lists uses WideTile. With WideTile, is_listed is therefore false at compile time, and the
  // kernel contains no code for lists.
  const bool is_listed = !std::is_same_v<Tile, WideTile> && a.list.tokens != nullptr;
  constexpr int kHeld = kAddsDq ? kDqWorkTokens : kWorkTokens, kStrideDs = tile_stride<T>(kCount);
  T* shared_ds = reinterpret_cast<T*>(held + (is_listed && Tile::kHoldsTokens ? kHeld : 0));
  auto* stages = reinterpret_cast<unsigned char*>(shared_ds + (kAddsDq ? Tile::kRows * kStrideDs : 0));
  using Rows = StageRows<kCount, kAddsDq>;
  const int stage_bytes = kCount * (stride_k + stride_v) * static_cast<int>(sizeof(T)) + sizeof(Rows);
  const auto load_keys = [&](T* to, int stride, int depth, const View<const T>& view) {
    load_rows<Tile::kRows, Tile::kThreads>(to, stride, depth, view, [&](int r) -> const T* {
      return key0 + r < key_end ? view.at(b, key0 + r, g) : nullptr;
    });
  };
  load_keys(k, stride_k, depth_k, a.in.k);
  load_keys(v, stride_v, depth_v, a.in.v);
  const int* listed = held;  // the piece's tokens, in the selected branch
  if (is_listed) {
    const int* tokens = a.list.tokens + blockIdx.y * a.list.tokens_stride + work.first;
    if constexpr (Tile::kHoldsTokens) {
      for (int i = threadIdx.x; i < work.count; i += Tile::kThreads) held[i] = tokens[i];
      __syncthreads();
    } else {
      listed = tokens;
    }
  }
  const int G = a.in.heads.value(), rows = work.count * G;
  const auto token_of = [&](int i) { return is_listed ? listed[i] : work.first + i; };

  // Loads the rows row0 to row0 + kCount - 1 into shared memory buffer `stage`: q, dout and StageRows. If a.whole_rows
  // is true, eight threads copy a row of q and dout, 16 bytes per copy. A thread computes its row's token and head once
  // for both copies, because this computation takes more instructions than the copies do. If a.whole_rows is false,
  // load_rows() copies q and then dout, and appends zeros to rows with fewer than depth_k or depth_v columns.
  constexpr int kCopy = 16 / sizeof(T), kLanes = 8, kCopiedRows = Tile::kThreads / kLanes;
  const int copy_row = threadIdx.x / kLanes, copy_column = threadIdx.x % kLanes * kCopy;
  const auto* q_from = reinterpret_cast<const uint4*>(a.in.q.at(b, 0, g * G) + copy_column);
  const auto* dout_from = reinterpret_cast<const uint4*>(a.dout.at(b, 0, g * G) + copy_column);
  // stats_from and units: statistics and rounding_unit for this sequence and group. Only kAddsDq uses them.
  const RowStats* stats_from = a.row_stats + blockIdx.y * static_cast<int64_t>(a.in.tokens - a.in.first_token) * G;
  const HeadRows<const float> units(a.rounding_unit, b, g * G);
  const auto load = [&](int row0, int stage) {
    T* q = reinterpret_cast<T*>(stages + stage * stage_bytes);
    T* dout = q + kCount * stride_k;
    auto* stage_rows = reinterpret_cast<Rows*>(dout + kCount * stride_v);
    if (kAddsDq || a.whole_rows) {
#pragma unroll
      for (int j = 0; j < kCount / kCopiedRows; ++j) {
        const int r = copy_row + j * kCopiedRows, row = min(row0 + r, rows - 1), bytes = row0 + r < rows ? 16 : 0;
        const int i = a.in.heads.quotient(row), t = token_of(i), h = row - i * G;
        const uint4* q_row = q_from + a.q_rows.at(t, h);
        const uint4* dout_row = dout_from + a.dout_rows.at(t, h);
        for (int c = 0; c < depth_k; c += kLanes * kCopy)
          copy_async_16(q + r * stride_k + copy_column + c, q_row + c / kCopy, bytes);
        for (int c = 0; c < depth_v; c += kLanes * kCopy)
          copy_async_16(dout + r * stride_v + copy_column + c, dout_row + c / kCopy, bytes);
      }
    } else {
      const auto load_query = [&](T* to, int stride, int depth, const View<const T>& view) {
        load_rows<kCount, Tile::kThreads>(to, stride, depth, view, [&](int r) -> const T* {
          if (row0 + r >= rows) return nullptr;
          const int i = a.in.heads.quotient(row0 + r);
          return view.at(b, token_of(i), g * G + row0 + r - i * G);
        });
      };
      load_query(q, stride_k, depth_k, a.in.q);
      load_query(dout, stride_v, depth_v, a.dout);
    }
    static_assert(Tile::kThreads >= 2 * kCount);
    if (threadIdx.x >= 2 * kCount) return;
    const int r = threadIdx.x % kCount;
    const bool exists = row0 + r < rows;
    // Two threads load query row row0 + r's numbers. If this row doesn't exist, they use another row's token t and head
    // h, so that all addresses below are valid. They still write zeros to shared memory instead of the other row's
    // numbers, because `exists` is false. dq_place becomes the other row's, and add_dq() adds zeros to its dq.
    const int row = exists ? row0 + r : max(0, row0 + r - kCount);
    const int i = a.in.heads.quotient(row), t = token_of(i), h = row - i * G, head = g * G + h;
    if (threadIdx.x < kCount) {
      if constexpr (kAddsDq) {
        copy_async_8(&stage_rows->stats[r], stats_from + (t - a.in.first_token) * G + h, exists);
      } else {
        copy_async_4(&stage_rows->lse[r], a.lse.at(b, t, head), exists);
        copy_async_4(&stage_rows->delta[r], a.delta.at(b, t, head), exists);
      }
    } else {
      // In shared memory, k and v are zeros after the block's last key. No query row may see them.
      const int2 seen = exists ? make_int2(range.low(t), min(range.high(t, a.key_stride), key_end)) : make_int2(0, 0);
      stage_rows->range[r] = seen;
      if constexpr (kAddsDq) {
        copy_async_4(&stage_rows->rounding_unit[r], units.at(t, h), exists);
        stage_rows->dq_place[r] = a.dq_rows.at(t - a.in.first_token, h);
      } else if (a.gate.data != nullptr) {
        copy_async_4(&stage_rows->gate[r], a.gate.at(b, t, g), exists);
      } else {
        stage_rows->gate[r] = 1.0f;
      }
    }
  };

  // kKeepsKeys: a warp keeps its 16 keys' k and v in registers. kInterleaved: after it has loaded them, the warp
  // reorders its keys' columns in shared memory (interleave_columns()), as add_from_registers() requires. kRowsAtOnce:
  // how many query rows a warp computes scores for at a time; a step has kCount query rows.
  constexpr bool kKeepsKeys = std::is_same_v<T, __nv_bfloat16> && Tile::kColumns == kDepth;
  constexpr bool kInterleaved = kAddsDq && kKeepsKeys && kAddsVectors;
  constexpr int kRowsAtOnce = kKeepsKeys ? 32 : kCount;
  constexpr bool kOneChunk = Tile::kColumns == kSmallHeads;  // one CTA has all columns, and column0 is 0
  const bool has_dk = kOneChunk || kAddsDq || column0 < a.dk.width;
  const bool has_dv = kOneChunk || kAddsDq || column0 < a.dv.width;
  const int warp_row = 16 * (threadIdx.x / 32), warp_key = key0 + warp_row;
  const float scale = a.in.scale_log2();
  float dk[kColumns / 8][4] = {}, dv[kColumns / 8][4] = {};
  uint32_t k_fragment[kDepth / 16][4], v_fragment[kDepth / 16][4];
  if constexpr (kKeepsKeys) {
    copy_async_wait();
    __syncthreads();
    load_left_operand(k_fragment, k + warp_row * stride_k, stride_k);
    load_left_operand(v_fragment, v + warp_row * stride_v, stride_v);
    if constexpr (kInterleaved) interleave_columns(k + warp_row * stride_k, stride_k);
  }
  const int steps = ceil_div(rows, kCount);
  int steps_done = 0, next_step = is_listed ? 0 : first_step(a.range, a.in.tokens, steps, work.first * G / kCount);
  pipeline<int>(
      a.in.stages,
      [&](int& next) {
        next = next_step * kCount;
        if (++next_step == steps) next_step = 0;
        return steps_done++ < steps;
      },
      load,
      [&](int now, int stage) {
        const T* q = reinterpret_cast<const T*>(stages + stage * stage_bytes);
        const T* dout = q + kCount * stride_k;
        const auto& stage_rows = *reinterpret_cast<const Rows*>(dout + kCount * stride_v);
        const int2 first = stage_rows.range[0];
        const int2 last = stage_rows.range[min(kCount, rows - now) - 1];
        // Neither bound decreases from row to row. This step's rows therefore see keys in [first.x, last.y) only.
        // `skips`: no row sees this warp's keys, so the warp computes no products for dk and dv. Without kAddsDq the
        // warp then leaves the step. With kAddsDq it stores ds = 0 for the other warps, and the CTA leaves the step
        // only if no row sees any of its keys.
        const bool skips = warp_key >= key_end || last.y <= warp_key || first.x >= warp_key + 16;
        if (kAddsDq ? last.y <= key0 || first.x >= key_end : skips) return;
        const bool all = now + kCount <= rows && last.x <= warp_key && first.y >= warp_key + 16;

#pragma unroll 1
        for (int row0 = 0; row0 < kCount; row0 += kRowsAtOnce) {
          float p[kRowsAtOnce / 8][4] = {}, ds[kRowsAtOnce / 8][4] = {};
          if (!kAddsDq || !skips) {
            if constexpr (kKeepsKeys) {
              multiply_nt<kRowsAtOnce>(p, k_fragment, q + row0 * stride_k, stride_k);
              multiply_nt<kRowsAtOnce>(ds, v_fragment, dout + row0 * stride_v, stride_v);
            } else {
              multiply_nt<kRowsAtOnce>(p, k + warp_row * stride_k, q + row0 * stride_k, stride_k, depth_k);
              multiply_nt<kRowsAtOnce>(ds, v + warp_row * stride_v, dout + row0 * stride_v, stride_v, depth_v);
            }
            // Products are transposed here: element [j][e] of p and ds belongs to the query row with index query_row(j,
            // e) in the stage.
            const auto query_row = [row0](int j, int e) { return row0 + 8 * j + fragment_column() + e % 2; };
            // stats[j] has two rows' statistics: x and y are lse and dpsum for row query_row(j, 0), z and w for row
            // query_row(j, 1).
            float4 stats[kAddsDq ? kRowsAtOnce / 8 : 1];
            if constexpr (kAddsDq)
#pragma unroll
              for (int j = 0; j < kRowsAtOnce / 8; ++j)
                stats[j] = *reinterpret_cast<const float4*>(&stage_rows.stats[query_row(j, 0)]);
#pragma unroll
            for (int j = 0; j < kRowsAtOnce / 8; ++j)
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                float lse;
                if constexpr (kAddsDq)
                  lse = e % 2 == 0 ? stats[j].x : stats[j].z;
                else
                  lse = stage_rows.lse[query_row(j, e)] * kLog2e;
                p[j][e] = exp2_approx(fmaf(p[j][e], scale, -lse));
              }
            // Clears unseen keys' p. Without kAddsDq, a row that sees no key has lse = -inf and p = inf. At this point
            // ds holds dout v. If that is infinite, p = 0 alone would make ds NaN, so ds is cleared too.
            if (!all) {
#pragma unroll
              for (int j = 0; j < kRowsAtOnce / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                  const int2 seen = stage_rows.range[query_row(j, e)];
                  const int key = warp_key + fragment_row() + 8 * (e / 2);
                  if (key < seen.x || key >= seen.y) p[j][e] = ds[j][e] = 0.0f;
                }
            }
#pragma unroll
            for (int j = 0; j < kRowsAtOnce / 8; ++j)
#pragma unroll
              for (int e = 0; e < 4; ++e)
                if constexpr (kAddsDq) {
                  ds[j][e] = p[j][e] * (ds[j][e] - (e % 2 == 0 ? stats[j].y : stats[j].w));
                } else {
                  const float delta = stage_rows.delta[query_row(j, e)], gate = stage_rows.gate[query_row(j, e)];
                  ds[j][e] = score_gradient<T>(p[j][e], fmaf(gate, ds[j][e], -delta), a.in.alone);
                  p[j][e] *= gate;
                }
          }
          if constexpr (kAddsDq) {
#pragma unroll
            for (int j = 0; j < kRowsAtOnce / 8; ++j)
#pragma unroll
              for (int i = 0; i < 2; ++i)
                *reinterpret_cast<uint32_t*>(shared_ds + (warp_row + fragment_row() + 8 * i) * kStrideDs + row0 +
                                             8 * j + fragment_column()) = pack_bf16(ds[j][2 * i], ds[j][2 * i + 1]);
          }
          if (!kAddsDq || !skips) {
            if (has_dv) multiply_nn<kRowsAtOnce, kColumns>(dv, p, dout + row0 * stride_v + column0, stride_v);
            if (has_dk) multiply_nn<kRowsAtOnce, kColumns>(dk, ds, q + row0 * stride_k + column0, stride_k);
          }
        }
        if constexpr (kAddsDq) {
          __syncthreads();  // every warp has written its ds
          // No warp reads the stage's q and dout any more. Without kInterleaved, add_dq() stores its sums in their
          // memory.
          static_assert(2 * kCount * kColumns * sizeof(T) >= Tile::kThreads / 32 * kDqSide * kDqSide * sizeof(float));
          float* sums = reinterpret_cast<float*>(stages + stage * stage_bytes);
          add_dq<Tile, kInterleaved>(shared_ds, kStrideDs, k, stride_k, sums, stage_rows,
                                     a.dq.at(b, a.in.first_token, g * G), a.in.scale);
        }
      });

  const int width = a.dk.width + a.dv.width;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = warp_key + fragment_row() + 8 * i;
    if (key >= key_end) continue;
    float* partial = a.list.partial;
    if (work.slot >= 0) partial += (static_cast<int64_t>(work.slot) * a.list.block_keys + key - block_keys.x) * width;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int column = column0 + 8 * j + fragment_column();
      const float dk0 = dk[j][2 * i] * a.in.scale, dk1 = dk[j][2 * i + 1] * a.in.scale;
      if (work.slot >= 0) {
        store_pair(partial + column, a.dk.width - column, dk0, dk1);
        store_pair(partial + a.dk.width + column, a.dv.width - column, dv[j][2 * i], dv[j][2 * i + 1]);
      } else {
        a.dk.store(b, key, g, column, dk0, dk1);
        a.dv.store(b, key, g, column, dv[j][2 * i], dv[j][2 * i + 1]);
      }
    }
  }
}

// Queues the kernel and the merge that adds the pieces' partial sums.
template <class T, class Tile, bool kAddsDq>
void launch_dkdv(Context& ctx, const char* op, const TilePlan& plan, const AttendGradOut& out, const AttendGradIn& grad,
                 const AttendIn& in, const KeyRange& range, const KeyWorkList& list, const Tensor& row_stats,
                 int part_tokens) {
  static_assert(sizeof(StageRows<Tile::kKeys, kAddsDq>) == Tile::kKeys * (kAddsDq ? kDqDkDvRowBytes : kDkdvRowBytes));
  DkdvArgs<T> a{make_attend<T>(op, in, grad, plan.stages),
                make_query_view<const T>(in, grad.dout),
                make_query_view<const float>(in, grad.lse),
                make_query_view<const float>(in, grad.delta),
                make_query_view<const float>(in, grad.gate),
                make_grad_view(out.dk),
                make_grad_view(out.dv),
                range,
                list,
                Divisor(range.d)};
  const int64_t heads = in.q.size(2) / in.k.size(2);
  a.q_rows = row_vectors(a.in.q, a.in.tokens, heads);
  a.dout_rows = row_vectors(a.dout, a.in.tokens, heads);
  a.whole_rows = a.q_rows.fits && a.in.q.width == a.in.depth_k && a.dout_rows.fits && a.dout.width == a.in.depth_v;
  if constexpr (kAddsDq) {
    TRIAD_CHECK(a.whole_rows,
                "{}: q {} or dout {} has rows of other than 16-byte vectors, or more than 64 GiB per sequence", op,
                in.q.str(), grad.dout.str());
    a.row_stats = reinterpret_cast<const RowStats*>(row_stats.data);
    a.rounding_unit = make_query_view<const float>(in, grad.rounding_unit);
    a.dq = make_query_view<float>(in, out.dq);
    a.dq_rows = row_vectors(a.dq, a.in.tokens, heads);
    TRIAD_CHECK(a.dq_rows.fits, "{}: dq {} has rows of other than 16-byte vectors, or more than 64 GiB per sequence",
                op, out.dq.str());
    a.part_tokens = part_tokens;
  }
  const auto bgs = static_cast<unsigned>(in.k.size(0) * in.k.size(2));
  const int64_t chunks = ceil_div(std::max(a.dk.width, a.dv.width), Tile::kColumns);
  const auto grid_z = static_cast<unsigned>(chunks * ceil_div(list.block_keys, Tile::kRows));
  launch(ctx, op, bwd_dkdv_portable_kernel<T, Tile, kAddsDq>, dim3(list.pieces, bgs, grid_z), dim3(Tile::kThreads),
         plan.bytes, a);
  merge_dkdv(ctx, op, {list, a.dk, a.dv, range, a.in.tokens, a.in.groups, part_tokens, a.in.first_token}, bgs);
}

// Queues the kernels that compute dq, dk and dv: row statistics, this file's kernel with kAddsDq, and the merge. If
// `wide` has a value, it is WideTile's plan, and the kernel uses that tile. In this case `list` must have 96-key blocks
// and no tokens (list.tokens is null). If `wide` has no value, choose_tile() chooses the tile. The caller has checked
// that the operands are bf16 and the heads are (64, 64) or (128, 128). For these heads choose_tile() never returns
// CompactTile.
void run_dq_dk_dv(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                  const KeyRange& range, const KeyWorkList& list, int part_tokens,
                  const std::optional<TilePlan>& wide = std::nullopt) {
  Scratch::Scope scope(ctx.scratch);
  const Tensor row_stats = compute_row_stats(ctx, scope, grad, in);
  TRIAD_CHECK(!wide || list.tokens == nullptr, "{}: WideTile has no lists of tokens", op);
  if (wide)
    return launch_dkdv<__nv_bfloat16, WideTile, true>(ctx, op, *wide, out, grad, in, range, list, row_stats,
                                                      part_tokens);
  dispatch_attend(ctx, op, PortableKernel::dq_dk_dv, in, list.tokens != nullptr ? kDqWorkTokens : 0,
                  [&]<class T, class Tile>(const TilePlan& plan) {
                    if constexpr (std::is_same_v<T, __nv_bfloat16> && !std::is_same_v<Tile, CompactTile>)
                      launch_dkdv<T, Tile, true>(ctx, op, plan, out, grad, in, range, list, row_stats, part_tokens);
                  });
}

constexpr int64_t kPieces = 1024;  // wanted pieces per call, about 8 for each of an H100's 132 SMs

// Returns the work list for a branch whose tokens see one key range (window, compressed, dense), with block_keys keys
// and `parts` pieces per block.
KeyWorkList contiguous_list(Scratch::Scope& scope, const AttendIn& in, const KeyRange& range, int64_t parts,
                            int block_keys = kRows) {
  const int64_t bgs = in.k.size(0) * in.k.size(2), blocks = ceil_div(range.keys, block_keys);
  const int64_t width = in.k.size(3) + in.v.size(3);
  KeyWorkList list{
      .block_keys = block_keys, .blocks = static_cast<int>(blocks), .pieces = static_cast<int>(blocks * parts)};
  if (parts > 1) list.partial = scope.alloc(DType::f32, {bgs * blocks * parts, block_keys, width}).ptr<float>();
  return list;
}

}  // namespace

void dkdv_portable(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                   const KeyRange& range, const KeyWorkList& list) {
  dispatch_attend(ctx, op, PortableKernel::dkdv, in, list.tokens != nullptr ? kWorkTokens : 0,
                  [&]<class T, class Tile>(const TilePlan& plan) {
                    launch_dkdv<T, Tile, false>(ctx, op, plan, out, grad, in, range, list, Tensor{}, 0);
                  });
}

void backward_listed_portable(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                              const AttendIn& in, const KeyRange& range, const KeyWorkList& list) {
  run_dq_dk_dv(ctx, op, out, grad, in, range, list, 0);
}

void backward_range_portable(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                             const AttendIn& in, const KeyRange& range) {
  if (in.k.size(0) == 0 || range.keys == 0) return;  // no work, and partial_bytes below would be 0
  Scratch::Scope scope(ctx.scratch);
  // In the window branch few tokens see a block, so each block's tokens are divided separately (find_work).
  if (range.window < end_token(in))
    return run_dq_dk_dv(ctx, op, out, grad, in, range, contiguous_work(scope, in, range), 0);
  const std::optional<TilePlan> wide = plan_wide_tile(
      {.element_bytes = size_of(in.q.dtype), .dk = in.q.size(3), .dv = in.v.size(3)}, range.keys, shared_limits(ctx));
  const int block_keys = wide ? WideTile::kRows : kRows;
  const int64_t blocks = in.k.size(0) * in.k.size(2) * ceil_div(range.keys, block_keys), T = in.q.size(1);
  // The tokens are cut into equally long parts. Short parts help concurrently running CTAs to keep q, dout and dq in
  // L2. There are therefore as many parts as two limits allow: a part has at least kLeastRows query rows, and all
  // parts' partial sums take at most kMostPartial bytes. With kPieces blocks or more, there is only one part.
  constexpr int64_t kLeastRows = 768, kMostPartial = 128 << 20;
  const int64_t partial_bytes = blocks * block_keys * (in.k.size(3) + in.v.size(3)) * int64_t{4};
  const int64_t wanted = std::min(kMostPartial / partial_bytes, T * (in.q.size(2) / in.k.size(2)) / kLeastRows);
  const int64_t most_parts = blocks < kPieces ? std::max<int64_t>(1, wanted) : 1;
  const int64_t part_tokens = std::max<int64_t>(1, ceil_div(T, most_parts));
  const int64_t parts = std::max<int64_t>(1, ceil_div(T, part_tokens));
  run_dq_dk_dv(ctx, op, out, grad, in, range, contiguous_list(scope, in, range, parts, block_keys),
               static_cast<int>(part_tokens), wide);
}

KeyWorkList contiguous_work(Scratch::Scope& scope, const AttendIn& in, const KeyRange& range) {
  // A block's piece count has three limits. kMostParts: scratch grows no faster than the tokens. kPieces / blocks,
  // rounded up: more pieces would not use the GPU better. Tokens / kLeastTokens: pieces don't become too small.
  constexpr int64_t kMostParts = 16, kLeastTokens = 128;
  const int64_t blocks = in.k.size(0) * in.k.size(2) * ceil_div(range.keys, kRows);
  if (blocks == 0) return {};
  return contiguous_list(
      scope, in, range,
      std::min({kMostParts, ceil_div(kPieces, blocks), std::max<int64_t>(1, in.q.size(1) / kLeastTokens)}));
}

}  // namespace triad::cuda
