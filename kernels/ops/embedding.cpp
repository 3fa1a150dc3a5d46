// Token embedding on the CPU. Backward sorts the rows by token (counting sort), then adds each token's rows, in
// parallel over tokens.
#include "kernels/ops/embedding.h"

#include <algorithm>
#include <limits>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

void check_embedding(const char* op, const ConstTensor& y, const ConstTensor& tokens, const ConstTensor& w) {
  TRIAD_CHECK(y.rank == 2 && w.rank == 2, "{}: rows {} and table {} are not matrices", op, y.str(), w.str());
  TRIAD_CHECK(y.size(1) == w.size(1), "{}: rows {} are not as wide as the table {}", op, y.str(), w.str());
  TRIAD_CHECK(y.size(0) <= std::numeric_limits<int32_t>::max() && w.size(0) <= std::numeric_limits<int32_t>::max(),
              "{}: rows {} of table {} are counted in 32 bits", op, y.str(), w.str());
  check_tensor(op, tokens, {y.size(0)}, DType::i32);
}

template <class T>
void forward_cpu(Context& ctx, Tensor y, ConstTensor tokens, ConstTensor w) {
  const int64_t C = y.size(1);
  parallel_for(ctx, y.size(0), [&](int64_t i) {
    std::copy_n(w.ptr<T>() + tokens.ptr<int32_t>()[i] * w.stride[0], C, y.ptr<T>() + i * y.stride[0]);
  });
}

template <class T>
void backward_cpu(Context& ctx, Tensor dw, ConstTensor dy, ConstTensor tokens) {
  using A = acc_t<T>;
  const int64_t N = dy.size(0), C = dy.size(1), V = dw.size(0);
  Scratch::Scope scope(ctx.scratch);
  // After the sort, token v's rows are rows[begins[v]] .. rows[begins[v + 1]), ascending.
  const Tensor begins_memory = scope.alloc(DType::i64, {V + 1}), rows_memory = scope.alloc(DType::i32, {N});
  int64_t* begins = begins_memory.ptr<int64_t>();
  int32_t* rows = rows_memory.ptr<int32_t>();
  parallel_for(ctx, 1, [&](int64_t) {
    const int32_t* token = tokens.ptr<int32_t>();
    std::fill_n(begins, V + 1, int64_t{0});
    for (int64_t i = 0; i < N; ++i) ++begins[token[i]];
    for (int64_t v = 0; v < V; ++v) begins[v + 1] += begins[v];  // begins[v + 1] is now where token v's rows end
    for (int64_t i = N - 1; i >= 0; --i) rows[--begins[token[i]]] = static_cast<int32_t>(i);
  });
  parallel_for(ctx, V, [&](int64_t v) {
    for (int64_t i = begins[v]; i < begins[v + 1]; ++i)
      axpy(dw.ptr<A>() + v * dw.stride[0], A{1}, dy.ptr<T>() + rows[i] * dy.stride[0], C);
  });
}

}  // namespace

void embedding_forward(Context& ctx, Tensor y, ConstTensor tokens, ConstTensor w) {
  const OpScope op_scope(ctx, "embedding_forward");
  check_embedding("embedding", y, tokens, w);
  check_tensor("embedding: y", y, y.shape(), w.dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::embedding_forward(ctx, y, tokens, w);
  }
  dispatch_float(y.dtype, [&]<class T>() { forward_cpu<T>(ctx, y, tokens, w); });
}

void embedding_backward(Context& ctx, Tensor dw, ConstTensor dy, ConstTensor tokens) {
  const OpScope op_scope(ctx, "embedding_backward");
  check_embedding("embedding backward", dy, tokens, dw);
  check_tensor("embedding backward: dw", dw, dw.shape(), acc_dtype(dy.dtype));
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::embedding_backward(ctx, dw, dy, tokens);
  }
  dispatch_float(dy.dtype, [&]<class T>() { backward_cpu<T>(ctx, dw, dy, tokens); });
}

}  // namespace triad
