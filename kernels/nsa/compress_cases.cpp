// Cases of phi.
#include "kernels/nsa/nsa_cases.h"
#include "kernels/ops/cast.h"

namespace triad {

namespace {

OpCase compress_case(std::string name, int64_t B, int64_t T, int64_t H, int64_t D, const PhiOptions& o,
                     int64_t row_pad = 0) {
  const int64_t Tc = compressed_length(T, o.l, o.d);
  OpCase c{.op = "nsa_compress", .name = std::move(name)};
  c.args = {{.name = "x", .role = ArgRole::input, .shape = {B, T, H, D}, .row_pad = row_pad},
            {.name = "y", .role = ArgRole::output, .shape = {B, Tc, H, D}}};
  const double l = static_cast<double>(o.l), blocks = static_cast<double>(B * Tc * H), width = static_cast<double>(D);
  const double rows = static_cast<double>(B * T * H) * width;
  c.forward_flops = 2 * blocks * l * width;
  c.backward_flops = (o.kind == Phi::avg ? 1 : 2) * c.forward_flops;
  c.forward_bytes = 2 * rows + 2 * blocks * width, c.forward_written = 2 * blocks * width;
  c.backward_bytes = (o.kind == Phi::avg ? 2 : 4) * rows + 4 * blocks * width, c.backward_written = 2 * rows;
  if (o.kind == Phi::conv) c.args.push_back({.name = "w", .role = ArgRole::param, .shape = {o.l, D}, .std = 0.3});
  if (o.kind == Phi::mlp) {
    c.args.push_back({.name = "pos", .role = ArgRole::param, .shape = {o.l, D}, .std = 0.3});
    c.args.push_back({.name = "fc1", .role = ArgRole::param, .shape = {2 * D, o.l * D}, .std = 0.2});
    c.args.push_back({.name = "fc2", .role = ArgRole::param, .shape = {D, 2 * D}, .std = 0.2});
    c.forward_flops = 2 * blocks * (l * width * 2 * width + 2 * width * width);
    c.backward_flops = 3 * c.forward_flops;  // backward recomputes fc1
  }
  c.forward = [o](Context& ctx, const Args& a) {
    nsa_compress_forward(ctx, a["y"], a["x"], {a["w"], a["pos"], a["fc1"], a["fc2"]}, o);
  };
  c.backward = [o](Context& ctx, const Args& a) {
    Scratch::Scope scope(ctx.scratch);
    Tensor dy = a["dy"];  // in the case's dtype; the op takes acc
    if (dy.dtype != acc_dtype(dy.dtype)) {
      dy = scope.alloc(acc_dtype(dy.dtype), dy.shape());
      cast(ctx, dy, a["dy"]);
    }
    nsa_compress_backward(ctx, a["dx"], {a["dw"], a["dpos"], a["dfc1"], a["dfc2"]}, dy, a["x"],
                          {a["w"], a["pos"], a["fc1"], a["fc2"]}, o);
  };
  return c;
}

}  // namespace

std::vector<OpCase> compress_cases() {
  std::vector<OpCase> cases = {
      compress_case("avg_31_no_block", 1, 31, 2, 8, {Phi::avg, 32, 16}),
      compress_case("avg_2x100", 2, 100, 2, 64, {Phi::avg, 32, 16}, 8),
      compress_case("avg_l1", 1, 17, 3, 6, {Phi::avg, 1, 1}),
      compress_case("avg_l10_d5", 1, 63, 1, 100, {Phi::avg, 10, 5}),
      compress_case("conv_31_no_block", 1, 31, 2, 8, {Phi::conv, 32, 16}),
      compress_case("conv_2x100", 2, 100, 2, 64, {Phi::conv, 32, 16}, 8),
      compress_case("conv_l6_d3", 1, 47, 3, 10, {Phi::conv, 6, 3}),
      compress_case("conv_l1", 1, 17, 1, 60, {Phi::conv, 1, 1}),
      compress_case("mlp_7_no_block", 1, 7, 2, 8, {Phi::mlp, 8, 4}),
      compress_case("mlp_2x33", 2, 33, 2, 8, {Phi::mlp, 8, 4}, 8),
      compress_case("mlp_l6_d3", 1, 47, 3, 10, {Phi::mlp, 6, 3}),
  };
  for (const Phi kind : {Phi::avg, Phi::conv, Phi::mlp}) {
    const char* names[] = {"avg_m7c", "conv_m7c", "mlp_m7c"};
    cases.push_back(compress_case(names[static_cast<int>(kind)], 16, 2048, 2, 64, {kind, 32, 16}));
    cases.back().bench = true;
  }
  return cases;
}

}  // namespace triad
