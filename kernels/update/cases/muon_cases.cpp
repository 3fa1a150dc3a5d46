// Cases for Muon's momentum and update, without the iteration between them, which newton_schulz_cases.cpp covers. The
// matrices begin at aligned and at unaligned elements, and leave gaps in the buffers.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "engine/rng.h"
#include "kernels/common/op_case.h"
#include "kernels/ops/cast.h"
#include "kernels/update/muon.h"

namespace triad {

namespace {

// Tensor types. An ArgType::element is bf16 if the case runs in bf16; an ArgType::acc is f32 then.
struct Types {
  ArgType param = ArgType::acc, m = ArgType::acc, grad = ArgType::acc;
};

// split: in bf16 the masters are split for the update and joined after it.
OpCase muon_case(std::string name, const std::vector<MuonMatrix>& matrices, const MuonOptions& o,
                 double grad_norm_squared, const Types& types = {}, bool split = false) {
  const MuonPlan plan(matrices);
  const int64_t n = matrices.back().element + matrices.back().size() - o.first_element + 3;
  const Shape shape = {n}, updates = {plan.batches()[0].elements};
  OpCase c{.op = "muon", .name = std::move(name)};
  c.args = {{.name = "param0", .role = ArgRole::constant, .shape = shape, .type = types.param},
            {.name = "m0", .role = ArgRole::constant, .shape = shape, .type = types.m, .std = 0.1},
            {.name = "grad", .role = ArgRole::constant, .shape = shape, .type = types.grad, .std = 0.1},
            {.name = "o", .role = ArgRole::constant, .shape = updates, .std = 0.05},
            {.name = "norm_squared",
             .role = ArgRole::constant,
             .shape = {1},
             .type = ArgType::f64,
             .fill = [grad_norm_squared](int64_t, uint64_t) { return grad_norm_squared; }},
            {.name = "param", .role = ArgRole::output, .shape = shape, .type = types.param},
            {.name = "m", .role = ArgRole::output, .shape = shape, .type = types.m},
            {.name = "u", .role = ArgRole::output, .shape = updates}};
  if (types.param == ArgType::acc) c.args.push_back({.name = "weights", .role = ArgRole::output, .shape = shape});
  c.forward = [o, plan, split](Context& ctx, const Args& t) {
    const Tensor param = t["param"], weights = t["weights"];
    Scratch::Scope scope(ctx.scratch);
    const auto pieces = static_cast<int64_t>(plan.pieces().size());
    const Tensor table = scope.alloc(DType::i64, {pieces, MuonPiece::kFields});
    write(ctx, table, plan.pieces().data());
    copy(ctx, param, t["param0"]);
    copy(ctx, t["m"], t["m0"]);
    zero(ctx, t["u"]);
    if (!weights.empty()) cast(ctx, weights, param);  // what no matrix holds keeps these values
    const bool rounded = !weights.empty() && weights.dtype == DType::bf16;
    MuonTensors tensors = {.param = param,
                           .weights = rounded ? weights : Tensor{},
                           .m = t["m"],
                           .grad = t["grad"],
                           .grad_norm_squared = t["norm_squared"],
                           .pieces = table};
    const bool splits = split && rounded;
    if (splits) {
      const int64_t elements = param.numel();
      tensors.param = scope.alloc(DType::u8, {elements, 2});
      tensors.ties = {scope.alloc(DType::i32, {TieBits::words_for(elements)})};
      split_master(ctx, {tensors.param, weights, tensors.ties}, param);
    }
    muon_momentum(ctx, t["u"], tensors, o);
    muon_apply(ctx, tensors, t["o"], o);
    if (splits) join_master(ctx, param, {tensors.param, weights, tensors.ties});
    if (!weights.empty() && !rounded) copy(ctx, weights, param);
  };
  // Bytes in bf16: three copies and a cast, then the two kernels; for f32 `triad bench` doubles the number, which is
  // too high.
  const double elements = static_cast<double>(n);
  const auto width = [](ArgType type) { return type == ArgType::acc ? 4.0 : 2.0; };
  const double state = width(types.param) + width(types.m);
  c.forward_flops = 10 * elements;
  c.forward_bytes = (4 * state + width(types.grad) + 2 + 6 + 4) * elements;
  c.forward_written = (2 * state + 2 + 2 + 4) * elements;
  return c;
}

}  // namespace

std::vector<OpCase> muon_cases() {
  constexpr ArgType element = ArgType::element;
  const MuonOptions o = {.lr = 0.02, .weight_decay = 0.1, .grad_clip = 1, .step = 11, .seed = 3};
  MuonOptions later = o, odd = o;
  later.first_element = 4096, odd.first_element = 4091;
  // 561 elements, then a matrix that begins at an odd element, then one with two pieces, and two with the same shape.
  const std::vector<MuonMatrix> several = {
      {4096, 33, 17}, {4657, 17, 33}, {5248, 100, 100}, {15360, 64, 48}, {18432, 64, 48}};
  std::vector<OpCase> cases = {muon_case("1x1", {{0, 1, 1}}, {.lr = 0.1, .weight_decay = 0.5}, 1.0),
                               muon_case("several, clipped", several, later, 25.0),
                               muon_case("several, below the clip", several, later, 0.25),
                               muon_case("several from an odd element on", several, odd, 4.0),
                               muon_case("8x8, norm not finite", {{0, 8, 8}}, o, std::nan(""))};
  for (const auto& [name, types] : {std::pair{"p", Types{.param = element}},
                                    {"m", Types{.m = element}},
                                    {"g", Types{.grad = element}},
                                    {"pmg", Types{element, element, element}}}) {
    cases.push_back(muon_case(std::string("several, bf16 ") + name, several, later, 4.0, types));
    cases.push_back(muon_case(std::string("from an odd element on, bf16 ") + name, several, odd, 4.0, types));
  }
  cases.push_back(muon_case("several, split masters", several, later, 4.0, {}, /*split=*/true));
  cases.push_back(muon_case("from an odd element on, split masters", several, odd, 4.0, {}, /*split=*/true));
  cases.push_back(muon_case("16 Mi, with the copies of its state", {{0, 4096, 4096}}, o, 2.0));
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
