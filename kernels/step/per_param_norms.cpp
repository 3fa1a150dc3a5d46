// Gradient norms per parameter on the CPU, in parallel over pieces, then over parts.
#include "kernels/step/per_param_norms.h"

#include <cmath>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

template <class T>
void pieces_cpu(Context& ctx, const Tensor& partial, const ConstTensor& x, const ConstTensor& pieces) {
  parallel_for(ctx, pieces.size(0), [&](int64_t p) {
    const int64_t* piece = pieces.ptr<int64_t>() + 2 * p;
    const T* values = x.ptr<T>() + piece[0];
    double* out = partial.ptr<double>() + p * ParamNorms::count;
    out[ParamNorms::squares] = dot<double>(values, values, piece[1]);
    int64_t not_finite = 0;
    for (int64_t i = 0; i < piece[1]; ++i) not_finite += !std::isfinite(static_cast<acc_t<T>>(values[i]));
    out[ParamNorms::not_finite] = static_cast<double>(not_finite);
  });
}

}  // namespace

void per_param_norms(Context& ctx, Tensor norms, ConstTensor x, ConstTensor pieces, ConstTensor first_piece) {
  const OpScope op_scope(ctx, "per_param_norms");
  const int64_t parts = first_piece.numel() - 1;
  check_tensor("per_param_norms: norms", norms, {parts, ParamNorms::count}, DType::f64);
  check_tensor("per_param_norms: pieces", pieces, {pieces.size(0), 2}, DType::i64);
  check_tensor("per_param_norms: first_piece", first_piece, {parts + 1}, DType::i64);
  TRIAD_CHECK(x.rank == 1 && x.contiguous(), "per_param_norms: {} is no whole buffer", x.str());
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::per_param_norms(ctx, norms, x, pieces, first_piece);
  }
  Scratch::Scope scope(ctx.scratch);
  const Tensor partial = scope.alloc(DType::f64, {pieces.size(0), ParamNorms::count});
  dispatch_float(x.dtype, [&]<class T>() { pieces_cpu<T>(ctx, partial, x, pieces); });
  parallel_for(ctx, parts, [&](int64_t i) {
    const int64_t* first = first_piece.ptr<int64_t>() + i;
    for (int64_t f = 0; f < ParamNorms::count; ++f) {
      double sum = 0;
      for (int64_t p = first[0]; p < first[1]; ++p) sum += partial.ptr<double>()[p * ParamNorms::count + f];
      norms.ptr<double>()[i * ParamNorms::count + f] = sum;
    }
  });
}

}  // namespace triad
