// Cases for copying and adding strided tensors, whose rows are or are not multiples of 16 bytes.
#include "kernels/common/op_case.h"
#include "kernels/step/rows.h"

namespace triad {

namespace {

OpCase copy_case(std::string name, const Shape& shape, int64_t pad, ArgType from) {
  OpCase c{.op = "copy_rows", .name = std::move(name)};
  c.args = {{.name = "x", .role = ArgRole::constant, .shape = shape, .type = from, .row_pad = pad},
            {.name = "y", .role = ArgRole::output, .shape = shape, .row_pad = pad}};
  c.forward = [](Context& ctx, const Args& t) { copy_rows(ctx, t["y"], t["x"]); };
  c.forward_bytes = 4 * static_cast<double>(shape.numel());
  return c;
}

// y = x + z, in the accumulator type.
OpCase add_case(std::string name, const Shape& shape, int64_t pad) {
  OpCase c{.op = "add_rows", .name = std::move(name)};
  c.args = {{.name = "x", .role = ArgRole::constant, .shape = shape, .type = ArgType::acc, .row_pad = pad},
            {.name = "z", .role = ArgRole::constant, .shape = shape, .type = ArgType::acc},
            {.name = "y", .role = ArgRole::output, .shape = shape, .type = ArgType::acc, .row_pad = pad}};
  c.forward = [](Context& ctx, const Args& t) {
    copy_rows(ctx, t["y"], t["x"]);
    add_rows(ctx, t["y"], t["z"]);
  };
  c.forward_bytes = 16 * static_cast<double>(shape.numel());
  return c;
}

}  // namespace

std::vector<OpCase> rows_cases() {
  return {copy_case("2x7x3x16 from acc", {2, 7, 3, 16}, 8, ArgType::acc),
          copy_case("3x5x7", {3, 5, 7}, 3, ArgType::element), add_case("2x7x3x16", {2, 7, 3, 16}, 8)};
}

}  // namespace triad
