// The sums of a taught index's backward (nsa/gpu/index.cuh): the bounds of their terms, and what they give in the end.
#include <cub/block/block_reduce.cuh>

#include "kernels/common/bthd.cuh"
#include "kernels/nsa/gpu/index.cuh"

namespace triad::cuda {
namespace {

constexpr int kSumThreads = 256, kSumWarps = kSumThreads / 32;
constexpr int kBoundTokens = 4;  // consecutive tokens of a warp of index_bounds_kernel

// The rows of one tensor: those of tokens from `first` on.
template <class T>
struct BoundedRows {
  View<const T> rows;
  int heads, first;
  unsigned* bounds;
};

// A warp takes the largest |element| of kBoundTokens tokens and adds it to the bounds of their documents; if all tokens
// of the CTA belong to one document, the CTA adds the largest of all. A maximum is the same in any order. Grid: x the
// tokens, y the sequence, z iq or ik. kVectors: elements that one load fetches.
template <class T, int kVectors>
__global__ void __launch_bounds__(kSumThreads)
    index_bounds_kernel(const __grid_constant__ BoundedRows<T> q, const __grid_constant__ BoundedRows<T> k, int tokens,
                        const DocumentView documents) {
  __shared__ float warp_most[kSumWarps];
  const BoundedRows<T>& x = blockIdx.z == 0 ? q : k;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, b = blockIdx.y;
  const int cta_begin = x.first + static_cast<int>(blockIdx.x) * kSumWarps * kBoundTokens,
            cta_end = min(cta_begin + kSumWarps * kBoundTokens, tokens);
  if (cta_begin >= cta_end) return;
  const DocumentRow<int> row = documents.row(b);
  const bool one_document = row.begin(cta_begin) == row.begin(cta_end - 1);
  const auto add = [&](int t, float most) {
    atomicMax(&x.bounds[int64_t{b} * tokens + row.begin(t)], __float_as_uint(most));
  };
  float most = 0.0f;
  for (int t = cta_begin + warp * kBoundTokens, i = 0; i < kBoundTokens && t < cta_end; ++t, ++i) {
    const int vectors = x.rows.width / kVectors;
    for (int j = lane; j < x.heads * vectors; j += 32) {
      float elements[kVectors];
      load_vector<kVectors>(elements, x.rows.at(b, t, j / vectors) + j % vectors * kVectors);
#pragma unroll
      for (int e = 0; e < kVectors; ++e) most = fmaxf(most, fabsf(elements[e]));
    }
    if (one_document) continue;
    most = warp_max(most);
    if (lane == 0) add(t, most);
    most = 0.0f;
  }
  if (!one_document) return;
  most = warp_max(most);
  if (lane == 0) warp_most[warp] = most;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kSumWarps; ++i) most = fmaxf(most, warp_most[i]);
  add(cta_begin, most);
}

struct FinishArgs {
  IndexSums sums;
  View<float> dq;
  GradView dk;
  int tokens, first_token, keys, groups, width;  // keys: the rows of dk, of which those from `tokens` on get zeros
  float index_scale;
  LossScale scale;
  DocumentView documents;
};

// Writes dk of key blockIdx.x, and dq of token blockIdx.x, of sequence blockIdx.y.
__global__ void __launch_bounds__(kSumThreads) index_finish_kernel(const __grid_constant__ FinishArgs a) {
  const int t = blockIdx.x, b = blockIdx.y;
  const double factor = a.scale.value() * static_cast<double>(a.index_scale);
  const int document = t < a.tokens ? a.documents.row(b).begin(t) : 0;
  if (t < a.keys) {
    const FixedPoint point(a.sums.bounds.query(b, document), int64_t{a.tokens} * a.groups);
    const int64_t* from = a.sums.dk + (int64_t{b} * a.tokens + t) * a.width;
    for (int i = threadIdx.x; i < a.width; i += kSumThreads)
      a.dk.store(b, t, 0, i, t < a.tokens ? static_cast<float>(factor * point.value(from[i])) : 0.0f);
  }
  if (a.sums.dq != nullptr && t >= a.first_token && t < a.tokens) {
    const FixedPoint point(a.sums.bounds.key(b, document), 1);
    const int64_t* from = a.sums.dq + (int64_t{b} * a.tokens + t) * a.groups * a.width;
    for (int i = threadIdx.x; i < a.groups * a.width; i += kSumThreads)
      a.dq.at(b, t, i / a.width)[i % a.width] = static_cast<float>(factor * point.value(from[i]));
  }
}

// Adds all CTAs' losses to the loss, in a fixed order. One CTA.
__global__ void __launch_bounds__(kSumThreads) index_loss_kernel(const double* losses, int64_t count, double* loss) {
  using Reduce = cub::BlockReduce<double, kSumThreads, cub::BLOCK_REDUCE_WARP_REDUCTIONS>;
  __shared__ typename Reduce::TempStorage storage;
  double mine = 0;
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) mine += losses[i];
  const double sum = Reduce(storage).Sum(mine);
  if (threadIdx.x == 0) *loss += sum;
}

}  // namespace

