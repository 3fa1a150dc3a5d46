// The decoding cache: shape checks, and the CPU's version, in which rotation and phi are the ops of the forward pass on
// one row and one block.
#include "kernels/decode/cache.h"

#include <algorithm>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"
#include "kernels/ops/rope.h"

namespace triad {

namespace {

constexpr int kCmp = static_cast<int>(Branch::cmp), kSel = static_cast<int>(Branch::sel),
              kWin = static_cast<int>(Branch::win);

void cache_rows(Context& ctx, Tensor to, ConstTensor from, int64_t n) {
  const int64_t R = to.size(0);
  check_tensor("nsa_cache: rows", from, {from.size(0), to.size(1), to.size(2)}, to.dtype);
  TRIAD_CHECK(n <= from.size(0), "nsa_cache: {} rows of {}", n, from.str());
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::cache_rows(ctx, to, from, n);
  }
  for (int64_t s = std::max<int64_t>(0, n - R); s < n; ++s) copy(ctx, to[s % R], from[s]);
}

void check_append(const NsaCache& cache, const Tensor& q, const NsaIn& in, const ConstTensor& position,
                  const ConstTensor& cos, const ConstTensor& sin, const NsaConfig& c) {
  TRIAD_CHECK(q.rank == 4 && q.size(1) == 1 && is_float(q.dtype), "nsa_cache: q is {}, not one row a sequence",
              q.str());
  const int64_t B = q.size(0), dk = q.size(3), Hkv = cache.k_win.size(2), dv = cache.v_win.size(3);
  const auto check_pair = [&](const char* what, const ConstTensor& k, const ConstTensor& v, int64_t rows) {
    check_tensor(what, k, {B, rows, Hkv, dk}, q.dtype);
    check_tensor(what, v, {B, rows, Hkv, dv}, q.dtype);
  };
  check_pair("nsa_cache: win", cache.k_win, cache.v_win, cache.k_win.size(1));
  check_pair("nsa_cache: a row of win", in.k[kWin], in.v[kWin], 1);
  int64_t S = cache.k_win.size(1);
  if (!cache.dense()) {
    S = cache.k_sel.size(1);
    TRIAD_CHECK(cache.k_win.size(1) == std::min(c.w, S),
                "nsa_cache: a ring of {} rows for a window of {} and {} tokens", cache.k_win.size(1), c.w, S);
    check_pair("nsa_cache: sel", cache.k_sel, cache.v_sel, S);
    check_pair("nsa_cache: cmp", cache.k_cmp, cache.v_cmp, compressed_length(S, c.l, c.d));
    check_pair("nsa_cache: raw", cache.k_raw, cache.v_raw, c.l);
    for (const int b : {kCmp, kSel}) check_pair("nsa_cache: a row", in.k[b], in.v[b], 1);
  }
  check_tensor("nsa_cache: position", position, {B}, DType::i32);
  TRIAD_CHECK(cos.rank == 2 && cos.size(0) >= S, "nsa_cache: the table of angles {} is too short for {} tokens",
              cos.str(), S);
  check_tensor("nsa_cache: cos", cos, {cos.size(0), dk / 2}, acc_dtype(q.dtype));
  check_tensor("nsa_cache: sin", sin, cos.shape(), cos.dtype);
}

// Compresses the block of sequence b that ends with token `at`, from the ring's rows in token order.
void compress_block(Context& ctx, Tensor compressed, ConstTensor ring, int64_t b, int64_t at, const PhiWeights& w,
                    const PhiOptions& o) {
  if (compressed.size(1) == 0 || at + 1 < o.l || (at + 1 - o.l) % o.d != 0) return;
  const int64_t block = (at + 1 - o.l) / o.d;
  Scratch::Scope scope(ctx.scratch);
  const Tensor rows = scope.alloc(ring.dtype, {1, o.l, ring.size(2), ring.size(3)}, "rows of a block");
  for (int64_t i = 0; i < o.l; ++i) copy(ctx, rows[0][i], ring[b][(block * o.d + i) % o.l]);
  nsa_compress_forward(ctx, compressed.slice(0, b, b + 1).slice(1, block, block + 1), rows, w, o);
}

}  // namespace

void nsa_cache_fill(Context& ctx, const NsaCache& cache, int64_t b, int64_t n, const NsaIn& in, ConstTensor k_cmp,
                    ConstTensor v_cmp) {
  const OpScope op_scope(ctx, "nsa_cache_fill");
  cache_rows(ctx, cache.k_win[b], in.k[kWin][0], n);
  cache_rows(ctx, cache.v_win[b], in.v[kWin][0], n);
  if (cache.dense()) return;
  TRIAD_CHECK(n <= cache.k_sel.size(1), "nsa_cache: {} tokens for a cache of {}", n, cache.k_sel.size(1));
  const int64_t l = cache.k_raw.size(1), blocks = std::min(cache.k_cmp.size(1), k_cmp.size(1));
  cache_rows(ctx, cache.k_sel[b], in.k[kSel][0], n);
  cache_rows(ctx, cache.v_sel[b], in.v[kSel][0], n);
  cache_rows(ctx, cache.k_raw[b], in.k[kCmp][0], n);
  cache_rows(ctx, cache.v_raw[b], in.v[kCmp][0], n);
  if (n < l || blocks == 0) return;
  // Blocks beyond the n tokens, if the pass was longer, are copied too: later tokens overwrite them before they become
  // visible.
  copy(ctx, cache.k_cmp[b].slice(0, 0, blocks), k_cmp[0].slice(0, 0, blocks));
  copy(ctx, cache.v_cmp[b].slice(0, 0, blocks), v_cmp[0].slice(0, 0, blocks));
}

void nsa_cache_append(Context& ctx, const NsaCache& cache, Tensor q, const NsaIn& in, ConstTensor position,
                      ConstTensor cos, ConstTensor sin, const NsaWeights& w, const NsaConfig& c) {
  const OpScope op_scope(ctx, "nsa_cache_append");
  check_append(cache, q, in, position, cos, sin, c);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_cache_append(ctx, cache, q, in, position, cos, sin, w, c);
  }
  const PhiOptions phi{c.phi, c.l, c.d};
  for (int64_t b = 0; b < q.size(0); ++b) {
    // A plan has no positions. The end of the first complete block needs the most scratch.
    const int64_t at = ctx.planning ? std::min(c.l, cos.size(0)) - 1 : position.ptr<int32_t>()[b];
    const ConstTensor cos_row = cos.slice(0, at, at + 1), sin_row = sin.slice(0, at, at + 1);
    const auto rotate = [&](Tensor to, ConstTensor from) {
      rope_forward(ctx, to.slice(0, b, b + 1), from.slice(0, b, b + 1), cos_row, sin_row);
    };
    const auto ring_row = [&](const Tensor& ring) {
      const int64_t row = at % ring.size(1);
      return ring.slice(1, row, row + 1);
    };
    const auto store = [&](const Tensor& k_ring, const Tensor& v_ring, int branch) {
      rotate(ring_row(k_ring), in.k[branch]);
      copy(ctx, ring_row(v_ring)[b], in.v[branch][b]);
    };
    rotate(q, q);
    store(cache.k_win, cache.v_win, kWin);
    if (cache.dense()) continue;
    store(cache.k_sel, cache.v_sel, kSel);
    store(cache.k_raw, cache.v_raw, kCmp);
    compress_block(ctx, cache.k_cmp, cache.k_raw, b, at, w.phi_k, phi);
    compress_block(ctx, cache.v_cmp, cache.v_raw, b, at, w.phi_v, phi);
  }
}

}  // namespace triad
