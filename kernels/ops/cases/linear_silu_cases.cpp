// linear_silu cases: a small MLP z = silu(x w1^T) w2^T, or z = (silu(x w_gate^T) * (x w_up^T)) w2^T with w1 = [w_gate;
// w_up], whose gradients check the op forward and backward. Large cases time each direction alone.
#include "kernels/common/op_case.h"
#include "kernels/ops/linear_silu.h"
#include "kernels/ops/matmul.h"

namespace triad {

namespace {

struct MlpSizes {
  int64_t rows, in, hidden, out, row_pad = 0;
};

// The op's functions for SiLU or SwiGLU, and how many tensors [rows, hidden] pre consists of.
struct Mlp {
  std::string prefix;  // prefix for case names
  int64_t parts;
  decltype(&linear_silu_forward) forward;
  decltype(&linear_silu_backward) backward;
};
const Mlp kSilu = {"", 1, linear_silu_forward, linear_silu_backward};
const Mlp kSwiglu = {"swiglu ", 2, linear_swiglu_forward, linear_swiglu_backward};

OpCase mlp_case(const Mlp& mlp, const std::string& name, const MlpSizes& n) {
  OpCase c{.op = "linear_silu", .name = mlp.prefix + name};
  const Shape hidden = {n.rows, n.hidden}, pre = {n.rows, mlp.parts * n.hidden};
  c.args = {
      {.name = "x", .role = ArgRole::input, .shape = {n.rows, n.in}, .row_pad = n.row_pad},
      {.name = "w1", .role = ArgRole::param, .shape = {mlp.parts * n.hidden, n.in}, .std = 0.5, .row_pad = n.row_pad},
      {.name = "w2", .role = ArgRole::param, .shape = {n.out, n.hidden}, .std = 0.5, .row_pad = n.row_pad},
      {.name = "pre", .role = ArgRole::saved, .shape = pre, .row_pad = n.row_pad},
      {.name = "y", .role = ArgRole::saved, .shape = hidden, .row_pad = n.row_pad},
      {.name = "dpre", .role = ArgRole::saved, .shape = pre, .row_pad = n.row_pad},
      {.name = "y again", .role = ArgRole::saved, .shape = hidden, .row_pad = n.row_pad},
      {.name = "z", .role = ArgRole::output, .shape = {n.rows, n.out}, .row_pad = n.row_pad}};
  c.forward = [mlp](Context& ctx, const Args& t) {
    mlp.forward(ctx, t["y"], t["pre"], t["x"], t["w1"]);
    linear_forward(ctx, t["z"], t["y"], t["w2"]);
  };
  c.backward = [mlp](Context& ctx, const Args& t) {
    mlp.backward(ctx, t["dpre"], t["y again"], t["dz"], t["w2"], t["pre"]);
    linear_backward_weight(ctx, t["dw2"], t["dz"], t["y again"]);
    linear_backward(ctx, t["dx"], t["dw1"], t["dpre"], t["x"], t["w1"]);
  };
  return c;
}

OpCase bench_case(const Mlp& mlp, const std::string& name, const MlpSizes& n) {
  OpCase c = mlp_case(mlp, name, n);
  c.bench = true;
  for (Arg& a : c.args) {
    if (a.name == "z") a.role = ArgRole::constant;  // random, because the timed backward uses z as dz
    if (a.role == ArgRole::param) a.role = ArgRole::constant, a.std = 0.02;
    if (a.role == ArgRole::input) a.role = ArgRole::constant;
  }
  c.forward = [mlp](Context& ctx, const Args& t) { mlp.forward(ctx, t["y"], t["pre"], t["x"], t["w1"]); };
  c.backward = [mlp](Context& ctx, const Args& t) {
    mlp.backward(ctx, t["dpre"], t["y again"], t["z"], t["w2"], t["pre"]);
  };
  const double hidden = static_cast<double>(n.rows * n.hidden), parts = static_cast<double>(mlp.parts);
  c.forward_flops = 2 * parts * hidden * static_cast<double>(n.in);
  c.forward_bytes = 2 * ((parts + 1) * hidden + static_cast<double>((n.rows + mlp.parts * n.hidden) * n.in));
  c.backward_flops = 2 * hidden * static_cast<double>(n.out);
  c.backward_bytes = 2 * ((2 * parts + 1) * hidden + static_cast<double>((n.rows + n.hidden) * n.out));
  return c;
}

}  // namespace

std::vector<OpCase> linear_silu_cases() {
  std::vector<OpCase> cases;
  for (const Mlp& mlp : {kSilu, kSwiglu}) {
    // With 66 clusters, each computes at least three tile pairs, so that every consumer warpgroup uses its buffers and
    // barriers for a second tile. A tile has more steps than the ring has slots: the kernel would hang if it failed to
    // release one. The nine bands are groups of 8 and 1, and the second case's seven bands groups of 4 and 3 (in
    // SwiGLU's forward one group of 7).
    OpCase rounds = mlp_case(mlp, "2100x264x3304x264, rounds", {2100, 264, 3304, 264});
    OpCase few_columns = mlp_case(mlp, "1700x264x1900x264", {1700, 264, 1900, 264});
    for (OpCase* c : {&rounds, &few_columns}) c->differences = c->cpu = false;
    cases.insert(
        cases.end(),
        {rounds, few_columns, mlp_case(mlp, "1x1", {1, 1, 1, 1}), mlp_case(mlp, "7x5x33x9", {7, 5, 33, 9}),
         // With SwiGLU, pre's rows are 16-byte vectors here, but gate's and up's are not.
         mlp_case(mlp, "9x8x12x8", {9, 8, 12, 8}), mlp_case(mlp, "1x8x16x24", {1, 8, 16, 24}),
         mlp_case(mlp, "31x8x16x24", {31, 8, 16, 24}), mlp_case(mlp, "65x72x200x40, padded", {65, 72, 200, 40, 8}),
         mlp_case(mlp, "300x64x192x128", {300, 64, 192, 128}), mlp_case(mlp, "129x136x584x328", {129, 136, 584, 328})});
  }
  cases.push_back(bench_case(kSilu, "32768x768x3072", {32768, 768, 3072, 768}));
  cases.push_back(bench_case(kSwiglu, "8192x2048x8192", {8192, 2048, 8192, 2048}));
  cases.back().gpu_f32 = false;  // keeps the check short
  return cases;
}

}  // namespace triad
