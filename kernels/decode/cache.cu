// The decoding cache (decode/cache.h). One kernel fills it from a pass: it copies rows. To append a token, one kernel
// does most: a CTA rotates one head of q, or rotates and stores one group's key or value in one branch. In the
// compressed branch this CTA also compresses l tokens to a block if one ends with the new token (for phi avg and conv).
// Phi mlp needs further kernels: one gathers the tokens, two multiply few rows, one stores the block. They run on every
// step, because the queued work must not depend on the position; only the last one tests whether a block ends.
#include <algorithm>

#include "kernels/common/bthd.cuh"
#include "kernels/common/launch_pdl.cuh"
#include "kernels/decode/cache.h"
#include "kernels/decode/skinny_linear.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;

// ---- filling a cache ----

constexpr int kFillRows = 64;  // rows that a CTA copies
// The most texts and tensors in a launch, whose arguments take up to 4 KiB.
constexpr int kFillTexts = 64, kFillTensors = 8;

struct FilledText {
  int b, begin, n;
};
template <class T>
struct FilledRows {
  Bthd<const T> from;
  Bthd<T> to;
  int R, l, d, H, D;  // row count of `to`; CacheRows::of; heads; elements per row
};
template <class T>
struct Fill {
  FilledRows<T> rows[kFillTensors];
  FilledText texts[kFillTexts];
};

// blockIdx.z: the text. blockIdx.y: the tensor. blockIdx.x: 64 of the rows that the cache keeps. A thread copies V
// elements at a time.
template <class T, int V>
__global__ void __launch_bounds__(kThreads) cache_fill_kernel(Fill<T> a) {
  using Vector = std::conditional_t<V == 1, T, uint4>;
  const FilledText& text = a.texts[blockIdx.z];
  const FilledRows<T>& s = a.rows[blockIdx.y];
  const int end = blocks_within(text.n, s.l, s.d);
  const int first = max(0, end - s.R) + static_cast<int>(blockIdx.x) * kFillRows;
  const int rows = min(kFillRows, end - first), head_vectors = s.D / V, row_vectors = s.H * head_vectors;
  const int64_t from = text.begin / s.d;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * row_vectors; i += kThreads) {
    const int row = first + i / row_vectors, h = i % row_vectors / head_vectors, j = i % head_vectors * V;
    *reinterpret_cast<Vector*>(s.to.row(text.b, row % s.R, h) + j) =
        *reinterpret_cast<const Vector*>(s.from.row(0, from + row, h) + j);
  }
}

// ---- appending a token ----

// One branch's keys or values: the new row [B,1,Hkv,D], the cache's rows and, for the raw ring, the compressed blocks.
template <class T>
struct Stored {
  Bthd<const T> from;
  Bthd<T> to, blocks;
  int rows, D;       // row count of `to`; elements per row
  bool rotate, raw;  // rotate: keys; raw: the compressed branch's ring of raw rows
  const T* weight;   // [l,D] phi conv's weights; null for other phi
  int64_t weight_stride;
};
template <class T>
struct Append {
  Bthd<T> q;
  Stored<T> stored[6];  // keys and values for the window, selected and compressed branch
  const int32_t* position;
  const float *cos, *sin;
  int64_t table_stride;
  int Hq, Hkv, dk, l, d, blocks;  // l, d: block length and stride; blocks: row count of k_cmp
  bool compress;                  // phi is avg or conv: cache_append_kernel makes the block
};

template <class T>
__device__ bool ends_block(const Append<T>& a, int at) {
  return a.blocks > 0 && at + 1 >= a.l && (at + 1 - a.l) % a.d == 0;
}

// The threads that store an item: the CTA's, or a warp's.
struct Team {
  int thread, threads;
};

// Rotates a row by position `at`'s angles (ops/rope.h) from `from` to `to`, which may be the same.
template <class T>
__device__ void rotate(const Append<T>& a, const Team& team, T* to, const T* from, int at) {
  const int half = a.dk / 2;
#pragma unroll 1
  for (int j = team.thread; j < half; j += team.threads) {
    const float cos = a.cos[at * a.table_stride + j], sin = a.sin[at * a.table_stride + j];
    const float first = to_float(from[j]), second = to_float(from[j + half]);
    to[j] = from_float<T>(first * cos - second * sin);
    to[j + half] = from_float<T>(second * cos + first * sin);
  }
}

