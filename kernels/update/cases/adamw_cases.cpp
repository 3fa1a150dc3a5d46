// AdamW cases. The op updates in place, so a case first copies its inputs to its outputs, and equal inputs give equal
// outputs. If param is in the accumulator type, the weights in bf16 are param rounded, otherwise a copy.
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "engine/rng.h"
#include "kernels/common/op_case.h"
#include "kernels/ops/cast.h"
#include "kernels/update/adamw.h"

namespace triad {

namespace {

// Tensor types. An ArgType::element is bf16 if the case runs in bf16; an ArgType::acc is f32 then.
struct Types {
  ArgType param = ArgType::acc, m = ArgType::acc, v = ArgType::acc, grad = ArgType::acc;
  std::string str() const {
    std::string name;
    for (const auto& [letter, type] : {std::pair{'p', param}, {'m', m}, {'v', v}, {'g', grad}})
      if (type == ArgType::element) name += letter;
    return name;
  }
};

// split: in bf16 the masters are split for the update and joined after it.
OpCase adamw_case(std::string name, int64_t n, const AdamWOptions& o, double grad_norm_squared, const Types& types = {},
                  bool split = false) {
  const Shape shape = {n};
  OpCase c{.op = "adamw", .name = std::move(name)};
  const auto small_squares = [](int64_t i, uint64_t seed) {
    return 1e-2 * Philox(seed, 7).uniform(static_cast<uint64_t>(i));
  };
  c.args = {{.name = "param0", .role = ArgRole::constant, .shape = shape, .type = types.param},
            {.name = "m0", .role = ArgRole::constant, .shape = shape, .type = types.m, .std = 0.1},
            {.name = "v0", .role = ArgRole::constant, .shape = shape, .type = types.v, .fill = small_squares},
            {.name = "grad", .role = ArgRole::constant, .shape = shape, .type = types.grad, .std = 0.1},
            {.name = "norm_squared",
             .role = ArgRole::constant,
             .shape = {1},
             .type = ArgType::f64,
             .fill = [grad_norm_squared](int64_t, uint64_t) { return grad_norm_squared; }},
            {.name = "param", .role = ArgRole::output, .shape = shape, .type = types.param},
            {.name = "m", .role = ArgRole::output, .shape = shape, .type = types.m},
            {.name = "v", .role = ArgRole::output, .shape = shape, .type = types.v}};
  if (types.param == ArgType::acc) c.args.push_back({.name = "weights", .role = ArgRole::output, .shape = shape});
  c.forward = [o, split](Context& ctx, const Args& t) {
    const Tensor param = t["param"], weights = t["weights"];
    copy(ctx, param, t["param0"]);
    copy(ctx, t["m"], t["m0"]);
    copy(ctx, t["v"], t["v0"]);
    if (!weights.empty()) cast(ctx, weights, param);  // weights keep these values if the norm is not finite
    const bool rounded = !weights.empty() && weights.dtype == DType::bf16;
    if (split && rounded) {
      const int64_t count = param.numel();
      Scratch::Scope scope(ctx.scratch);
      const SplitMaster master = {
          scope.alloc(DType::u8, {count, 2}), weights, {scope.alloc(DType::i32, {TieBits::words_for(count)})}};
      split_master(ctx, master, param);
      adamw(ctx, master.remainder, weights, t["m"], t["v"], t["grad"], t["norm_squared"], o, master.ties);
      return join_master(ctx, param, master);
    }
    adamw(ctx, param, rounded ? weights : Tensor{}, t["m"], t["v"], t["grad"], t["norm_squared"], o);
    if (!weights.empty() && !rounded) copy(ctx, weights, param);
  };
  // Bytes moved in bf16: the copies of param, m and v, a cast to bf16 if there are weights, and the update. For f32
  // `triad bench` doubles these bytes, which is too many, since the state isn't larger then and no weights are written.
  const double elements = static_cast<double>(n);
  const auto width = [](ArgType type) { return type == ArgType::acc ? 4.0 : 2.0; };
  const double state = width(types.param) + width(types.m) + width(types.v);
  const double cast_read = types.param == ArgType::acc ? 4 : 0, weights = types.param == ArgType::acc ? 2 : 0;
  // Split: the update reads and writes 4 bytes per master and weight, where it otherwise reads 4 and writes 6;
  // splitting and joining read and write 4 each.
  const double more = split ? 16 - 2 : 0, more_written = split ? 8 - 2 : 0;
  c.forward_flops = 16 * elements;
  c.forward_bytes = (4 * state + width(types.grad) + cast_read + 2 * weights + more) * elements;
  c.forward_written = (2 * state + 2 * weights + more_written) * elements;
  return c;
}

// Cases for state and gradients in bf16: each choice of tensors, from a first element inside the parameter buffer.
std::vector<OpCase> bf16_cases() {
  const AdamWOptions o = {.lr = 3e-3, .weight_decay = 0.1, .grad_clip = 1.0, .step = 11, .seed = 3};
  const auto type = [](bool narrow) { return narrow ? ArgType::element : ArgType::acc; };
  std::vector<OpCase> cases;
  for (int choice = 1; choice < 16; ++choice) {
    const Types types = {type(choice & 1), type(choice & 2), type(choice & 4), type(choice & 8)};
    AdamWOptions options = o;
    options.first_element = choice % 2 == 0 ? 1 << 20 : 4096;
    cases.push_back(adamw_case("515, bf16 " + types.str(), 515, options, 4.0, types));
  }
  const Types all = {type(true), type(true), type(true), type(true)};
  AdamWOptions odd = o;
  odd.first_element = 5;
  cases.push_back(adamw_case("261 from element 5 on, bf16 " + all.str(), 261, odd, 4.0, all));
  cases.push_back(adamw_case("33, norm not finite, bf16 " + all.str(), 33, o, std::nan(""), all));
  const Types moments = {.m = type(true), .v = type(true)};
  for (const Types& types : {moments, all}) {
    cases.push_back(adamw_case("16 Mi, bf16 " + types.str(), int64_t{1} << 24, o, 2.0, types));
    cases.back().bench = true;
  }
  return cases;
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
  for (OpCase& c : bf16_cases()) cases.push_back(std::move(c));
  const AdamWOptions clipped = {.lr = 3e-3, .weight_decay = 0.1, .grad_clip = 1.0, .step = 11, .seed = 3};
  AdamWOptions odd = clipped;
  odd.first_element = 5;
  constexpr ArgType narrow = ArgType::element;
  cases.push_back(adamw_case("515, split masters", 515, clipped, 4.0, {}, /*split=*/true));
  cases.push_back(adamw_case("261 from element 5 on, split masters, bf16 mvg", 261, odd, 4.0,
                             {.m = narrow, .v = narrow, .grad = narrow}, /*split=*/true));
  cases.push_back(adamw_case("33, norm not finite, split masters", 33, clipped, infinity, {}, /*split=*/true));
  cases.push_back(adamw_case("16 Mi, split masters, with copies, split and join", int64_t{1} << 24, clipped, 2.0, {},
                             /*split=*/true));
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
