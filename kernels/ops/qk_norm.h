// QK-norm: RMSNorm over the D elements of every query and key head, before rotation:
//   y = x * r * w with r = 1 / sqrt(mean(x^2) + eps), in the acc type
// The queries, and each branch's keys, have their own weights, which all their heads share.
#pragma once
#include <array>

#include "engine/context.h"

namespace triad {

// The heads that one call norms: the queries [B,T,H,D], then P - 1 branches' keys [B,T,Hkv,D], 1 <= P <= 4; the other
// entries are absent. All may be strided, like a fused projection's columns.
using QkHeads = std::array<Tensor, 4>;
using ConstQkHeads = std::array<ConstTensor, 4>;
inline constexpr int64_t kMaxNormedWidth = 256;  // largest D

// y T overwritten, may be x itself  <-  x T; w [P*D] T: the queries' weights, then each branch's key weights
void qk_norm_forward(Context&, const QkHeads& y, const ConstQkHeads& x, ConstTensor w, double eps);
// dx T overwritten, may be dy itself; dw [P*D] acc added to  <-  dy T; x, w, eps as in forward. Computes r again.
void qk_norm_backward(Context&, const QkHeads& dx, Tensor dw, const ConstQkHeads& dy, const ConstQkHeads& x,
                      ConstTensor w, double eps);

namespace cuda {
void qk_norm_forward(Context&, const QkHeads& y, const ConstQkHeads& x, ConstTensor w, double eps);
void qk_norm_backward(Context&, const QkHeads& dx, Tensor dw, const ConstQkHeads& dy, const ConstQkHeads& x,
                      ConstTensor w, double eps);
}  // namespace cuda
}  // namespace triad
