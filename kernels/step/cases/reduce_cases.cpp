// Cases for sums. The output `both` checks the option `add`: squares are added to the sum.
#include "kernels/common/op_case.h"
#include "kernels/step/reduce.h"

namespace triad {

namespace {

OpCase reduce_case(std::string name, Shape shape, double mean) {
  OpCase c{.op = "reduce", .name = std::move(name)};
  c.args = {{.name = "x", .role = ArgRole::constant, .shape = shape, .mean = mean},
            {.name = "sum", .role = ArgRole::output, .shape = {1}, .type = ArgType::f64},
            {.name = "squares", .role = ArgRole::output, .shape = {1}, .type = ArgType::f64},
            {.name = "both", .role = ArgRole::output, .shape = {1}, .type = ArgType::f64}};
  c.forward = [](Context& ctx, const Args& t) {
    sum(ctx, t["sum"], t["x"]);
    sum_of_squares(ctx, t["squares"], t["x"]);
    sum(ctx, t["both"], t["x"]);
    sum_of_squares(ctx, t["both"], t["x"], /*add=*/true);
  };
  const double n = static_cast<double>(shape.numel());
  c.forward_flops = 6 * n;
  c.forward_bytes = 4 * 2 * n, c.forward_written = 0;  // forward reads x four times
  return c;
}

OpCase norm_case(std::string name, int64_t n) {  // x as gradients, which are f32 even if weights are bf16
  OpCase c{.op = "reduce", .name = std::move(name)};
  c.args = {{.name = "x", .role = ArgRole::constant, .shape = {n}, .type = ArgType::acc},
            {.name = "squares", .role = ArgRole::output, .shape = {1}, .type = ArgType::f64}};
  c.forward = [](Context& ctx, const Args& t) { sum_of_squares(ctx, t["squares"], t["x"]); };
  const double elements = static_cast<double>(n);
  c.forward_flops = 2 * elements;
  c.forward_bytes = 4 * elements, c.forward_written = 0;
  return c;
}

}  // namespace

std::vector<OpCase> reduce_cases() {
  std::vector<OpCase> cases = {reduce_case("1", {1}, 1.0), reduce_case("7x33", {7, 33}, 0.5),
                               reduce_case("16384", {16384}, 0.0), reduce_case("3x5x4099", {3, 5, 4099}, 0.1)};
  cases.push_back(norm_case("squares of 148 Mi gradients", int64_t{148} << 20));
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
