// RMSNorm cases, without and with the residual connection's gradient.
#include "kernels/common/portable_case.h"
#include "kernels/ops/rmsnorm.h"

namespace triad {

namespace {

struct NormShape {
  std::string name;
  int64_t rows, width;
  bool residual = false;
  int64_t row_pad = 0;
  bool bench = false;
};

OpCase rmsnorm_case(const NormShape& s) {
  constexpr double kEps = 1e-6;
  const Shape shape = {s.rows, s.width};
  OpCase c{.op = "rmsnorm", .name = s.name};
  c.args = {{.name = "x", .role = ArgRole::input, .shape = shape, .row_pad = s.row_pad},
            {.name = "w", .role = ArgRole::param, .shape = {s.width}, .std = 0.3, .mean = 1.0},
            {.name = "y", .role = ArgRole::output, .shape = shape, .row_pad = s.row_pad},
            {.name = "rrms", .role = ArgRole::saved, .shape = {s.rows}, .type = ArgType::acc}};
  // As in a model layer: x is also an output, the residual connection, whose gradient is dresidual; backward also
  // writes y.
  if (s.residual) {
    c.args.push_back({.name = "residual", .role = ArgRole::output, .shape = shape});
    c.args.push_back({.name = "y again", .role = ArgRole::saved, .shape = shape, .row_pad = s.row_pad});
  }
  c.forward = [residual = s.residual](Context& ctx, const Args& t) {
    rmsnorm_forward(ctx, t["y"], t["rrms"], t["x"], t["w"], kEps);
    if (residual) copy(ctx, t["residual"], t["x"]);
  };
  c.backward = [](Context& ctx, const Args& t) {
    rmsnorm_backward(ctx, t["dx"], t["dw"], t["dy"], t["x"], t["w"], t["rrms"], t["dresidual"], t["y again"]);
  };
  c.bench = s.bench;
  const double elements = static_cast<double>(s.rows * s.width), rows = static_cast<double>(s.rows);
  c.forward_flops = 4 * elements;
  c.forward_bytes = 4 * elements + 4 * rows;
  c.backward_flops = 10 * elements;
  c.backward_bytes = (s.residual ? 10 : 6) * elements + 4 * rows;
  c.backward_written = (s.residual ? 4 : 2) * elements;
  return c;
}

}  // namespace

std::vector<OpCase> rmsnorm_cases() {
  return {rmsnorm_case({"1x3", 1, 3}),
          rmsnorm_case({"7x33", 7, 33, true}),
          rmsnorm_case({"127x64", 127, 64}),
          rmsnorm_case({"65x72, padded", 65, 72, true, 8}),
          rmsnorm_case({"300x768", 300, 768, true}),
          rmsnorm_case({"9x1500", 9, 1500}),
          rmsnorm_case({"5x4104", 5, 4104, true}),
          small_card_case(rmsnorm_case({"50x5120", 50, 5120, true})),
          rmsnorm_case({"32768x768", 32768, 768, false, 0, true}),
          rmsnorm_case({"32768x768, in a layer", 32768, 768, true, 0, true})};
}

}  // namespace triad
