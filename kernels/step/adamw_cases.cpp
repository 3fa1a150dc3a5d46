// Cases of AdamW. The op updates in place, so a case first copies its inputs to its outputs, and equal inputs give
// equal outputs. In bf16 the weights are the rounded master, otherwise a copy of it.
#include <limits>

#include "engine/rng.h"
#include "kernels/common/op_case.h"
#include "kernels/ops/cast.h"
#include "kernels/step/adamw.h"

namespace triad {

namespace {

OpCase adamw_case(std::string name, int64_t n, const AdamWOptions& o, double grad_norm_squared) {
  const Shape shape = {n};
  OpCase c{.op = "adamw", .name = std::move(name)};
  const auto small_squares = [](int64_t i, uint64_t seed) {
    return 1e-2 * Philox(seed, 7).uniform(static_cast<uint64_t>(i));
  };
  c.args = {{.name = "master0", .role = ArgRole::constant, .shape = shape, .type = ArgType::acc},
            {.name = "m0", .role = ArgRole::constant, .shape = shape, .type = ArgType::acc, .std = 0.1},
            {.name = "v0", .role = ArgRole::constant, .shape = shape, .type = ArgType::acc, .fill = small_squares},
            {.name = "grad", .role = ArgRole::constant, .shape = shape, .type = ArgType::acc, .std = 0.1},
            {.name = "norm_squared",
             .role = ArgRole::constant,
             .shape = {1},
             .type = ArgType::f64,
             .fill = [grad_norm_squared](int64_t, uint64_t) { return grad_norm_squared; }},
            {.name = "master", .role = ArgRole::output, .shape = shape, .type = ArgType::acc},
            {.name = "m", .role = ArgRole::output, .shape = shape, .type = ArgType::acc},
            {.name = "v", .role = ArgRole::output, .shape = shape, .type = ArgType::acc},
            {.name = "weights", .role = ArgRole::output, .shape = shape}};
  c.forward = [o](Context& ctx, const Args& t) {
    const Tensor master = t["master"], weights = t["weights"];
    copy(ctx, master, t["master0"]);
    copy(ctx, t["m"], t["m0"]);
    copy(ctx, t["v"], t["v0"]);
    cast(ctx, weights, master);  // weights keep these values if the norm is not finite
    const bool rounded = weights.dtype == DType::bf16;
    adamw(ctx, master, rounded ? weights : Tensor{}, t["m"], t["v"], t["grad"], t["norm_squared"], o);
    if (!rounded) copy(ctx, weights, master);
  };
  // Bytes in bf16: 3 copies of f32, a cast to bf16, the update. For f32 `triad bench` doubles the number, which is
  // slightly too high, since the update then writes no weights.
  const double elements = static_cast<double>(n);
  c.forward_flops = 16 * elements;
  c.forward_bytes = (3 * 8 + 6 + 30) * elements;
  c.forward_written = (3 * 4 + 2 + 14) * elements;
  return c;
}

}  // namespace

std::vector<OpCase> adamw_cases() {
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<OpCase> cases = {
      adamw_case("1, first step", 1, {.lr = 1e-2, .step = 1}, 1.0),
      adamw_case("1031, decay", 1031, {.lr = 1e-2, .weight_decay = 0.1, .step = 7}, 4.0),
      adamw_case("4096, clipped", 4096, {.lr = 3e-3, .weight_decay = 0.1, .grad_clip = 1.0, .step = 1000}, 25.0),
      adamw_case("127, below the clip", 127, {.lr = 3e-3, .grad_clip = 1.0, .step = 2}, 0.25),
      adamw_case("33, norm not finite", 33, {.lr = 1e-2, .weight_decay = 0.1, .grad_clip = 1.0, .step = 3}, infinity),
  };
  cases.push_back(adamw_case("16 Mi, with the copies of its state", int64_t{1} << 24,
                             {.lr = 3e-4, .weight_decay = 0.1, .grad_clip = 1.0, .step = 100}, 2.0));
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
