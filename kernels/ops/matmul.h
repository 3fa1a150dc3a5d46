// Matrix products by cuBLASLt on a GPU and CBLAS on the CPU: D = alpha * op(A) op(B) + addend. Sums are in fp32 (f64
// for f64). f32 operands are never rounded to TF32.
#pragma once
#include <string>

#include "engine/context.h"

namespace triad {

// cuBLASLt's workspace size in device memory, for split-K sums. Each context has one, which its first product on a GPU
// allocates outside the arena, so a memory plan has to add it. 32 MiB is what NVIDIA recommends for Hopper.
inline constexpr int64_t kMatmulWorkspaceBytes = int64_t{32} << 20;

// Makes OpenBLAS allocate its work buffers, once per process (mostly address space that is never written). Throws if a
// limit on addresses (ulimit -v) forbids them; OpenBLAS itself would retry forever. The first product calls this. A
// memory plan calls it earlier, before it reads how much memory is free.
void allocate_matmul_buffers();

struct MatmulOptions {
  bool trans_a = false, trans_b = false;
  double alpha = 1.0;
  bool accumulate = false;  // D += instead of D =
};

// D [M,N] T or acc overwritten, or added to with `accumulate`  <-  A [M,K] (or [K,M] if trans_a) T, B [K,N] (or [N,K]
// if trans_b) T; row-major, any row stride. addend [M,N] in D's dtype, if given, is added before the single rounding,
// as for a residual, or for a bias if it is a repeat_row(); not together with accumulate.
void matmul(Context&, Tensor d, ConstTensor a, ConstTensor b, const MatmulOptions& = {}, ConstTensor addend = {});

// The same for n products at once: each tensor is [n, ...], contiguous; D in T, and no `accumulate`. On a GPU a batch
// is one kernel, which small products need to fill it.
void matmul_batched(Context&, Tensor d, ConstTensor a, ConstTensor b, const MatmulOptions& = {},
                    ConstTensor addend = {});

// A view [N,C] whose rows are all the same row [C]: a bias, as a product's addend. Absent if the row is absent.
ConstTensor repeat_row(ConstTensor row, int64_t N);
// Whether t is a repeat_row() view with two or more rows.
inline bool is_repeated_row(const ConstTensor& t) { return t.rank == 2 && t.size(0) > 1 && t.stride[0] == 0; }

// A linear layer y = x w^T: y [N,out] T overwritten  <-  x [N,in] T, w [out,in] T; addend [N,out] T as in matmul.
void linear_forward(Context&, Tensor y, ConstTensor x, ConstTensor w, ConstTensor addend = {});
// dx [N,in] T overwritten (not computed if absent); dw [out,in] acc added to, or overwritten if add is false  <-  dy
// [N,out] T; x, w as in forward.
void linear_backward(Context&, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor w, bool add = true);
// linear_backward()'s two halves as separate calls, for callers that recompute x in between.
void linear_backward_input(Context&, Tensor dx, ConstTensor dy, ConstTensor w);
void linear_backward_weight(Context&, Tensor dw, ConstTensor dy, ConstTensor x, bool add = true);

// A matrix's leading dimension for BLAS: elements from one row to the next. For a single row, whose stride is unused,
// the row length.
inline int64_t leading_dimension(const ConstTensor& t) {
  return t.size(0) > 1 ? t.stride[0] : (t.size(1) > 0 ? t.size(1) : 1);
}

// The BLAS libraries used on the device, with versions: "OpenBLAS 0.3.21 ..., cuBLASLt 130001".
std::string matmul_libraries(Device);

namespace cuda {
// A product's algorithm on the GPU:
//   first     the algorithm that cuBLASLt's heuristic lists first
//   measured  the algorithm that ops/matmul_tuned.h names for the product's sizes
//   refused   as `first`, because cuBLASLt cannot run the algorithm that ops/matmul_tuned.h names
enum class MatmulAlgorithm { first, measured, refused };
// Multiplies matrices, or batches [n, ...], and returns the algorithm. In a planning context the function multiplies
// nothing and does not ask cuBLASLt, so it never returns `refused`.
MatmulAlgorithm matmul(Context&, Tensor d, ConstTensor a, ConstTensor b, const MatmulOptions&, ConstTensor addend);
std::string matmul_library();
}  // namespace cuda
}  // namespace triad
