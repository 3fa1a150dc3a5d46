// Muon in plain loops in double, written from its formula and not from the code.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

namespace triad::test {

using Doubles = std::vector<double>;

// c [n,p] = a [n,k] b [k,p]
inline Doubles product(const Doubles& a, const Doubles& b, int64_t n, int64_t k, int64_t p) {
  Doubles c(static_cast<size_t>(n * p));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t l = 0; l < k; ++l)
      for (int64_t j = 0; j < p; ++j)
        c[static_cast<size_t>(i * p + j)] += a[static_cast<size_t>(i * k + l)] * b[static_cast<size_t>(l * p + j)];
  return c;
}

inline Doubles transposed(const Doubles& a, int64_t rows, int64_t cols) {
  Doubles t(a.size());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) t[static_cast<size_t>(j * rows + i)] = a[static_cast<size_t>(i * cols + j)];
  return t;
}

// The five iterations on g [rows, cols], always with the row product.
inline Doubles newton_schulz_reference(Doubles x, int64_t rows, int64_t cols) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  for (double& v : x) v /= std::sqrt(squares) + 1e-7;
  for (int k = 0; k < 5; ++k) {
    const Doubles a = product(x, transposed(x, rows, cols), rows, cols, rows), aa = product(a, a, rows, rows, rows);
    Doubles b = a;
    for (size_t i = 0; i < b.size(); ++i) b[i] = -4.7750 * a[i] + 2.0315 * aa[i];
    const Doubles bx = product(b, x, rows, rows, cols);
    for (size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + bx[i];
  }
  return x;
}

struct MuonReference {
  double lr = 0, momentum = 0.95, weight_decay = 0, clip = 1;
};

// Updates the matrix [rows, cols] that begins at `at` in p and in its momentum m.
inline void muon_reference(Doubles& p, Doubles& m, const Doubles& grad, int64_t at, int64_t rows, int64_t cols,
                           const MuonReference& o) {
  Doubles u;
  for (int64_t i = at; i < at + rows * cols; ++i) {
    const auto e = static_cast<size_t>(i);
    const double g = grad[e] * o.clip;
    m[e] = o.momentum * m[e] + (1 - o.momentum) * g;
    u.push_back(o.momentum * m[e] + (1 - o.momentum) * g);
  }
  const Doubles update = newton_schulz_reference(u, rows, cols);
  const double scale = 0.2 * std::sqrt(static_cast<double>(rows > cols ? rows : cols));
  for (size_t i = 0; i < update.size(); ++i) {
    double& w = p[static_cast<size_t>(at) + i];
    w = w * (1 - o.lr * o.weight_decay) - o.lr * scale * update[i];
  }
}

}  // namespace triad::test
