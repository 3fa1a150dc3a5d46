// Cases for the rotary embedding, with gradients in the element type or the accumulator type, and for the angle table.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

#include "kernels/common/op_case.h"
#include "kernels/ops/cast.h"
#include "kernels/ops/rope.h"

namespace triad {

namespace {

constexpr double kTheta = 10000.0;

struct RopeShape {
  std::string name;
  int64_t B, T, H, D;
  int64_t row_pad = 0;
  bool acc_gradient = false;  // dy and the case's output are in the accumulator type
  bool bench = false;
};

OpCase rope_case(const RopeShape& s) {
  const Shape shape = {s.B, s.T, s.H, s.D}, table = {s.T + 3, s.D / 2};
  const auto angle = [D = s.D](int64_t i) {
    const double j = static_cast<double>(i % (D / 2)), t = static_cast<double>(i / (D / 2));
    return t * std::pow(kTheta, -2.0 * j / static_cast<double>(D));
  };
  const ArgType out = s.acc_gradient ? ArgType::acc : ArgType::element;
  OpCase c{.op = "rope", .name = s.name};
  c.args = {{.name = "x", .role = ArgRole::input, .shape = shape, .row_pad = s.row_pad},
            {.name = "cos",
             .role = ArgRole::constant,
             .shape = table,
             .type = ArgType::acc,
             .fill = [angle](int64_t i, uint64_t) { return std::cos(angle(i)); }},
            {.name = "sin",
             .role = ArgRole::constant,
             .shape = table,
             .type = ArgType::acc,
             .fill = [angle](int64_t i, uint64_t) { return std::sin(angle(i)); }},
            {.name = "y", .role = ArgRole::output, .shape = shape, .type = out}};
  c.forward = [](Context& ctx, const Args& t) {
    const Tensor y = t["y"], x = t["x"];
    if (y.dtype == x.dtype) return rope_forward(ctx, y, x, t["cos"], t["sin"], {}, t["begin"]);
    Scratch::Scope scope(ctx.scratch);
    const Tensor rounded = scope.alloc(x.dtype, y.shape());
    rope_forward(ctx, rounded, x, t["cos"], t["sin"], {}, t["begin"]);
    cast(ctx, y, rounded);
  };
  c.backward = [](Context& ctx, const Args& t) {
    rope_backward(ctx, t["dx"], t["dy"], t["cos"], t["sin"], {}, {}, t["begin"]);
  };
  c.bench = s.bench;
  const double elements = static_cast<double>(shape.numel()), angles = static_cast<double>(table.numel());
  c.forward_flops = c.backward_flops = 3 * elements;
  c.forward_bytes = c.backward_bytes = 4 * elements + 8 * angles;
  return c;
}

// As in a model layer: queries and two branches' keys in one call. Keys are rotated in place, so the case copies them
// first.
OpCase layer_case(const RopeShape& s, int64_t Hkv) {
  OpCase c = rope_case(s);
  for (const std::string k : {"k", "l"}) {
    const Shape shape = {s.B, s.T, Hkv, s.D};
    c.args.push_back({.name = k, .role = ArgRole::input, .shape = shape, .row_pad = s.row_pad});
    c.args.push_back({.name = k + "_turned", .role = ArgRole::output, .shape = shape, .row_pad = 2 * s.row_pad});
  }
  c.forward = [](Context& ctx, const Args& t) {
    copy(ctx, t["k_turned"], t["k"]), copy(ctx, t["l_turned"], t["l"]);
    rope_forward(ctx, t["y"], t["x"], t["cos"], t["sin"], {Tensor{}, t["k_turned"], t["l_turned"]}, t["begin"]);
  };
  c.backward = [](Context& ctx, const Args& t) {
    copy(ctx, t["dk"], t["dk_turned"]), copy(ctx, t["dl"], t["dl_turned"]);
    rope_backward(ctx, t["dx"], t["dy"], t["cos"], t["sin"], {t["dk"], Tensor{}, t["dl"]}, {}, t["begin"]);
  };
  return c;
}

// Backward alone, with a gradient dy_group that all heads in a group share.
OpCase group_case(const RopeShape& s, int64_t Hkv) {
  OpCase c = rope_case(s);
  c.args.front() = {.name = "dy", .role = ArgRole::constant, .shape = {s.B, s.T, s.H, s.D}, .type = ArgType::acc};
  c.args.back() = {.name = "dx", .role = ArgRole::output, .shape = {s.B, s.T, s.H, s.D}, .row_pad = s.row_pad};
  c.args.push_back(
      {.name = "dy_group", .role = ArgRole::constant, .shape = {s.B, s.T, Hkv, s.D}, .type = ArgType::acc});
  c.forward = [](Context& ctx, const Args& t) {
    rope_backward(ctx, t["dx"], t["dy"], t["cos"], t["sin"], {}, t["dy_group"], t["begin"]);
  };
  c.backward = nullptr;
  c.forward_bytes += static_cast<double>(s.B * s.T * s.D) * static_cast<double>(2 * s.H + 4 * Hkv);
  return c;
}

// Returns the case with packed documents, whose positions begin at 0. bounds: each document's first token among the
// B*T, then B*T.
OpCase packed(OpCase c, const std::vector<int64_t>& bounds) {
  const int64_t B = c.args.front().shape[0], T = c.args.front().shape[1];
  const auto begin = [bounds, T](int64_t token, uint64_t) {
    const auto after = std::ranges::upper_bound(bounds, token);
    return static_cast<double>(*std::prev(after) - token / T * T);
  };
  c.args.push_back({.name = "begin", .role = ArgRole::constant, .shape = {B, T}, .type = ArgType::i32, .fill = begin});
  return c;
}

OpCase table_case(std::string name, int64_t T, int64_t D, const RopeOptions& o) {
  const Shape table = {T, D / 2};
  OpCase c{.op = "rope", .name = std::move(name)};
  c.args = {{.name = "cos", .role = ArgRole::output, .shape = table, .type = ArgType::acc},
            {.name = "sin", .role = ArgRole::output, .shape = table, .type = ArgType::acc}};
  c.forward = [D, o](Context& ctx, const Args& t) { rope_table(ctx, t["cos"], t["sin"], D, o); };
  return c;
}

}  // namespace

std::vector<OpCase> rope_cases() {
  return {table_case("table 127x64", 127, 64, {.theta = kTheta}),
          table_case("table 9x6, scaled", 9, 6, {.theta = kTheta, .scale = 4}),
          table_case("table 65x32, llama3", 65, 32, {.scaling = RopeScaling::llama3, .original_len = 32}),
          table_case("table 65x32, yarn", 65, 32, {.scaling = RopeScaling::yarn, .factor = 4, .original_len = 32}),
          rope_case({"1x1x1x2", 1, 1, 1, 2}),
          rope_case({"2x7x3x6", 2, 7, 3, 6}),
          rope_case({"2x31x12x64", 2, 31, 12, 64}),
          rope_case({"3x15x2x64, padded", 3, 15, 2, 64, 8}),
          rope_case({"1x9x2x100, acc gradient", 1, 9, 2, 100, 0, true}),
          rope_case({"2x63x2x64, acc gradient", 2, 63, 2, 64, 16, true}),
          layer_case({"2x33x6x64, with keys", 2, 33, 6, 64}, 2),
          layer_case({"1x17x3x10, with keys, padded", 1, 17, 3, 10, 6}, 1),
          group_case({"2x35x12x64, group", 2, 35, 12, 64}, 2),
          group_case({"1x9x4x6, group", 1, 9, 4, 6, 2}, 4),
          packed(rope_case({"docs_1_2_3", 1, 3, 2, 6}), {0, 1, 2, 3}),
          packed(rope_case({"docs_33_64_65_127_acc_gradient", 1, 127, 2, 64, 8, true}), {0, 33, 64, 65, 127}),
          packed(layer_case({"docs_two_rows_with_keys", 2, 33, 6, 64}, 2), {0, 20, 33, 34, 50, 66}),
          packed(group_case({"docs_two_rows_group", 2, 35, 12, 64, 2}, 2), {0, 35, 36, 70}),
          packed(rope_case({"docs_one", 1, 40, 2, 10}), {0, 40}),
          packed(rope_case({"docs_781_2048", 1, 2048, 1, 128}), {0, 781, 2048}),
          rope_case({"16x2048x12x64", 16, 2048, 12, 64, 0, false, true}),
          group_case({"16x2048x12x64, group", 16, 2048, 12, 64, 0, false, true}, 2)};
}

}  // namespace triad