// Compresses the ring's l tokens to the block that ends with token `at`: with phi avg to their mean, with phi conv to
// their sum weighted by s.weight. Threads are columns x row parts, and parts are added in order. The rows were last
// used d steps ago and are read from memory, so each thread keeps eight loads in flight.
template <class T>
__device__ void compress_ring(const Append<T>& a, const Stored<T>& s, int b, int g, int at) {
  constexpr int kAtOnce = 8;
  __shared__ float sums[kThreads];
  const int columns = s.D <= 32 ? 32 : s.D <= 64 ? 64 : s.D <= 128 ? 128 : kThreads, parts = kThreads / columns;
  const int first = at + 1 - a.l, oldest = first % a.l;
  const int column = static_cast<int>(threadIdx.x) % columns, part = static_cast<int>(threadIdx.x) / columns;
  const T* const ring = s.to.row(b, 0, g);
#pragma unroll 1
  for (int j0 = 0; j0 < s.D; j0 += columns) {
    const int j = j0 + column;
    float sum = 0;
#pragma unroll 1
    for (int i0 = part; j < s.D && i0 < a.l; i0 += kAtOnce * parts) {
      float x[kAtOnce], weight[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int row = oldest + min(i0 + u * parts, a.l - 1);
        x[u] = to_float(ring[(row < a.l ? row : row - a.l) * s.to.stride_t + j]);
        weight[u] = 1;
      }
      if (s.weight != nullptr)
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u)
          weight[u] = to_float(s.weight[min(i0 + u * parts, a.l - 1) * s.weight_stride + j]);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u)
        if (i0 + u * parts < a.l) sum = fmaf(weight[u], x[u], sum);
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (part == 0 && j < s.D) {
#pragma unroll 1
      for (int i = 1; i < parts; ++i) sum += sums[i * columns + column];
      if (s.weight == nullptr) sum *= 1.0f / static_cast<float>(a.l);
      s.blocks.row(b, first / a.d, g)[j] = from_float<T>(sum);
    }
    __syncthreads();
  }
}

// blockIdx.y: the sequence. blockIdx.x: the item, a q head or a group in a stored tensor. kShared, for many sequences:
// the raw rows' items, the last ones, have a CTA each, because it may make a block; 8 others share a CTA, a warp each.
template <class T, bool kShared>
__global__ void __launch_bounds__(kThreads) cache_append_kernel(Append<T> a, int items, int raw_items) {
  constexpr int kWarps = kThreads / 32;
  pdl_wait();
  if (kShared) pdl_trigger();
  const int b = blockIdx.y, at = a.position[b];
  int item = blockIdx.x;
  Team team = {static_cast<int>(threadIdx.x), kThreads};
  if (kShared) {
    item += items - raw_items;
    if (item >= items) {
      item = (item - items) * kWarps + static_cast<int>(threadIdx.x) / 32;
      team = {static_cast<int>(threadIdx.x) % 32, 32};
      if (item >= items - raw_items) return;
    }
  }
  const bool query = item < a.Hq;
  const int i = query ? 0 : item - a.Hq, g = i % a.Hkv;
  const Stored<T>& s = a.stored[i / a.Hkv];
  T* const to = query ? a.q.row(b, 0, item) : s.to.row(b, at % s.rows, g);
  const T* const from = query ? to : s.from.row(b, 0, g);
  if (query || s.rotate)
    rotate(a, team, to, from, at);
  else
#pragma unroll 1
    for (int j = team.thread; j < s.D; j += team.threads) to[j] = from[j];
  if (query) return;
  if (!s.raw || !a.compress || !ends_block(a, at)) return;
  __syncthreads();
  compress_ring(a, s, b, g, at);
}

// For phi mlp: copies the ring's l tokens, oldest first, to rows [B*Hkv, l*D], and adds to token i its position
// embedding pos[i].
template <class T>
__global__ void __launch_bounds__(kThreads)
    cache_gather_block_kernel(T* rows, Append<T> a, Stored<T> s, const T* pos, int64_t pos_stride) {
  const int i = blockIdx.x, g = blockIdx.y, b = blockIdx.z, at = a.position[b];
  // The ring's oldest token is the one to be overwritten next.
  const T* const from = s.to.row(b, (at + 1 + i) % a.l, g);
  T* const to = rows + ((int64_t{b} * a.Hkv + g) * a.l + i) * s.D;
  for (int j = threadIdx.x; j < s.D; j += kThreads)
    to[j] = from_float<T>(to_float(from[j]) + to_float(pos[i * pos_stride + j]));
}
// For phi mlp: stores the compressed rows [B*Hkv, D] as blocks, if a block ends with the new token.
template <class T>
__global__ void __launch_bounds__(kThreads) cache_store_block_kernel(const T* rows, Append<T> a, Stored<T> s) {
  const int g = blockIdx.x, b = blockIdx.y, at = a.position[b];
  if (!ends_block(a, at)) return;
  T* const to = s.blocks.row(b, (at + 1 - a.l) / a.d, g);
  for (int j = threadIdx.x; j < s.D; j += kThreads) to[j] = rows[(int64_t{b} * a.Hkv + g) * s.D + j];
}

