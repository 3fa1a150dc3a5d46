// Linear layers on fp8 tensor cores: operands in e4m3 with a scale for each row (cast_e4m3.h), sums in fp32, results
// in the activations' dtype. The weight is cast by the op, to scratch memory, and so is no longer than its product.
#pragma once
#include <string>

#include "kernels/ops/cast_e4m3.h"

namespace triad {

// How fp8 tensor cores add. fast: about 14 bits of the sum; accurate: the sum moves to fp32 every few terms.
enum class Fp8Sums : uint8_t { accurate, fast };

// d [M,N] T overwritten  <-  a b^T for a [M,K], b [N,K], K and N multiples of 16; addend [M,N] T, or a repeat_row()
// (matmul.h), added before the single rounding. T: bf16, on the CPU also f32. The CPU multiplies the same e4m3 values
// as T, where they are exact, so it has always accurate sums.
void matmul_fp8(Context&, Tensor d, const E4m3Rows& a, const E4m3Rows& b, Fp8Sums, ConstTensor addend = {});

// d [M,N] acc, added to or overwritten  <-  a b^T for a [M,K], b [N,K] as transposes, M and N multiples of 16. Sums are
// accurate.
void matmul_fp8(Context&, Tensor d, const E4m3Columns& a, const E4m3Columns& b, bool add);

// Whether products with w can be in fp8: out and in must be multiples of 16.
bool fits_fp8(const ConstTensor& w);
// Records a product with w that is in T because w does not fit, as a fallback.
void record_not_fp8(Context&, const ConstTensor& y, const ConstTensor& w);

// y [N,out] T overwritten  <-  x [N,in], w [out,in] T; addend [N,out] as in matmul_fp8(). counts: count_e4m3() of w's
// rows, added to; absent: they are not counted.
void linear_forward_fp8(Context&, Tensor y, const E4m3Rows& x, ConstTensor w, ConstTensor addend = {},
                        Tensor counts = {});
// dx [N,in] T overwritten  <-  dy [N,out], w [out,in] T. counts: the same of w's columns.
void linear_backward_input_fp8(Context&, Tensor dx, const E4m3Rows& dy, ConstTensor w, Tensor counts = {});

// dw [out,in] acc added to, or overwritten if add is false  <-  dy [N,out], x [N,in]. unused: memory without values,
// contiguous and aligned, in which the operands' transposes may lie; absent, or too small for one: in scratch memory.
void linear_backward_weight_fp8(Context&, Tensor dw, const E4m3Rows& dy, const E4m3Rows& x, bool add,
                                const Tensor& unused = {});

// The compute capability of cards whose cuBLASLt multiplies e4m3 with a scale for each row: Hopper's.
inline constexpr int kFp8Capability = 90;
// Why a device has no fp8 products; empty: it has. The CPU has them.
std::string why_no_fp8(const Context&);

namespace cuda {
void matmul_fp8(Context&, Tensor d, const E4m3Rows& a, const E4m3Rows& b, Fp8Sums, ConstTensor addend);
void matmul_fp8(Context&, Tensor d, const E4m3Columns& a, const E4m3Columns& b, bool add);
bool built_with_fp8();  // whether the CUDA Toolkit of the build has products of e4m3 with a scale for each row
}  // namespace cuda
}  // namespace triad
