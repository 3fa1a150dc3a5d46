// LoRA cases: one projection, and several of a fused one, of which some are not adapted.
#include "kernels/common/op_case.h"
#include "kernels/ops/lora.h"

namespace triad {

namespace {

OpCase lora_case(std::string name, int64_t N, int64_t in, int64_t out, int64_t r, std::vector<LoraPiece> pieces,
                 int64_t row_pad = 0) {
  const double scale = 0.75;
  int64_t rows = 0;
  for (const LoraPiece& piece : pieces) rows += piece.size();
  const int64_t all = static_cast<int64_t>(pieces.size()) * r;
  OpCase c{.op = "lora", .name = std::move(name)};
  c.args = {{.name = "x", .role = ArgRole::input, .shape = {N, in}},
            {.name = "before", .role = ArgRole::input, .shape = {N, out}, .row_pad = row_pad},
            {.name = "a", .role = ArgRole::param, .shape = {all, in}, .std = 0.3},
            {.name = "b", .role = ArgRole::param, .shape = {rows, r}, .std = 0.3},
            {.name = "y", .role = ArgRole::output, .shape = {N, out}, .row_pad = row_pad}};
  c.forward = [=](Context& ctx, const Args& t) {
    copy(ctx, t["y"], t["before"]);
    lora_forward(ctx, t["y"], t["x"], t["a"], t["b"], pieces, scale);
  };
  c.backward = [=](Context& ctx, const Args& t) {
    copy(ctx, t["dbefore"], t["dy"]);
    zero(ctx, t["dx"]);
    Scratch::Scope scope(ctx.scratch);
    const Tensor du = scope.alloc(t["x"].dtype, {N, all});
    lora_backward_input(ctx, t["dx"], du, t["dy"], t["a"], t["b"], pieces, scale);
    lora_backward_weight(ctx, t["da"], t["db"], du, t["dy"], t["x"], t["a"], pieces, scale);
  };
  const double x = static_cast<double>(N * in), y = static_cast<double>(N * out),
               weights = static_cast<double>(all * in + rows * r);
  c.forward_flops = 2 * static_cast<double>(N) * weights;
  c.forward_bytes = 2 * (x + 2 * y + weights), c.forward_written = 2 * y;
  c.backward_flops = 2.5 * c.forward_flops;
  c.backward_bytes = 2 * (3 * x + 2 * y + 2 * weights) + 8 * weights;
  return c;
}

}  // namespace

std::vector<OpCase> lora_cases() {
  std::vector<OpCase> cases = {
      lora_case("7x5 to 6, rank 3", 7, 5, 6, 3, {{0, 6}}), lora_case("1x4 to 4, rank 1", 1, 4, 4, 1, {{0, 4}}),
      lora_case("33x24 to 40, rank 4, two of four", 33, 24, 40, 4, {{0, 16}, {24, 32}}),
      lora_case("17x16 to 24 strided, rank 8, all of three", 17, 16, 24, 8, {{0, 8}, {8, 16}, {16, 24}}, 3)};
  cases.push_back(
      lora_case("8192x4096 to 6144, rank 16", 8192, 4096, 6144, 16, {{0, 4096}, {4096, 5120}, {5120, 6144}}));
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
