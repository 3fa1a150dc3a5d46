// Cases for conversions to and from the accumulator type, which differs from the element type in bf16.
#include "kernels/common/op_case.h"
#include "kernels/ops/cast.h"

namespace triad {

namespace {

OpCase cast_case(std::string name, Shape shape, ArgType from, ArgType to) {
  OpCase c{.op = "cast", .name = std::move(name)};
  c.args = {{.name = "x", .role = ArgRole::constant, .shape = shape, .type = from},
            {.name = "y", .role = ArgRole::output, .shape = shape, .type = to}};
  c.forward = [](Context& ctx, const Args& t) { cast(ctx, t["y"], t["x"]); };
  c.forward_bytes = 6 * static_cast<double>(shape.numel());
  c.forward_written = (to == ArgType::acc ? 4 : 2) * static_cast<double>(shape.numel());
  return c;
}

}  // namespace

std::vector<OpCase> cast_cases() {
  std::vector<OpCase> cases;
  for (const Shape& shape : {Shape{1}, Shape{31}, Shape{3, 5, 64}, Shape{7, 1031}}) {
    cases.push_back(cast_case("to acc " + shape.str(), shape, ArgType::element, ArgType::acc));
    cases.push_back(cast_case("from acc " + shape.str(), shape, ArgType::acc, ArgType::element));
  }
  for (const bool to_acc : {true, false}) {
    const auto from = to_acc ? ArgType::element : ArgType::acc, to = to_acc ? ArgType::acc : ArgType::element;
    cases.push_back(cast_case(to_acc ? "to acc 32768x768" : "from acc 32768x768", {32768, 768}, from, to));
    cases.back().bench = true;
  }
  return cases;
}

}  // namespace triad
