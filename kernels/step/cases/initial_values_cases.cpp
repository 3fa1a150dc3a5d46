// Initial value cases. Each draws a tensor in two ranges whose border is in the middle, and fills another.
#include "kernels/common/op_case.h"
#include "kernels/step/initial_values.h"

namespace triad {

namespace {

OpCase initial_values_case(std::string name, int64_t n, int64_t first, double std) {
  OpCase c{.op = "initial_values", .name = std::move(name)};
  c.args = {{.name = "normal", .role = ArgRole::output, .shape = {n}},
            {.name = "master", .role = ArgRole::output, .shape = {n}, .type = ArgType::acc},
            {.name = "uniform", .role = ArgRole::output, .shape = {n}},
            {.name = "constant", .role = ArgRole::output, .shape = {n}}};
  c.forward = [=](Context& ctx, const Args& t) {
    const NormalValues values{.seed = 7, .stream = uint64_t{3} << 40, .std = std};
    const int64_t half = n / 2;
    draw_normal(ctx, t["normal"].slice(0, 0, half), first, values);
    draw_normal(ctx, t["normal"].slice(0, half, n), first + half, values);
    draw_normal(ctx, t["master"], first, values);
    const UniformValues uniform{.seed = 7, .stream = uint64_t{5} << 40, .bound = std};
    draw_uniform(ctx, t["uniform"].slice(0, 0, half), first, uniform);
    draw_uniform(ctx, t["uniform"].slice(0, half, n), first + half, uniform);
    fill_constant(ctx, t["constant"], 1.0 / 3);
  };
  const double elements = static_cast<double>(n);
  c.forward_bytes = c.forward_written = (2 + 4 + 2 + 2) * elements;
  // In the driver only the last bits in bf16 outputs may differ from the CPU's; here none do
  // (tests/model/test_init.cpp).
  c.f32_tolerance = 0;
  return c;
}

}  // namespace

std::vector<OpCase> initial_values_cases() {
  std::vector<OpCase> cases = {
      initial_values_case("1", 1, 0, 1.0), initial_values_case("33 from 5 on", 33, 5, 0.02),
      initial_values_case("4099, one in two counters' halves", 4099, (int64_t{1} << 32) - 2048, 0.02),
      initial_values_case("70001", 70001, 12345, 3e-3)};
  cases.push_back(initial_values_case("64 Mi numbers", int64_t{64} << 20, 0, 0.02));
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
