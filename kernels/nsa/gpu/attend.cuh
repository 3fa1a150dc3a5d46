// What the attention kernels share: their arguments, the dispatch over the portable kernels' tile shapes
// (nsa/gpu/portable_tiles.h), tensor views, and a CTA's pieces of work. There are two kinds of portable kernels. In
// those that compute forward or dq (nsa/gpu/fwd_dq.cuh), a CTA keeps 64 query rows and iterates over key tiles. In
// those that compute dk and dv, or dq, dk and dv together (nsa/gpu/dkdv.cu), a CTA keeps 64 keys and iterates over
// query rows. With CompactTile, a CTA keeps 32 query rows or 32 keys; with WideTile, 96 keys.
//
// The query rows (t, h) of one sequence and group are flattened to i = t * G + h. A tile of 64 rows is then full for
// any G, and all heads of a group share every key tile that is loaded. Softmax is computed in powers of 2:
// exp(x / sqrt(dk)) = 2^(x * scale_log2), scale_log2 = log2(e) / sqrt(dk).
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/common/tile_mma.cuh"
#include "kernels/nsa/gpu/branch.cuh"
#include "kernels/nsa/gpu/portable_tiles.h"

namespace triad::cuda {

// A key tile that a CTA loads together: the keys [first, end), at most Tile::kKeys. token_mask's bit i says whether the
// CTA's i-th token lists these keys; in a branch without block lists all bits are 1.
struct KeyTile {
  int first, end;
  uint64_t token_mask;
};

// Returns how many resident CTAs per SM a kernel declares in __launch_bounds__. The compiler then limits a thread's
// registers so that this many CTAs fit. In bf16 the number is small_heads for 64-column tiles, and large_heads for 128
// columns. In f32 it is 1, so the compiler may give a thread up to 255 registers. Two CTAs of 128 threads with 255
// registers each fit into an SM's 65,536 registers. In f32 an SM's shared memory seldom has room for more than two
// CTAs, so fewer registers per thread would seldom let more CTAs run.
template <class T, class Tile>
constexpr int resident_ctas(int small_heads, int large_heads) {
  return sizeof(T) == 4 ? 1 : (Tile::kColumns == SmallHeadTile::kColumns ? small_heads : large_heads);
}
// How many rows a CTA keeps with most tiles (PortableTile::kRows). CompactTile has 32, and WideTile has 96.
inline constexpr int kRows = 16 * kWarps;

// Returns ds = p * (dp - delta), the score gradient for one query row and one key:
//   p      the row's softmax at this key
//   dp     gate * (the row's dout . the key's value v)
//   delta  gate * (the row's dout . the row's output o)
// The function is given dp - delta. If p is 1, all other keys have weight 0, so o equals v, and ds is 0. But dp and
// delta were rounded differently, so that dp - delta is not exactly 0. In f32 the function therefore returns 0 if p >
// alone (Attend::alone). In bf16 it doesn't, because rounding q, k, v and dout to bf16 causes far larger errors.
template <class T>
__device__ __forceinline__ float score_gradient(float p, float dp_minus_delta, float alone) {
  if (std::is_same_v<T, float> && p > alone) return 0;
  return p * dp_minus_delta;
}

// The kernel arguments that all attention kernels have: operands and sizes.
template <class T>
struct Attend {
  View<const T> q, k, v;
  int tokens, groups;       // T (with RowPart: where the call's tokens end), Hkv
  Divisor heads;            // G, the query heads per group
  float scale;              // 1 / sqrt(dk)
  int depth_k, depth_v;     // dk and dv, each rounded up to a multiple of kDepth
  int stages;               // tiles that are in shared memory at a time: 2 for double buffering, or 1
  int first_token = 0;      // the first token whose query rows the call computes (RowPart)
  float alone = 1 - 1e-6f;  // backward: a larger p counts as 1; infinity for AttendGradIn::through_lse
  __device__ __forceinline__ float scale_log2() const { return scale * kLog2e; }
};

// padded_depth() returns a product's inner dimension over dk or dv, given Attend::depth_k or Attend::depth_v.
// padded_stride() returns the elements from one row of k, q, v or dout to the next in shared memory. For kDepth-column
// tiles (SmallHeadTile, WideTile) both are compile-time constants.
template <class Tile>
__device__ __forceinline__ constexpr int padded_depth(int depth) {
  return Tile::kColumns == kDepth ? kDepth : depth;
}
template <class T, class Tile>
__host__ __device__ __forceinline__ constexpr int padded_stride(int depth) {
  return tile_stride<T>(Tile::kColumns == kDepth ? kDepth : round_up(depth, Tile::kColumns));
}

// Views a tensor [B,rows,heads,width], or [B,rows,heads] with width 1. An absent tensor has data = nullptr.
template <class T>
View<T> make_view(const BasicTensor<std::is_const_v<T>>& t) {
  View<T> v{nullptr, 0, 0, 0, 1, false};
  if (t.empty()) return v;
  v.data = t.template ptr<std::remove_const_t<T>>();
  v.batch = t.stride[0], v.row = t.stride[1], v.head = t.stride[2];
  v.width = t.rank == 4 ? static_cast<int>(t.size(3)) : 1;
  v.vector = reinterpret_cast<uintptr_t>(v.data) % 16 == 0;
  for (int i = 0; i < 3; ++i) v.vector = v.vector && (t.size(i) <= 1 || t.stride[i] * sizeof(T) % 16 == 0);
  return v;
}

// Views a tensor with one row per query: row t belongs to token t. Rows before first_token(in) do not exist.
template <class T>
View<T> make_query_view(const AttendIn& in, const BasicTensor<std::is_const_v<T>>& t) {
  View<T> v = make_view<T>(t);
  if (v.data != nullptr) v.data -= first_token(in) * v.row;
  return v;
}

// Returns a call's kernel arguments. Throws if B * Hkv exceeds 65535, the limit on the grid's y dimension. Throws if T
// * Hq plus 2 * kRows does not fit 31 bits; then no row number overflows when a kernel rounds a group's rows up to
// whole steps, which have at most 2 * kRows rows.
template <class T>
Attend<T> make_attend(const char* op, const AttendIn& in, int stages = 1) {
  const int64_t T_ = end_token(in), heads = in.q.size(2), groups = in.k.size(2), batch = in.q.size(0);
  TRIAD_CHECK(T_ * heads < (int64_t{1} << 31) - 2 * kRows, "{}: T = {} times {} heads does not fit 31 bits", op, T_,
              heads);
  TRIAD_CHECK(batch * groups < 65536, "{}: B = {} times Hkv = {} exceeds 65535", op, batch, groups);
  const int dk = static_cast<int>(in.q.size(3)), dv = static_cast<int>(in.v.size(3));
  return {make_query_view<const T>(in, in.q),
          make_view<const T>(in.k),
          make_view<const T>(in.v),
          static_cast<int>(T_),
          static_cast<int>(groups),
          Divisor(static_cast<int>(heads / groups)),
          static_cast<float>(1.0 / std::sqrt(static_cast<double>(dk))),
          round_up(dk, kDepth),
          round_up(dv, kDepth),
          stages,
          static_cast<int>(first_token(in))};
}

// The same for backward.
template <class T>
Attend<T> make_attend(const char* op, const AttendIn& in, const AttendGradIn& grad, int stages) {
  Attend<T> a = make_attend<T>(op, in, stages);
  if (grad.through_lse) a.alone = INFINITY;
  return a;
}

// Calls f.template operator()<T, Tile>(plan) with q's element type, and the tile shape and plan for the problem and the
// card. listed_tokens: as in TileProblem. Throws if no tile fits into the card's shared memory.
template <class F>
void dispatch_attend(const Context& ctx, const char* op, PortableKernel kernel, const AttendIn& in,
                     int64_t listed_tokens, F&& f) {
  const int64_t dk = in.q.size(3), dv = in.v.size(3);
  const TilePlan plan = choose_tile(kernel, {size_of(in.q.dtype), dk, dv, listed_tokens}, shared_limits(ctx));
  check_shared(ctx, op, plan.bytes, "heads of dk = {}, dv = {} in {}", dk, dv, name_of(in.q.dtype));
  dispatch_gpu_float(in.q.dtype, [&]<class T>() {
    switch (plan.shape) {
      case TileShape::small_heads:
        return f.template operator()<T, SmallHeadTile>(plan);
      case TileShape::large_heads:
        return f.template operator()<T, LargeHeadTile>(plan);
      case TileShape::compact:
        return f.template operator()<T, CompactTile>(plan);
      case TileShape::wide:
        fail("{}: choose_tile() does not choose WideTile", op);
    }
  });
}

// A view's rows in sequence b: at(r, h) is row r of head first_head + h. The strides must fit 31 bits, so that an
// address takes two multiply-adds.
template <class T>
struct HeadRows {
  T* base;
  int row, head;
  __device__ __forceinline__ HeadRows(const View<T>& v, int b, int first_head)
      : base(v.at(b, 0, first_head)), row(static_cast<int>(v.row)), head(static_cast<int>(v.head)) {}
  __device__ __forceinline__ T* at(int r, int h) const {
    return base + static_cast<int64_t>(r) * row + static_cast<int64_t>(h) * head;
  }
};

// The strides, in 16-byte vectors, of a tensor with a row per query: `token` from a token to the next, `head` from a
// head to the next. `fits` is true if every row begins at a multiple of 16 bytes, and if 32 bits hold the distance, in
// vectors, from a sequence and group's first row to any other. If `fits` is false, the strides are 0.
struct RowVectors {
  bool fits = false;
  uint32_t token = 0, head = 0;
  // Returns the distance, in vectors, from the first row to the row for token t and the group's head h.
  __device__ __forceinline__ uint32_t at(int t, int h) const {
    return static_cast<uint32_t>(t) * token + static_cast<uint32_t>(h) * head;
  }
};
// Returns the RowVectors for a tensor with `tokens` tokens per sequence and `heads` heads per group.
template <class T>
RowVectors row_vectors(const View<T>& v, int64_t tokens, int64_t heads) {
  constexpr int64_t kElements = 16 / sizeof(T);
  const int64_t token = v.row / kElements, head = v.head / kElements;
  const bool aligned = (tokens <= 1 || v.row % kElements == 0) && (heads <= 1 || v.head % kElements == 0);
  if (!v.vector || !aligned || tokens * token + heads * head > std::numeric_limits<uint32_t>::max()) return {};
  return {true, static_cast<uint32_t>(token), static_cast<uint32_t>(head)};
}

// Views dk or dv, which may be bf16 or fp32: the other type's view has data = nullptr. store() writes the column
// `column` for one key and group, or two adjacent columns.
struct GradView {
  View<__nv_bfloat16> bf16;
  View<float> f32;
  int width;
  __device__ __forceinline__ void store(int b, int key, int g, int column, float x, float y) const {
    if (f32.data != nullptr)
      store_pair(f32.at(b, key, g) + column, width - column, x, y);
    else
      store_pair(bf16.at(b, key, g) + column, width - column, x, y);
  }
  __device__ __forceinline__ void store(int b, int key, int g, int column, float x) const {
    if (f32.data != nullptr)
      f32.at(b, key, g)[column] = x;
    else
      bf16.at(b, key, g)[column] = __float2bfloat16_rn(x);
  }
};
inline GradView make_grad_view(const Tensor& t) {
  GradView v{make_view<__nv_bfloat16>(Tensor{}), make_view<float>(Tensor{}), static_cast<int>(t.size(3))};
  if (t.dtype == DType::f32)
    v.f32 = make_view<float>(t);
  else
    v.bf16 = make_view<__nv_bfloat16>(t);
  return v;
}

// Returns work piece i for sequence b and group g; bg = b * Hkv + g, and count = B * Hkv. If the work list has no piece
// table (window, compressed, dense), the function computes the piece: n contiguous tokens can see the block, and each
// of the block's `parts` pieces gets ceil(n / parts) tokens. The last pieces may get fewer tokens, or none.
// first_token: the call's first query token.
template <class Range>  // KeyRange or DocumentRange
__device__ __forceinline__ KeyWork find_work(const KeyWorkList& list, const Range& range, int keys, int tokens, int i,
                                             int bg, int count, int first_token = 0) {
  if (list.work != nullptr) return list.work[static_cast<int64_t>(i) * count + bg];
  const int parts = list.pieces / list.blocks, block = i / parts, part = i % parts;
  const int key0 = block * list.block_keys, key1 = min(key0 + list.block_keys, keys) - 1;
  const int first_row = range.first_row(key0), end = range.end_row(key1, tokens);
  const int begin = first_token == 0 ? first_row : max(first_row, first_token);
  const int each = ceil_div(end - begin, parts), first = begin + part * each;
  return {block, first, max(0, min(each, end - first)), parts > 1 ? (bg * list.blocks + block) * parts + part : -1};
}

// Returns work piece i if the tokens are cut at the same places for all blocks. The call's tokens, from first_token on,
// are divided into parts of part_tokens tokens. Piece i computes block i % blocks for the tokens in part i / blocks
// that can see the block, where blocks = list.blocks. The same part's pieces run at about the same time, so L2 holds
// the part's rows for all of them. A piece without tokens has count < 0, and its CTA does nothing. If there is only one
// part, such a piece has count 0 instead, and its CTA writes zeros to the block's dk and dv.
template <class Range>
__device__ __forceinline__ KeyWork find_part(const KeyWorkList& list, const Range& range, int keys, int tokens, int i,
                                             int bg, int part_tokens, int first_token) {
  const int parts = list.pieces / list.blocks, part = i / list.blocks, block = i % list.blocks;
  const int key0 = block * list.block_keys, last = min(key0 + list.block_keys, keys) - 1;
  const int begin = max(range.first_row(key0), first_token + part * part_tokens);
  const int end = min(range.end_row(last, tokens), first_token + (part + 1) * part_tokens);
  if (parts == 1) return {block, begin, max(0, end - begin), -1};
  return {block, begin, begin < end ? end - begin : -1, (bg * list.blocks + block) * parts + part};
}

// Returns the step with which a CTA begins. A CTA whose rows are contiguous takes its `steps` steps in a circle: from
// the returned step to the last one, then from step 0 to the step before the returned one. `at` is the CTA's first row
// number in the sequence, divided by the rows per step.
//
// In the window branch, CTAs that run at the same time have neighbouring keys and share most rows. Their returned steps
// make them all use the same rows at the same time. If each CTA began with its own first row, the rows in use would
// exceed L2 in a long sequence. In the other branches the returned step is 0, so each CTA begins with its own first
// row.
__device__ __forceinline__ int first_step(const KeyRange& range, int tokens, int steps, int at) {
  return range.window < tokens && steps > 0 ? steps - 1 - at % steps : 0;
}

// Returns x * scale, rounded to a multiple of unit / 2^23. `unit` is a power of two, and |x * scale| is less than
// 2 * unit. fp32 numbers from `unit` on are spaced by unit / 2^23 or more, so adding `unit` with x's sign rounds, and
// subtracting it again is exact.
__device__ __forceinline__ float round_to_unit(float x, float scale, float unit) {
  const float c = copysignf(unit, x);
  return __fsub_rn(fmaf(x, scale, c), c);
}

// Returns the keys [x, y) in a work list block, in sequence b. If the list has a piece table (selected branch), the
// next `further` blocks' keys are included; otherwise `further` must be 0. In packed rows, selected blocks need not
// begin at multiples of block_keys: the document tables give their bounds.
__device__ __forceinline__ int2 keys_of_block(const KeyWorkList& list, const KeyRange& range, int b, int block,
                                              int further = 0) {
  if (list.work != nullptr) {
    const DocumentRow<int> row = range.documents.row(b);
    return make_int2(row.block_begin(block, list.block_keys), row.block_end(block + further, list.block_keys));
  }
  return make_int2(block * list.block_keys, min((block + 1) * list.block_keys, range.keys));
}

}  // namespace triad::cuda
