// Matrix products through cuBLASLt and CBLAS: D = alpha * op(A) op(B) + addend, sums in fp32 (f64 for f64; f32 is never
// TF32).
#pragma once
#include <string>

#include "engine/context.h"

namespace triad {

// Device memory that cuBLASLt works in, for split sums. One piece a context, allocated by the first product on a GPU
// and outside the arena: a plan of memory has to add it. 32 MiB is what NVIDIA recommends for Hopper.
inline constexpr int64_t kMatmulWorkspaceBytes = int64_t{32} << 20;

// The memory that products on the CPU work in, mostly addresses that are never touched, once a process; the first
// product takes it where nobody did before. OpenBLAS asks for it again for ever where a limit of addresses (ulimit -v)
// refuses it; here that is an error. So a plan of memory takes it before it reads what is free.
void take_matmul_buffers();

struct MatmulOptions {
  bool trans_a = false, trans_b = false;
  double alpha = 1.0;
  bool accumulate = false;  // D += instead of D =
};

// D [M,N] T or acc  <-  A [M,K] (or [K,M] if trans_a) T, B [K,N] (or [N,K] if trans_b) T; row-major, any row stride.
// addend [M,N] of D's dtype, where given, is added before the one rounding (a residual); not together with accumulate.
void matmul(Context&, Tensor d, ConstTensor a, ConstTensor b, const MatmulOptions& = {}, ConstTensor addend = {});

// A linear layer y = x w^T, w [out,in].
// y [N,out] T overwritten  <-  x [N,in] T, w [out,in] T; addend [N,out] T as above.
void linear_forward(Context&, Tensor y, ConstTensor x, ConstTensor w, ConstTensor addend = {});
// dx [N,in] T overwritten (skipped if absent); dw [out,in] acc added to, or overwritten where it holds nothing yet (add
// false)  <-  dy [N,out] T; x, w as in forward.
void linear_backward(Context&, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor w, bool add = true);
// Its two halves, for where x is rebuilt by what runs between them.
void linear_backward_input(Context&, Tensor dx, ConstTensor dy, ConstTensor w);
void linear_backward_weight(Context&, Tensor dw, ConstTensor dy, ConstTensor x, bool add = true);

// Elements from one row of a matrix to the next, as BLAS wants it: a lone row, whose stride is never used, counts as
// dense.
inline int64_t leading_dimension(const ConstTensor& t) {
  return t.size(0) > 1 ? t.stride[0] : (t.size(1) > 0 ? t.size(1) : 1);
}

// Names and versions of the libraries behind it: "OpenBLAS 0.3.21 ..., cuBLASLt 13.0".
std::string matmul_libraries();

namespace cuda {
void matmul(Context&, Tensor d, ConstTensor a, ConstTensor b, const MatmulOptions&, ConstTensor addend);
std::string matmul_library();
}  // namespace cuda
}  // namespace triad
