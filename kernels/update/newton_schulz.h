// The Newton-Schulz iteration of Muon (kernels/update/muon.h), which moves a matrix's singular values near 1 and keeps
// its singular vectors:
//   X = G / (|G| + 1e-7), |G| the Frobenius norm;  5 times: A = X X^T, X = 3.4445 X + (-4.7750 A + 2.0315 A A) X
// If G has more rows than columns, A = X^T X and X = 3.4445 X + X (-4.7750 A + 2.0315 A A), which is the same.
#pragma once
#include "engine/context.h"

namespace triad {

struct NewtonSchulz {
  static constexpr int kIterations = 5;
  static constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
  static constexpr double kEps = 1e-7;
};

// x [n,R,C] T, contiguous, overwritten: each matrix G with the last X. X, A and the polynomial in A are rounded to T,
// sums are in acc; the norm is in double.
void newton_schulz(Context&, Tensor x);

namespace cuda {
// y [n,R,C] T overwritten with x / (the matrix's norm + NewtonSchulz::kEps) * factor  <-  x [n,R,C] T
void normalize_matrices(Context&, Tensor y, ConstTensor x, double factor);
}  // namespace cuda
}  // namespace triad
