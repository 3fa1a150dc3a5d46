// SiLU and SwiGLU cases; for SwiGLU also with gate and up as the two halves of one product's rows.
#include "kernels/common/op_case.h"
#include "kernels/ops/activation.h"

namespace triad {

namespace {

OpCase silu_case(std::string name, int64_t N, int64_t H, int64_t row_pad = 0, double std = 1.0) {
  OpCase c{.op = "activation", .name = "silu " + std::move(name)};
  c.args = {
      {.name = "x", .role = ArgRole::input, .shape = {N, H}, .std = std, .row_pad = row_pad},
      {.name = "y", .role = ArgRole::output, .shape = {N, H}},
      {.name = "y again", .role = ArgRole::saved, .shape = {N, H}}};  // forward's result, which backward can also write
  c.forward = [](Context& ctx, const Args& t) { silu_forward(ctx, t["y"], t["x"]); };
  c.backward = [](Context& ctx, const Args& t) { silu_backward(ctx, t["dx"], t["dy"], t["x"], t["y again"]); };
  const double elements = static_cast<double>(N * H);
  c.forward_flops = 4 * elements;
  c.forward_bytes = 4 * elements;
  c.backward_flops = 8 * elements;
  c.backward_bytes = 8 * elements;
  return c;
}

OpCase swiglu_case(std::string name, int64_t N, int64_t H, int64_t row_pad = 0) {
  const Shape shape = {N, H};
  OpCase c{.op = "activation", .name = "swiglu " + std::move(name)};
  c.args = {{.name = "gate", .role = ArgRole::input, .shape = shape, .row_pad = row_pad},
            {.name = "up", .role = ArgRole::input, .shape = shape, .row_pad = row_pad},
            {.name = "y", .role = ArgRole::output, .shape = shape},
            {.name = "y again", .role = ArgRole::saved, .shape = shape}};
  c.forward = [](Context& ctx, const Args& t) { swiglu_forward(ctx, t["y"], t["gate"], t["up"]); };
  c.backward = [](Context& ctx, const Args& t) {
    swiglu_backward(ctx, t["dgate"], t["dup"], t["dy"], t["gate"], t["up"], t["y again"]);
  };
  const double elements = static_cast<double>(N * H);
  c.forward_flops = 5 * elements;
  c.forward_bytes = 6 * elements, c.forward_written = 2 * elements;
  c.backward_flops = 11 * elements;
  c.backward_bytes = 12 * elements, c.backward_written = 6 * elements;
  return c;
}

}  // namespace

std::vector<OpCase> activation_cases() {
  std::vector<OpCase> cases = {
      silu_case("1x1", 1, 1),
      silu_case("7x33", 7, 33),
      silu_case("63x64, padded", 63, 64, 8),
      silu_case("5x1032, large", 5, 1032, 0, 30.0),
      swiglu_case("1x1", 1, 1),
      swiglu_case("7x33", 7, 33),
      swiglu_case("31x64", 31, 64),
      swiglu_case("9x1288, halves", 9, 1288, 1288),
  };
  cases.push_back(silu_case("32768x3072", 32768, 3072));
  cases.back().bench = true;
  cases.push_back(swiglu_case("32768x2048, halves", 32768, 2048, 2048));
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
