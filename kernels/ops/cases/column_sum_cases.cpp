// Column sum cases: as the gradient of a linear layer's bias, and alone.
#include "kernels/common/op_case.h"
#include "kernels/ops/column_sum.h"
#include "kernels/ops/matmul.h"

namespace triad {

namespace {

// A linear layer with a bias: forward adds the bias to every row, and the bias's gradient sums dy over rows.
OpCase bias_case(std::string name, int64_t rows, int64_t in, int64_t out, int64_t row_pad) {
  OpCase c{.op = "column_sum", .name = std::move(name)};
  c.args = {{.name = "x", .role = ArgRole::input, .shape = {rows, in}, .row_pad = row_pad},
            {.name = "w", .role = ArgRole::param, .shape = {out, in}, .std = 0.5},
            {.name = "b", .role = ArgRole::param, .shape = {out}},
            {.name = "y", .role = ArgRole::output, .shape = {rows, out}, .row_pad = row_pad}};
  c.forward = [rows](Context& ctx, const Args& t) {
    linear_forward(ctx, t["y"], t["x"], t["w"], repeat_row(t["b"], rows));
  };
  c.backward = [](Context& ctx, const Args& t) {
    linear_backward(ctx, t["dx"], t["dw"], t["dy"], t["x"], t["w"]);
    column_sum(ctx, t["db"], t["dy"]);
  };
  return c;
}

OpCase sum_case(std::string name, int64_t rows, int64_t width, int64_t row_pad, bool bench) {
  OpCase c{.op = "column_sum", .name = std::move(name)};
  c.args = {{.name = "x", .role = ArgRole::constant, .shape = {rows, width}, .row_pad = row_pad},
            {.name = "y", .role = ArgRole::output, .shape = {width}, .type = ArgType::acc}};
  c.forward = [](Context& ctx, const Args& t) {
    zero(ctx, t["y"]);
    column_sum(ctx, t["y"], t["x"]);
  };
  c.bench = bench;
  c.forward_flops = static_cast<double>(rows * width);
  c.forward_written = 4 * static_cast<double>(width);
  c.forward_bytes = 2 * static_cast<double>(rows * width) + c.forward_written;
  return c;
}

}  // namespace

std::vector<OpCase> column_sum_cases() {
  return {bias_case("linear 1x3x5", 1, 3, 5, 0),
          bias_case("linear 33x17x9 strided", 33, 17, 9, 5),
          bias_case("linear 130x64x96", 130, 64, 96, 0),
          bias_case("linear 70x1100x8", 70, 1100, 8, 0),  // the CPU cuts the product's depth
          sum_case("257x300", 257, 300, 0, false),
          sum_case("1000x64, padded", 1000, 64, 8, false),
          sum_case("0x7", 0, 7, 0, false),
          sum_case("32768x1536", 32768, 1536, 0, true)};
}

}  // namespace triad
