// What the general CUDA kernels of the three attention branches share: which keys a row sees, the views and sizes of a
// call, and tile shapes. nsa/gpu/fwd_dq.cuh walks the keys of 64 rows (forward, dq); nsa/dispatch/attend.cu walks the
// rows of 64 keys (dk, dv).
//
// The rows of one (sequence, group) are flattened to i = t * G + h, so that a tile of 64 rows is full for any G and the
// heads of a group share every key tile that is loaded. Softmax works in powers of 2: exp(x / sqrt(dk)) = 2^(x *
// scale_log2).
#pragma once
#include <algorithm>
#include <cmath>

#include "kernels/common/tile_mma.cuh"
#include "kernels/nsa/gpu/branch.cuh"

namespace triad::cuda {

// A tile of keys [first, end), at most as many as the tile shape has. Bit i of `members`: the i-th token of the row
// tile has listed these keys (contiguous branches: all bits).
struct KeyTile {
  int first, end;
  uint64_t members;
};

// Output columns per CTA and keys (or gathered rows) per step. Heads of up to 64 take the narrow shape; wider ones the
// wide shape, with one CTA for every 128 output columns, each of which computes the scores anew. Both make 64 products
// of 16x8x16 a warp and step, and fit their sums into registers.
struct SmallHeadTile {
  static constexpr int kColumns = 64, kKeys = 64;
};
struct LargeHeadTile {
  static constexpr int kColumns = 128, kKeys = 32;
};
// CTAs that an SM is to hold at once, which bounds the registers of a bf16 kernel; of a float one shared memory holds
// only one or two.
template <class T, class Tile>
constexpr int resident_ctas(int narrow, int wide) {
  return sizeof(T) == 4 ? 1 : (Tile::kColumns == SmallHeadTile::kColumns ? narrow : wide);
}
inline constexpr int kRows = 16 * kWarps;  // rows (in nsa/dispatch/attend.cu keys) of a CTA

// ds = p * (dp - delta). Where p is 1 but for its own rounding no other key is left and ds is 0: in f32, where it would
// show, the rounding that dp - delta leaves of two equal numbers is dropped. (In bf16 it is far below that of the
// operands.)
template <class T>
__device__ __forceinline__ float score_gradient(float p, float dp_minus_delta) {
  constexpr float kAlone = 1 - 1e-6f;
  if (std::is_same_v<T, float> && p > kAlone) return 0;
  return p * dp_minus_delta;
}

// What every kernel is given.
template <class T>
struct Attend {
  View<const T> q, k, v;
  int tokens, groups;    // T, Hkv
  Divisor heads;         // G, the heads of a group
  float scale;           // 1 / sqrt(dk)
  int depth_k, depth_v;  // dk and dv, padded to kDepth
  int stages;            // 2: the next tile is loaded while one is computed
  __device__ __forceinline__ float scale_log2() const { return scale * 1.4426950408889634f; }
};

// The padded widths as compile-time constants where the tile shape fixes them.
template <class Tile>
__device__ __forceinline__ constexpr int padded_depth(int depth) {
  return Tile::kColumns == kDepth ? kDepth : depth;
}
template <class T, class Tile>
__host__ __device__ __forceinline__ constexpr int padded_stride(int depth) {
  return tile_stride<T>(Tile::kColumns == kDepth ? kDepth : round_up(depth, Tile::kColumns));
}

// Rank 4 [B,rows,heads,width] or rank 3 [B,rows,heads].
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

template <class T>
Attend<T> make_attend(const char* op, const AttendIn& in) {
  const int64_t T_ = in.q.size(1), heads = in.q.size(2), groups = in.k.size(2), batch = in.q.size(0);
  TRIAD_CHECK(T_ * heads < (int64_t{1} << 31) - kRows, "{}: T = {} times {} heads does not fit 31 bits", op, T_, heads);
  TRIAD_CHECK(batch * groups < 65536, "{}: B = {} times Hkv = {} exceeds 65535", op, batch, groups);
  const int dk = static_cast<int>(in.q.size(3)), dv = static_cast<int>(in.v.size(3));
  return {make_view<const T>(in.q),
          make_view<const T>(in.k),
          make_view<const T>(in.v),
          static_cast<int>(T_),
          static_cast<int>(groups),
          Divisor(static_cast<int>(heads / groups)),
          static_cast<float>(1.0 / std::sqrt(static_cast<double>(dk))),
          round_up(dk, kDepth),
          round_up(dv, kDepth),
          1};
}

// Chooses the number of stages, 2 where two CTAs then still fit an SM, and returns the bytes of shared memory of a
// kernel that keeps fixed_bytes and, for each stage, stage_bytes.
template <class T>
int64_t plan_shared(const char* op, Attend<T>& a, int64_t fixed_bytes, int64_t stage_bytes) {
  constexpr int64_t kHalf = 113 * 1024, kAll = 227 * 1024;  // of an SM with 228 KB, 1 KB a CTA being the system's
  a.stages = fixed_bytes + 2 * stage_bytes <= kHalf ? 2 : 1;
  const int64_t bytes = fixed_bytes + a.stages * stage_bytes;
  TRIAD_CHECK(bytes <= kAll, "{}: heads of dk = {}, dv = {} in {} need {} bytes of shared memory; a CTA has {}", op,
              a.q.width, a.v.width, name_of(dtype_of<T>), bytes, kAll);
  return bytes;
}

// f.template operator()<T, Tile>()
template <class F>
void dispatch_attend(const AttendIn& in, F&& f) {
  const bool narrow = std::max(in.q.size(3), in.v.size(3)) <= SmallHeadTile::kColumns;
  dispatch_gpu_float(in.q.dtype, [&]<class T>() {
    if (narrow)
      f.template operator()<T, SmallHeadTile>();
    else
      f.template operator()<T, LargeHeadTile>();
  });
}

// dk or dv: as the op's dtype, or fp32.
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

// Piece i of (b, g), bg = b * Hkv + g of `count`; where the rows of every block are contiguous, the blocks' runs of
// tokens cut into equal parts.
__device__ __forceinline__ KeyWork find_work(const KeyWorkList& list, const KeyRange& range, int tokens, int i, int bg,
                                             int count) {
  if (list.work != nullptr) return list.work[static_cast<int64_t>(i) * count + bg];
  const int parts = list.pieces / list.blocks, block = i / parts, part = i % parts;
  const int key0 = block * list.block_keys, key1 = min(key0 + list.block_keys, range.keys) - 1;
  const int begin = range.first_row(key0), end = range.end_row(key1, tokens);
  const int each = (end - begin + parts - 1) / parts, first = begin + part * each;
  return {block, first, max(0, min(each, end - first)), parts > 1 ? (bg * list.blocks + block) * parts + part : -1};
}

}  // namespace triad::cuda
