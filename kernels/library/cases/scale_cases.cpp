// scale cases: all pairs of element and accumulator type, strided, with any row alignment.
#include "kernels/library/scale.h"

#include "kernels/common/op_case.h"

namespace triad {

namespace {

OpCase scale_case(std::string name, Shape shape, ArgType from, ArgType to, int64_t row_pad = 0, bool add = false) {
  OpCase c{.op = "scale", .name = std::move(name)};
  c.args = {{.name = "x", .role = ArgRole::input, .shape = shape, .type = from, .row_pad = row_pad},
            {.name = "y", .role = ArgRole::output, .shape = shape, .type = to, .row_pad = row_pad}};
  c.forward = [add](Context& ctx, const Args& a) {
    if (add) scale(ctx, a["y"], a["x"], -0.5);  // 0.87 - 0.5
    scale(ctx, a["y"], a["x"], add ? 0.87 : 0.37, add);
  };
  c.backward = [](Context& ctx, const Args& a) { scale(ctx, a["dx"], a["dy"], 0.37); };
  const double n = static_cast<double>(shape.numel());
  const auto bytes = [&](ArgType type) { return (type == ArgType::acc ? 4 : 2) * n; };
  c.forward_bytes = c.backward_bytes = bytes(from) + bytes(to);
  c.forward_written = bytes(to), c.backward_written = bytes(from);
  return c;
}

}  // namespace

std::vector<OpCase> scale_cases() {
  std::vector<OpCase> cases = {
      scale_case("1x1x1x1", {1, 1, 1, 1}, ArgType::element, ArgType::element),
      scale_case("2x33x3x64", {2, 33, 3, 64}, ArgType::element, ArgType::element, 8),
      scale_case("from_acc_2x7x5x37", {2, 7, 5, 37}, ArgType::acc, ArgType::element, 3),
      scale_case("to_acc_65x2x192", {1, 65, 2, 192}, ArgType::element, ArgType::acc),
      scale_case("acc_31x2x48", {1, 31, 2, 48}, ArgType::acc, ArgType::acc, 4),
      scale_case("add_31x3x40", {1, 31, 3, 40}, ArgType::acc, ArgType::acc, 4, true),
      scale_case("from_acc_8192x64x128", {1, 8192, 64, 128}, ArgType::acc, ArgType::element),
  };
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
