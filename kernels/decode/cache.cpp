// The decoding caches on the CPU, and the shape checks. Rotation and phi are the forward pass's ops, applied to one row
// and to one block.
#include "kernels/decode/cache.h"

#include <algorithm>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"
#include "kernels/ops/rope.h"

namespace triad {

namespace {

constexpr int kCmp = static_cast<int>(Branch::cmp), kSel = static_cast<int>(Branch::sel),
              kWin = static_cast<int>(Branch::win);

// most_tokens: what a sequence's cache holds; 0: only the last tokens, however many there are.
void fill(Context& ctx, const char* op, std::span<const CacheRows> all, std::span<const CachedText> texts,
          int64_t most_tokens = 0) {
  for (const CacheRows& rows : all)
    check_tensor(op, rows.from, {1, rows.from.size(1), rows.to.size(2), rows.to.size(3)}, rows.to.dtype);
  for (const CachedText& t : texts) {
    TRIAD_CHECK(most_tokens == 0 || t.n <= most_tokens, "{}: {} tokens for a cache of {}", op, t.n, most_tokens);
    for (const auto& [to, from, of] : all)
      TRIAD_CHECK(0 <= t.b && t.b < to.size(0) && 0 <= t.begin && 1 <= t.n &&
                      t.begin / of.d + blocks_within(t.n, of.l, of.d) <= from.size(1),
                  "{}: sequence {} of {}, {} tokens from {} on of {}", op, t.b, to.str(), t.n, t.begin, from.str());
  }
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::cache_fill(ctx, all, texts);
  }
  for (const CachedText& t : texts)
    for (const auto& [to, from, of] : all) {
      const int64_t n = blocks_within(t.n, of.l, of.d), R = to.size(1);
      for (int64_t i = std::max<int64_t>(0, n - R); i < n; ++i) copy(ctx, to[t.b][i % R], from[0][t.begin / of.d + i]);
    }
}

// Checks a key/value pair with `rows` rows per sequence: one of a cache's pairs, or the new rows that extend it.
void check_pair(const char* what, const ConstTensor& k, const ConstTensor& v, const Tensor& q, int64_t rows,
                const ConstTensor& like_k, const ConstTensor& like_v) {
  const int64_t B = q.size(0), Hkv = like_k.size(2);
  check_tensor(what, k, {B, rows, Hkv, q.size(3)}, q.dtype);
  check_tensor(what, v, {B, rows, Hkv, like_v.size(3)}, q.dtype);
}

// Checks the append arguments that NSA and dense attention share, for a cache that holds S tokens.
void check_tokens(const char* op, const Tensor& q, const ConstTensor& position, const ConstTensor& cos,
                  const ConstTensor& sin, int64_t S) {
  TRIAD_CHECK(q.rank == 4 && q.size(1) == 1 && is_float(q.dtype), "{}: q is {}, not one row a sequence", op, q.str());
  check_tensor("cache: position", position, {q.size(0)}, DType::i32);
  TRIAD_CHECK(cos.rank == 2 && cos.size(0) >= S, "{}: the table of angles {} is too short for {} tokens", op, cos.str(),
              S);
  check_tensor("cache: cos", cos, {cos.size(0), q.size(3) / 2}, acc_dtype(q.dtype));
  check_tensor("cache: sin", sin, cos.shape(), cos.dtype);
}

void check_append(const NsaCache& cache, const Tensor& q, const NsaIn& in, const NsaConfig& c) {
  const int64_t S = cache.k_sel.size(1), W = cache.k_win.size(1);
  TRIAD_CHECK(W == std::min(c.w, S), "nsa_cache: a ring of {} rows for a window of {} and {} tokens", W, c.w, S);
  const auto check = [&](const char* what, const ConstTensor& k, const ConstTensor& v, int64_t rows) {
    check_pair(what, k, v, q, rows, cache.k_win, cache.v_win);
  };
  check("nsa_cache: win", cache.k_win, cache.v_win, W);
  check("nsa_cache: sel", cache.k_sel, cache.v_sel, S);
  check("nsa_cache: cmp", cache.k_cmp, cache.v_cmp, compressed_length(S, c.l, c.d));
  check("nsa_cache: raw", cache.k_raw, cache.v_raw, c.l);
  for (const int b : {kCmp, kSel, kWin}) check("nsa_cache: a row", in.k[b], in.v[b], 1);
}

// Rotates and stores the rows of sequence b's new token at position `at`.
class TokenWriter {
 public:
  TokenWriter(Context& ctx, int64_t b, int64_t at, const ConstTensor& cos, const ConstTensor& sin)
      : ctx_(ctx), b_(b), at_(at), cos_(cos.slice(0, at, at + 1)), sin_(sin.slice(0, at, at + 1)) {}

  void rotate(const Tensor& to, const ConstTensor& from) const {
    rope_forward(ctx_, to.slice(0, b_, b_ + 1), from.slice(0, b_, b_ + 1), cos_, sin_);
  }
  // Token s is stored in row s modulo the row count.
  Tensor row_of(const Tensor& rows) const {
    const int64_t row = at_ % rows.size(1);
    return rows.slice(1, row, row + 1);
  }
  void store(const Tensor& k_rows, const Tensor& v_rows, const ConstTensor& k, const ConstTensor& v) const {
    rotate(row_of(k_rows), k);
    copy(ctx_, row_of(v_rows)[b_], v[b_]);
  }

