// Gradient sum cases. The op updates in place, so a case first copies its input to its output.
#include "kernels/common/op_case.h"
#include "kernels/step/accumulate.h"

namespace triad {

namespace {

OpCase accumulate_case(std::string name, int64_t n, ArgType to, ArgType from, const AccumulateOptions& o) {
  OpCase c{.op = "accumulate", .name = std::move(name)};
  c.args = {{.name = "before", .role = ArgRole::constant, .shape = {n}, .type = to},
            {.name = "x", .role = ArgRole::constant, .shape = {n}, .type = from, .std = 0.1},
            {.name = "sum", .role = ArgRole::output, .shape = {n}, .type = to}};
  c.forward = [o](Context& ctx, const Args& t) {
    if (o.add) copy(ctx, t["sum"], t["before"]);
    accumulate(ctx, t["sum"], t["x"], o);
  };
  // Bytes in bf16: the copy, then the sum. For f32 `triad bench` doubles the number, which is too high where only one
  // of the two is bf16.
  const double elements = static_cast<double>(n), width = to == ArgType::acc ? 4 : 2;
  c.forward_flops = elements;
  c.forward_bytes = (4 * width + (from == ArgType::acc ? 4 : 2)) * elements;
  c.forward_written = 2 * width * elements;
  return c;
}

}  // namespace

std::vector<OpCase> accumulate_cases() {
  constexpr ArgType acc = ArgType::acc, element = ArgType::element;
  const AccumulateOptions later = {.seed = 7, .micro_step = 3, .first_element = 1 << 20};
  std::vector<OpCase> cases = {
      accumulate_case("1031, acc to acc", 1031, acc, acc, {}),
      accumulate_case("1031, element to acc", 1031, acc, element, {}),
      accumulate_case("1031, acc to element", 1031, element, acc, later),
      accumulate_case("40000, element to element", 40000, element, element, later),
      accumulate_case("130 from element 3 on", 130, element, acc, {.first_element = 3}),
      accumulate_case("127, overwriting", 127, element, acc, {.add = false}),
      accumulate_case("127, overwriting an equal dtype", 127, element, element, {.add = false}),
  };
  for (const ArgType to : {acc, element}) {
    cases.push_back(
        accumulate_case(to == acc ? "16 Mi, acc to acc" : "16 Mi, acc to element", int64_t{1} << 24, to, acc, later));
    cases.back().bench = true;
  }
  return cases;
}

}  // namespace triad
