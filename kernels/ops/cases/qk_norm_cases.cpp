// QK-norm cases: queries alone, with one branch's keys (dense attention) and with three (NSA), and in place.
#include "kernels/common/op_case.h"
#include "kernels/ops/qk_norm.h"

namespace triad {

namespace {

struct HeadsShape {
  std::string name;
  int64_t B, T, Hq, Hkv, D;
  int branches;  // branches that have keys
  int64_t row_pad = 0;
  double std = 1;  // standard deviation of x
  bool in_place = false;
  bool bench = false;
};

constexpr double kEps = 1e-6;
const char* const kNames[] = {"q", "k", "l", "m"};

// The query and key tensors named "front + name + back".
QkHeads heads(const Args& t, const std::string& front, const std::string& back) {
  QkHeads all;
  for (size_t p = 0; p < all.size(); ++p) all[p] = t[front + kNames[p] + back];
  return all;
}
ConstQkHeads as_const(const QkHeads& all) { return {all[0], all[1], all[2], all[3]}; }

void copy_heads(Context& ctx, const QkHeads& to, const QkHeads& from) {
  for (size_t p = 0; p < to.size(); ++p)
    if (!to[p].empty()) copy(ctx, to[p], from[p]);
}

OpCase qk_norm_case(const HeadsShape& s) {
  OpCase c{.op = "qk_norm", .name = s.name};
  for (int p = 0; p <= s.branches; ++p) {
    const Shape shape = {s.B, s.T, p == 0 ? s.Hq : s.Hkv, s.D};
    c.args.push_back({.name = kNames[p], .role = ArgRole::input, .shape = shape, .std = s.std, .row_pad = s.row_pad});
    c.args.push_back({.name = std::string(kNames[p]) + "_normed",
                      .role = ArgRole::output,
                      .shape = shape,
                      .row_pad = 2 * s.row_pad});
  }
  c.args.push_back({.name = "w", .role = ArgRole::param, .shape = {(1 + s.branches) * s.D}, .std = 0.3, .mean = 1});
  c.forward = [in_place = s.in_place](Context& ctx, const Args& t) {
    const QkHeads x = heads(t, "", ""), y = heads(t, "", "_normed");
    if (in_place) copy_heads(ctx, y, x);
    qk_norm_forward(ctx, y, as_const(in_place ? y : x), t["w"], kEps);
  };
  c.backward = [in_place = s.in_place](Context& ctx, const Args& t) {
    const QkHeads x = heads(t, "", ""), dx = heads(t, "d", ""), dy = heads(t, "d", "_normed");
    if (in_place) copy_heads(ctx, dx, dy);
    qk_norm_backward(ctx, dx, t["dw"], as_const(in_place ? dx : dy), as_const(x), t["w"], kEps);
  };
  c.bench = s.bench;
  const double elements = static_cast<double>(s.B * s.T * (s.Hq + s.branches * s.Hkv) * s.D);
  c.forward_flops = 4 * elements, c.backward_flops = 10 * elements;
  c.forward_bytes = 4 * elements, c.backward_bytes = 6 * elements;
  c.backward_written = 2 * elements;
  return c;
}

}  // namespace

std::vector<OpCase> qk_norm_cases() {
  return {qk_norm_case({"1x1x1x2", 1, 1, 1, 1, 2, 0}),
          qk_norm_case({"2x7x3x6, one branch", 2, 7, 3, 1, 6, 1}),
          qk_norm_case({"1x33x6x10, three branches, padded", 1, 33, 6, 2, 10, 3, 6}),
          qk_norm_case({"2x65x4x64, three branches, in place", 2, 65, 4, 2, 64, 3, 0, 1, true}),
          qk_norm_case({"1x9x6x64, small values", 1, 9, 6, 2, 64, 3, 8, 1e-3}),
          qk_norm_case({"1x17x5x100, in place, padded", 1, 17, 5, 1, 100, 1, 4, 1, true}),
          qk_norm_case({"1x13x3x128", 1, 13, 3, 3, 128, 3}),
          qk_norm_case({"1x11x2x192, padded", 1, 11, 2, 1, 192, 3, 8}),
          qk_norm_case({"1x5x3x254", 1, 5, 3, 1, 254, 1}),
          qk_norm_case({"1x7x2x256", 1, 7, 2, 2, 256, 3}),
          qk_norm_case({"16x2048x12x64, three branches", 16, 2048, 12, 2, 64, 3, 0, 1, true, true}),
          qk_norm_case({"1x8192x32x128, one branch", 1, 8192, 32, 8, 128, 1, 0, 1, false, true})};
}

}  // namespace triad
