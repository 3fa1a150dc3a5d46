// Shared by the attention kernels: views and sizes of a call, tile shapes, and the portable kernels' shared memory. In
// nsa/gpu/fwd_dq.cuh a CTA keeps 64 rows and iterates over key tiles (forward, dq); in nsa/gpu/dkdv.cu a CTA keeps 64
// keys and iterates over rows (dk, dv).
//
// The rows of one (sequence, group) are flattened to i = t * G + h: a tile of 64 rows is full for any G, and the heads
// of a group share every key tile that is loaded. Softmax is computed in powers of 2: exp(x / sqrt(dk)) = 2^(x *
// scale_log2).
#pragma once
#include <algorithm>
#include <cmath>

#include "kernels/common/tile_mma.cuh"
#include "kernels/nsa/gpu/branch.cuh"

namespace triad::cuda {

// A tile of keys [first, end), at most as many as the tile shape has. Bit i of `token_mask`: the i-th token of the row
// tile lists these keys (contiguous branches: all bits are set).
struct KeyTile {
  int first, end;
  uint64_t token_mask;
};

// Output columns per CTA, and keys (or gathered rows) per step. Heads up to 64 use SmallHeadTile. Larger heads use
// LargeHeadTile, with one CTA per 128 output columns; each of them recomputes the scores. Both shapes issue 64 products
// of 16x8x16 per warp and step, and keep their sums in registers.
struct SmallHeadTile {
  static constexpr int kColumns = 64, kKeys = 64;
};
struct LargeHeadTile {
  static constexpr int kColumns = 128, kKeys = 32;
};
// Resident CTAs per SM, for __launch_bounds__: they bound the registers of a bf16 kernel. Shared memory holds only one
// or two CTAs of a float kernel.
template <class T, class Tile>
constexpr int resident_ctas(int small_heads, int large_heads) {
  return sizeof(T) == 4 ? 1 : (Tile::kColumns == SmallHeadTile::kColumns ? small_heads : large_heads);
}
inline constexpr int kRows = 16 * kWarps;  // rows (nsa/gpu/dkdv.cu: keys) per CTA

// ds = p * (dp - delta). If p is 1 up to rounding, the row sees one key and ds is exactly 0. In f32 the rounding error
// of dp - delta would be visible, so it is dropped; in bf16 it is far below the rounding of the operands.
template <class T>
__device__ __forceinline__ float score_gradient(float p, float dp_minus_delta) {
  constexpr float kAlone = 1 - 1e-6f;
  if (std::is_same_v<T, float> && p > kAlone) return 0;
  return p * dp_minus_delta;
}

// The operands and sizes that every kernel takes.
template <class T>
struct Attend {
  View<const T> q, k, v;
  int tokens, groups;    // T, Hkv
  Divisor heads;         // G, the heads per group
  float scale;           // 1 / sqrt(dk)
  int depth_k, depth_v;  // dk and dv, rounded up to kDepth
  int stages;            // 2: double buffering; 1: none
  __device__ __forceinline__ float scale_log2() const { return scale * kLog2e; }
};

// The padded widths, compile-time constants where the tile shape fixes them.
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

// Sets a.stages, to 2 if two CTAs per SM then still fit, and returns the bytes of shared memory per CTA: fixed_bytes,
// and stage_bytes per stage. Throws if one stage does not fit.
template <class T>
int64_t plan_shared(const char* op, Attend<T>& a, int64_t fixed_bytes, int64_t stage_bytes) {
  constexpr int64_t kHalf = 113 * 1024, kAll = 227 * 1024;  // bytes: an SM has 228 KiB, and CUDA reserves 1 KiB per CTA
  a.stages = fixed_bytes + 2 * stage_bytes <= kHalf ? 2 : 1;
  const int64_t bytes = fixed_bytes + a.stages * stage_bytes;
  TRIAD_CHECK(bytes <= kAll, "{}: heads of dk = {}, dv = {} in {} need {} bytes of shared memory; a CTA has {}", op,
              a.q.width, a.v.width, name_of(dtype_of<T>), bytes, kAll);
  return bytes;
}

// f.template operator()<T, Tile>()
template <class F>
void dispatch_attend(const AttendIn& in, F&& f) {
  const bool small_heads = std::max(in.q.size(3), in.v.size(3)) <= SmallHeadTile::kColumns;
  dispatch_gpu_float(in.q.dtype, [&]<class T>() {
    if (small_heads)
      f.template operator()<T, SmallHeadTile>();
    else
      f.template operator()<T, LargeHeadTile>();
  });
}

// The rows of a view of sequence b, heads first_head and up. Strides fit 32 bits, so that a row's address takes two
// multiply-adds.
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

// dk or dv, in bf16 or fp32.
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

// Piece i of (b, g), bg = b * Hkv + g of `count`. Without a list of pieces, every block's rows are contiguous and cut
// into equal parts.
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