template <class T>
void compress_by_mlp(Context& ctx, const Append<T>& a, const Stored<T>& s, const PhiWeights& w, DType dtype,
                     int64_t B) {
  Scratch::Scope scope(ctx.scratch);
  const int64_t n = B * a.Hkv;
  const Tensor rows = scope.alloc(dtype, {n, int64_t{a.l} * s.D}), hidden = scope.alloc(dtype, {n, 2 * int64_t{s.D}}),
               y = scope.alloc(dtype, {n, int64_t{s.D}});
  const unsigned groups = static_cast<unsigned>(a.Hkv), batch = static_cast<unsigned>(B);
  launch(ctx, "phi's rows", cache_gather_block_kernel<T>, dim3(static_cast<unsigned>(a.l), groups, batch),
         dim3(kThreads), 0, rows.ptr<T>(), a, s, w.pos.ptr<T>(), w.pos.stride[0]);
  // Parts are equal, so that no rest of a few rows gets the kernel, and so the bits, of fewer sequences.
  const int64_t most = dtype == DType::bf16 && B > kFewSequences ? kMostRows : kFewRows, parts = ceil_div(n, most);
  for (int64_t i = 0; i < parts; ++i) {
    const int64_t first = n * i / parts, end = n * (i + 1) / parts;
    triad::skinny_linear(ctx, hidden.slice(0, first, end), rows.slice(0, first, end), w.fc1,
                         {.activation = SkinnyLinearOptions::Activation::silu});
    triad::skinny_linear(ctx, y.slice(0, first, end), hidden.slice(0, first, end), w.fc2);
  }
  launch(ctx, "phi's block", cache_store_block_kernel<T>, dim3(groups, batch), dim3(kThreads), 0, y.ptr<T>(), a, s);
}

template <class T>
Append<T> append_args(const Tensor& q, const ConstTensor& position, const ConstTensor& cos, const ConstTensor& sin,
                      int64_t Hkv) {
  Append<T> a{};
  a.q = bthd<T>(q);
  a.position = position.ptr<int32_t>();
  a.cos = cos.ptr<float>(), a.sin = sin.ptr<float>(), a.table_stride = cos.stride[0];
  a.Hq = static_cast<int>(q.size(2)), a.Hkv = static_cast<int>(Hkv), a.dk = static_cast<int>(q.size(3));
  return a;
}

// Keys are stored rotated, values as they are.
template <class T>
Stored<T> stored_keys(const Tensor& to, const ConstTensor& from) {
  return {.from = bthd<T>(from),
          .to = bthd<T>(to),
          .rows = static_cast<int>(to.size(1)),
          .D = static_cast<int>(to.size(3)),
          .rotate = true};
}
template <class T>
Stored<T> stored_values(const Tensor& to, const ConstTensor& from) {
  Stored<T> s = stored_keys<T>(to, from);
  s.rotate = false;
  return s;
}

// stored: how many tensors a.stored has, and how many of them, the last ones, are raw.
template <class T>
void launch_append(Context& ctx, const char* op, const Append<T>& a, int stored, int raw, int64_t B) {
  const int items = a.Hq + stored * a.Hkv, raw_items = raw * a.Hkv;
  const bool shared = B > kFewSequences;
  const int ctas = shared ? raw_items + ceil_div(items - raw_items, kThreads / 32) : items;
  launch_pdl(ctx, op, shared ? cache_append_kernel<T, true> : cache_append_kernel<T, false>,
             dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(B)), dim3(kThreads), 0, a, items, raw_items);
}

