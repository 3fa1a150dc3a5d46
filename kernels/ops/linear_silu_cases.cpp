// Cases of linear_silu: a small MLP z = silu(x w1^T) w2^T, whose gradients check both forward and backward of the op.
// Large cases time each of the two alone.
#include "kernels/common/op_case.h"
#include "kernels/ops/linear_silu.h"
#include "kernels/ops/matmul.h"

namespace triad {

namespace {

struct MlpSizes {
  int64_t rows, in, hidden, out, row_pad = 0;
};

OpCase mlp_case(std::string name, const MlpSizes& n) {
  OpCase c{.op = "linear_silu", .name = std::move(name)};
  const Shape hidden = {n.rows, n.hidden};
  c.args = {{.name = "x", .role = ArgRole::input, .shape = {n.rows, n.in}, .row_pad = n.row_pad},
            {.name = "w1", .role = ArgRole::param, .shape = {n.hidden, n.in}, .std = 0.5, .row_pad = n.row_pad},
            {.name = "w2", .role = ArgRole::param, .shape = {n.out, n.hidden}, .std = 0.5, .row_pad = n.row_pad},
            {.name = "pre", .role = ArgRole::saved, .shape = hidden, .row_pad = n.row_pad},
            {.name = "y", .role = ArgRole::saved, .shape = hidden, .row_pad = n.row_pad},
            {.name = "dpre", .role = ArgRole::saved, .shape = hidden, .row_pad = n.row_pad},
            {.name = "y again", .role = ArgRole::saved, .shape = hidden, .row_pad = n.row_pad},
            {.name = "z", .role = ArgRole::output, .shape = {n.rows, n.out}, .row_pad = n.row_pad}};
  c.forward = [](Context& ctx, const Args& t) {
    linear_silu_forward(ctx, t["y"], t["pre"], t["x"], t["w1"]);
    linear_forward(ctx, t["z"], t["y"], t["w2"]);
  };
  c.backward = [](Context& ctx, const Args& t) {
    linear_silu_backward(ctx, t["dpre"], t["y again"], t["dz"], t["w2"], t["pre"]);
    linear_backward_weight(ctx, t["dw2"], t["dz"], t["y again"]);
    linear_backward(ctx, t["dx"], t["dw1"], t["dpre"], t["x"], t["w1"]);
  };
  return c;
}

OpCase bench_case(std::string name, const MlpSizes& n) {
  OpCase c = mlp_case(std::move(name), n);
  c.bench = true;
  for (Arg& a : c.args) {
    if (a.name == "z") a.role = ArgRole::constant;  // random, because the timed backward uses z as dz
    if (a.role == ArgRole::param) a.role = ArgRole::constant, a.std = 0.02;
    if (a.role == ArgRole::input) a.role = ArgRole::constant;
  }
  c.forward = [](Context& ctx, const Args& t) { linear_silu_forward(ctx, t["y"], t["pre"], t["x"], t["w1"]); };
  c.backward = [](Context& ctx, const Args& t) {
    linear_silu_backward(ctx, t["dpre"], t["y again"], t["z"], t["w2"], t["pre"]);
  };
  const double hidden = static_cast<double>(n.rows * n.hidden);
  c.forward_flops = 2 * hidden * static_cast<double>(n.in);
  c.forward_bytes = 2 * (2 * hidden + static_cast<double>((n.rows + n.hidden) * n.in));
  c.backward_flops = 2 * hidden * static_cast<double>(n.out);
  c.backward_bytes = 2 * (3 * hidden + static_cast<double>((n.rows + n.hidden) * n.out));
  return c;
}

}  // namespace

std::vector<OpCase> linear_silu_cases() {
  // More tiles than clusters, and more steps per tile than stages in the ring of buffers: the kernel would hang if it
  // failed to release a stage.
  OpCase rounds = mlp_case("1700x264x1900x264, rounds", {1700, 264, 1900, 264});
  rounds.differences = rounds.cpu = false;
  return {rounds,
          mlp_case("1x1", {1, 1, 1, 1}),
          mlp_case("7x5x33x9", {7, 5, 33, 9}),
          mlp_case("31x8x16x24", {31, 8, 16, 24}),
          mlp_case("65x72x200x40, padded", {65, 72, 200, 40, 8}),
          mlp_case("300x64x192x128", {300, 64, 192, 128}),
          mlp_case("129x136x584x328", {129, 136, 584, 328}),
          bench_case("32768x768x3072", {32768, 768, 3072, 768})};
}

}  // namespace triad