IndexBounds compute_index_bounds(Context& ctx, Scratch::Scope& scope, const IndexIn& index, const AttendIn& in) {
  const int64_t B = in.q.size(0), tokens = end_token(in), first = first_token(in);
  const Tensor bounds = scope.alloc(DType::i32, {2, B, tokens});
  zero(ctx, bounds);
  unsigned* const to = reinterpret_cast<unsigned*>(bounds.data);
  const DocumentView documents = document_view(in.documents, tokens);
  constexpr int kCtaTokens = kSumWarps * kBoundTokens;
  dispatch_gpu_float(index.q.dtype, [&]<class T>() {
    const BoundedRows<T> q{make_query_view<const T>(in, index.q), static_cast<int>(index.q.size(2)),
                           static_cast<int>(first), to},
        k{make_view<const T>(index.k), 1, 0, to + B * tokens};
    dispatch_vector<T>(all_have_vectors(kVector<T>, index.q, index.k), [&]<int kVectors>() {
      launch(ctx, "index_bounds", index_bounds_kernel<T, kVectors>, dim3(ceil_div(tokens, kCtaTokens), B, 2),
             dim3(kSumThreads), 0, q, k, static_cast<int>(tokens), documents);
    });
  });
  return {to, to + B * tokens, static_cast<int>(tokens)};
}

IndexSums make_index_sums(Context& ctx, Scratch::Scope& scope, const IndexBackward& index, const AttendIn& in,
                          int64_t ctas, bool sums_dq) {
  const int64_t B = in.q.size(0), tokens = end_token(in), di = index.in.q.size(3), groups = in.k.size(2);
  IndexSums sums{.ctas = ctas, .bounds = compute_index_bounds(ctx, scope, index.in, in)};
  const auto zeros = [&](DType dtype, const Shape& shape) {
    const Tensor t = scope.alloc(dtype, shape);
    zero(ctx, t);
    return t.data;
  };
  sums.dk = reinterpret_cast<int64_t*>(zeros(DType::i64, {B, tokens, di}));
  if (sums_dq)
    sums.dq = reinterpret_cast<int64_t*>(zeros(DType::i64, {B, tokens, groups, di}));
  else
    zero(ctx, index.dq);
  sums.losses = reinterpret_cast<double*>(zeros(DType::f64, {ctas}));
  return sums;
}

void finish_index_sums(Context& ctx, const IndexSums& sums, const IndexBackward& index, const AttendIn& in) {
  const int64_t tokens = end_token(in), keys = index.dk.size(1);
  const FinishArgs a{.sums = sums,
                     .dq = make_query_view<float>(in, index.dq),
                     .dk = make_grad_view(index.dk),
                     .tokens = static_cast<int>(tokens),
                     .first_token = static_cast<int>(first_token(in)),
                     .keys = static_cast<int>(keys),
                     .groups = static_cast<int>(in.k.size(2)),
                     .width = static_cast<int>(index.in.q.size(3)),
                     .index_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(index.in.q.size(3)))),
                     .scale = index.scale,
                     .documents = document_view(in.documents, tokens)};
  launch(ctx, "index_finish", index_finish_kernel, dim3(std::max(tokens, keys), in.q.size(0)), dim3(kSumThreads), 0, a);
  launch(ctx, "index_loss", index_loss_kernel, dim3(1), dim3(kSumThreads), 0, sums.losses, sums.ctas,
         index.loss.ptr<double>());
}

}  // namespace triad::cuda