 private:
  Context& ctx_;
  int64_t b_, at_;
  ConstTensor cos_, sin_;
};

// Compresses sequence b's block that ends with token `at`, from the ring's rows in token order.
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

void nsa_cache_fill(Context& ctx, const NsaCache& cache, std::span<const CachedText> texts, const NsaIn& in,
                    ConstTensor k_cmp, ConstTensor v_cmp, const NsaConfig& c) {
  const OpScope op_scope(ctx, "nsa_cache_fill");
  const CompressionBlocks blocks = c.phi_options();
  const CacheRows all[] = {{cache.k_sel, in.k[kSel]},    {cache.v_sel, in.v[kSel]},   {cache.k_win, in.k[kWin]},
                           {cache.v_win, in.v[kWin]},    {cache.k_raw, in.k[kCmp]},   {cache.v_raw, in.v[kCmp]},
                           {cache.k_cmp, k_cmp, blocks}, {cache.v_cmp, v_cmp, blocks}};
  fill(ctx, "nsa_cache", all, texts, cache.k_sel.size(1));
}

void nsa_cache_append(Context& ctx, const NsaCache& cache, Tensor q, const NsaIn& in, ConstTensor position,
                      ConstTensor cos, ConstTensor sin, const NsaWeights& w, const NsaConfig& c) {
  const OpScope op_scope(ctx, "nsa_cache_append");
  check_tokens("nsa_cache", q, position, cos, sin, cache.k_sel.size(1));
  check_append(cache, q, in, c);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_cache_append(ctx, cache, q, in, position, cos, sin, w, c);
  }
  for (int64_t b = 0; b < q.size(0); ++b) {
    // A plan has no positions. The first complete block's end needs the most scratch.
    const int64_t at = ctx.planning ? std::min(c.l, cos.size(0)) - 1 : position.ptr<int32_t>()[b];
    const TokenWriter token(ctx, b, at, cos, sin);
    token.rotate(q, q);
    token.store(cache.k_win, cache.v_win, in.k[kWin], in.v[kWin]);
    token.store(cache.k_sel, cache.v_sel, in.k[kSel], in.v[kSel]);
    token.store(cache.k_raw, cache.v_raw, in.k[kCmp], in.v[kCmp]);
    compress_block(ctx, cache.k_cmp, cache.k_raw, b, at, w.phi_k, c.phi_options());
    compress_block(ctx, cache.v_cmp, cache.v_raw, b, at, w.phi_v, c.phi_options());
  }
}

void dense_cache_fill(Context& ctx, const DenseCache& cache, std::span<const CachedText> texts, ConstTensor k,
                      ConstTensor v) {
  const OpScope op_scope(ctx, "dense_cache_fill");
  const CacheRows all[] = {{cache.k, k}, {cache.v, v}};
  fill(ctx, "dense_cache", all, texts);
}

void dense_cache_append(Context& ctx, const DenseCache& cache, Tensor q, ConstTensor k, ConstTensor v,
                        ConstTensor position, ConstTensor cos, ConstTensor sin) {
  const OpScope op_scope(ctx, "dense_cache_append");
  check_tokens("dense_cache", q, position, cos, sin, cache.k.size(1));
  check_pair("dense_cache", cache.k, cache.v, q, cache.k.size(1), cache.k, cache.v);
  check_pair("dense_cache: a row", k, v, q, 1, cache.k, cache.v);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::dense_cache_append(ctx, cache, q, k, v, position, cos, sin);
  }
  for (int64_t b = 0; b < q.size(0); ++b) {
    const TokenWriter token(ctx, b, ctx.planning ? 0 : position.ptr<int32_t>()[b], cos, sin);
    token.rotate(q, q);
    token.store(cache.k, cache.v, k, v);
  }
}

void index_cache_fill(Context& ctx, Tensor cache, std::span<const CachedText> texts, ConstTensor k) {
  const OpScope op_scope(ctx, "index_cache_fill");
  const CacheRows rows = {cache, k};
  fill(ctx, "index_cache", {&rows, 1}, texts, cache.size(1));
}

void index_cache_append(Context& ctx, Tensor cache, Tensor q, ConstTensor k, ConstTensor position, ConstTensor cos,
                        ConstTensor sin) {
  const OpScope op_scope(ctx, "index_cache_append");
  check_tokens("index_cache", q, position, cos, sin, cache.size(1));
  check_tensor("index_cache", cache, {q.size(0), cache.size(1), 1, q.size(3)}, q.dtype);
  check_tensor("index_cache: a row", k, {q.size(0), 1, 1, q.size(3)}, q.dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::index_cache_append(ctx, cache, q, k, position, cos, sin);
  }
  for (int64_t b = 0; b < q.size(0); ++b) {
    const TokenWriter token(ctx, b, ctx.planning ? 0 : position.ptr<int32_t>()[b], cos, sin);
    token.rotate(q, q);
    token.rotate(token.row_of(cache), k);
  }
}

}  // namespace triad
