// Newton-Schulz iteration cases, which updates in place, so a case first copies its input to its output. Singular
// values near 0 amplify rounding errors 480 times, so each matrix is a multiple of the identity plus noise that is half
// as large in norm.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "engine/rng.h"
#include "kernels/common/op_case.h"
#include "kernels/update/newton_schulz.h"

namespace triad {

namespace {

OpCase newton_schulz_case(int64_t n, int64_t rows, int64_t cols, double std = 1) {
  const Shape shape = {n, rows, cols};
  OpCase c{.op = "newton_schulz", .name = fmt::format("{}x{}x{}", n, rows, cols)};
  const double identity = 2 * (std::sqrt(static_cast<double>(rows)) + std::sqrt(static_cast<double>(cols)));
  const auto fill = [=](int64_t i, uint64_t seed) {
    const bool diagonal = i / cols % rows == i % cols;
    return std * ((diagonal ? identity : 0) + Philox(seed, 11).normal(static_cast<uint64_t>(i)));
  };
  c.args = {{.name = "g", .role = ArgRole::constant, .shape = shape, .fill = fill},
            {.name = "x", .role = ArgRole::output, .shape = shape}};
  c.forward = [](Context& ctx, const Args& t) {
    copy(ctx, t["x"], t["g"]);
    newton_schulz(ctx, t["x"]);
  };
  c.f32_tolerance = 1e-4;
  const double elements = static_cast<double>(n * rows * cols), side = static_cast<double>(std::min(rows, cols));
  c.forward_flops = NewtonSchulz::kIterations * (4 * elements * side + 2 * static_cast<double>(n) * side * side * side);
  c.forward_bytes = 2 * elements * (2 + 3 + 4 * NewtonSchulz::kIterations);
  return c;
}

}  // namespace

std::vector<OpCase> newton_schulz_cases() {
  std::vector<OpCase> cases = {newton_schulz_case(1, 1, 1),     newton_schulz_case(3, 8, 8, 1e-4),
                               newton_schulz_case(2, 5, 67),    newton_schulz_case(2, 67, 5, 1e3),
                               newton_schulz_case(3, 48, 160),  newton_schulz_case(3, 160, 48),
                               newton_schulz_case(1, 130, 131), newton_schulz_case(2, 24, 1000)};
  // The M7C model's matrices: keys and values, queries and output, the two of the MLP.
  for (const auto& [n, rows, cols] :
       {std::array<int64_t, 3>{72, 128, 768}, {24, 768, 768}, {12, 3072, 768}, {12, 768, 3072}}) {
    cases.push_back(newton_schulz_case(n, rows, cols));
    cases.back().bench = true;
  }
  return cases;
}

}  // namespace triad
