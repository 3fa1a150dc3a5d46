// symmetric_product cases, with and without a symmetric addend; it has no backward.
#include <fmt/format.h>

#include <algorithm>

#include "engine/rng.h"
#include "kernels/common/op_case.h"
#include "kernels/update/symmetric_product.h"

namespace triad {

namespace {

OpCase symmetric_case(int64_t n, int64_t side, int64_t depth, const SymmetricProductOptions& o, bool addend) {
  const Shape square = {n, side, side};
  OpCase c{
      .op = "symmetric_product",
      .name = fmt::format("{} of {}x{}{}{}", n, side, depth, o.trans ? ", transposed" : "", addend ? ", added" : "")};
  c.args = {{.name = "x", .role = ArgRole::constant, .shape = o.trans ? Shape{n, depth, side} : Shape{n, side, depth}},
            {.name = "d", .role = ArgRole::output, .shape = square}};
  // Equal for an element and its mirror image.
  const auto fill = [side](int64_t i, uint64_t seed) {
    const int64_t row = i / side % side, column = i % side, matrix = i / (side * side);
    const int64_t upper = (matrix * side + std::min(row, column)) * side + std::max(row, column);
    return 10 * Philox(seed, 12).normal(static_cast<uint64_t>(upper));
  };
  if (addend) c.args.push_back({.name = "addend", .role = ArgRole::constant, .shape = square, .fill = fill});
  c.forward = [o](Context& ctx, const Args& t) { symmetric_product(ctx, t["d"], t["x"], o, t["addend"]); };
  // Only elements on and below the diagonal count.
  const double elements = static_cast<double>(n * side), k = static_cast<double>(depth);
  c.forward_flops = elements * static_cast<double>(side + 1) * k;
  c.forward_bytes = 2 * elements * (k + static_cast<double>(side) * (addend ? 2 : 1));
  c.forward_written = 2 * elements * static_cast<double>(side);
  return c;
}

}  // namespace

std::vector<OpCase> symmetric_product_cases() {
  std::vector<OpCase> cases;
  // One tile or several, whole or cut off by the matrix; one inner-dimension step or more than the ring has slots; rows
  // in 16-byte vectors, or not.
  for (const bool trans : {false, true}) {
    cases.push_back(symmetric_case(1, 1, 1, {.trans = trans}, true));
    cases.push_back(symmetric_case(3, 7, 33, {.trans = trans, .alpha = -0.5}, true));
    cases.push_back(symmetric_case(2, 40, 72, {.trans = trans, .alpha = 2}, false));
    cases.push_back(symmetric_case(2, 128, 64, {.trans = trans}, true));
    cases.push_back(symmetric_case(3, 200, 328, {.trans = trans, .alpha = 0.25}, true));
    cases.push_back(symmetric_case(1, 392, 136, {.trans = trans}, false));
  }
  // More than two tiles per CTA on a card: the kernel would hang if it failed to release a ring slot.
  for (const bool trans : {false, true}) {
    cases.push_back(symmetric_case(30, 520, 200, {.trans = trans, .alpha = -1}, true));
    cases.back().cpu = false;
  }
  // The M7C model's matrices in Muon's iteration: queries and output, keys and values, the two of the MLP.
  for (OpCase& large :
       std::vector<OpCase>{symmetric_case(24, 768, 768, {}, false), symmetric_case(24, 768, 768, {}, true),
                           symmetric_case(72, 128, 768, {}, false), symmetric_case(12, 768, 3072, {}, false),
                           symmetric_case(12, 768, 3072, {.trans = true}, false)}) {
    large.bench = true;
    cases.push_back(std::move(large));
  }
  return cases;
}

}  // namespace triad