template <class T>
void append(Context& ctx, const NsaCache& cache, Tensor q, const NsaIn& in, ConstTensor position, ConstTensor cos,
            ConstTensor sin, const NsaWeights& w, const NsaConfig& c) {
  constexpr int kCmp = static_cast<int>(Branch::cmp), kSel = static_cast<int>(Branch::sel),
                kWin = static_cast<int>(Branch::win);
  const int64_t B = q.size(0);
  Append<T> a = append_args<T>(q, position, cos, sin, cache.k_win.size(2));
  a.l = static_cast<int>(c.l), a.d = static_cast<int>(c.d);
  a.blocks = static_cast<int>(cache.k_cmp.size(1));
  a.compress = c.phi != Phi::mlp;
  a.stored[0] = stored_keys<T>(cache.k_win, in.k[kWin]), a.stored[1] = stored_values<T>(cache.v_win, in.v[kWin]);
  a.stored[2] = stored_keys<T>(cache.k_sel, in.k[kSel]), a.stored[3] = stored_values<T>(cache.v_sel, in.v[kSel]);
  Stored<T>&raw_k = a.stored[4], &raw_v = a.stored[5];
  raw_k = stored_keys<T>(cache.k_raw, in.k[kCmp]), raw_v = stored_values<T>(cache.v_raw, in.v[kCmp]);
  raw_k.blocks = bthd<T>(cache.k_cmp), raw_v.blocks = bthd<T>(cache.v_cmp);
  raw_k.raw = raw_v.raw = true;
  if (c.phi == Phi::conv) {
    raw_k.weight = w.phi_k.w.ptr<T>(), raw_k.weight_stride = w.phi_k.w.stride[0];
    raw_v.weight = w.phi_v.w.ptr<T>(), raw_v.weight_stride = w.phi_v.w.stride[0];
  }
  launch_append(ctx, "nsa_cache_append", a, 6, 2, B);
  if (c.phi != Phi::mlp || a.blocks == 0) return;
  compress_by_mlp(ctx, a, raw_k, w.phi_k, q.dtype, B);
  compress_by_mlp(ctx, a, raw_v, w.phi_v, q.dtype, B);
}

}  // namespace

void cache_fill(Context& ctx, std::span<const CacheRows> all, std::span<const CachedText> texts) {
  TRIAD_CHECK(all.size() <= kFillTensors, "cache_fill: {} tensors, at most {}", all.size(), kFillTensors);
  bool vectors = true;
  for (const auto& [to, from, of] : all)
    vectors = vectors && all_have_vectors(static_cast<int>(16 / size_of(to.dtype)), to, from);
  dispatch_gpu_float(all[0].to.dtype, [&]<class T>() {
    Fill<T> a{};
    for (size_t i = 0; i < all.size(); ++i) {
      const auto& [to, from, of] = all[i];
      a.rows[i] = {.from = bthd<T>(from),
                   .to = bthd<T>(to),
                   .R = static_cast<int>(to.size(1)),
                   .l = static_cast<int>(of.l),
                   .d = static_cast<int>(of.d),
                   .H = static_cast<int>(to.size(2)),
                   .D = static_cast<int>(to.size(3))};
    }
    for (size_t i = 0; i < texts.size(); i += kFillTexts) {
      const std::span<const CachedText> some = texts.subspan(i, std::min<size_t>(kFillTexts, texts.size() - i));
      int64_t most_rows = 0;  // rows of one text in one tensor
      for (size_t j = 0; j < some.size(); ++j) {
        const auto& [b, begin, n] = some[j];
        a.texts[j] = {static_cast<int>(b), static_cast<int>(begin), static_cast<int>(n)};
        for (const auto& [to, from, of] : all)
          most_rows = std::max(most_rows, std::min(to.size(1), blocks_within(n, of.l, of.d)));
      }
      dispatch_vector<T>(vectors, [&]<int V>() {
        launch(ctx, "cache_fill", cache_fill_kernel<T, V>,
               dim3(static_cast<unsigned>(ceil_div(most_rows, kFillRows)), static_cast<unsigned>(all.size()),
                    static_cast<unsigned>(some.size())),
               dim3(kThreads), 0, a);
      });
    }
  });
}

void nsa_cache_append(Context& ctx, const NsaCache& cache, Tensor q, const NsaIn& in, ConstTensor position,
                      ConstTensor cos, ConstTensor sin, const NsaWeights& w, const NsaConfig& c) {
  dispatch_gpu_float(q.dtype, [&]<class T>() { append<T>(ctx, cache, q, in, position, cos, sin, w, c); });
}

void dense_cache_append(Context& ctx, const DenseCache& cache, Tensor q, ConstTensor k, ConstTensor v,
                        ConstTensor position, ConstTensor cos, ConstTensor sin) {
  dispatch_gpu_float(q.dtype, [&]<class T>() {
    Append<T> a = append_args<T>(q, position, cos, sin, cache.k.size(2));
    a.stored[0] = stored_keys<T>(cache.k, k), a.stored[1] = stored_values<T>(cache.v, v);
    launch_append(ctx, "dense_cache_append", a, 2, 0, q.size(0));
  });
}

void index_cache_append(Context& ctx, Tensor cache, Tensor q, ConstTensor k, ConstTensor position, ConstTensor cos,
                        ConstTensor sin) {
  dispatch_gpu_float(q.dtype, [&]<class T>() {
    Append<T> a = append_args<T>(q, position, cos, sin, cache.size(2));
    a.stored[0] = stored_keys<T>(cache, k);
    launch_append(ctx, "index_cache_append", a, 1, 0, q.size(0));
  });
}

}  // namespace triad::cuda
