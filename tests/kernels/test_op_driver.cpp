// Checks that the op driver detects mistakes in ops: each case here computes y = x * w with one mistake.
#include <algorithm>

#include "engine/check.h"
#include "tests/support/op_driver.h"
#include "tests/support/test.h"

namespace triad::test {

namespace {

constexpr int64_t kRows = 5, kCols = 7, kPad = 2;

enum class Mistake {
  none,
  wrong_gradient,
  overwrites_dw,
  leaves_dx,
  leaves_y,
  writes_padding,
  writes_before,
  changes_x,
  uses_thread
};

double* row(const Tensor& t, int64_t r) { return t.ptr<double>() + r * t.stride[0]; }

// y[r][c] = x[r][c] * w[c]; dx = dy * w; dw[c] += sum over r of dy * x
OpCase scale_case(Mistake mistake) {
  OpCase c{.op = "scale", .name = "5x7"};
  c.args = {{.name = "x", .role = ArgRole::input, .shape = {kRows, kCols}, .row_pad = kPad},
            {.name = "w", .role = ArgRole::param, .shape = {kCols}},
            {.name = "y", .role = ArgRole::output, .shape = {kRows, kCols}, .row_pad = kPad}};
  c.forward = [mistake](Context& ctx, const Args& t) {
    if (ctx.planning) return;
    const Tensor x = t["x"], y = t["y"];
    const double* w = t["w"].ptr<double>();
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t i = 0; i < kCols; ++i) row(y, r)[i] = row(x, r)[i] * w[i];
    if (mistake == Mistake::leaves_y) row(y, 3)[2] = unwritten(DType::f64);
    if (mistake == Mistake::writes_padding) row(y, 1)[kCols] = 0;
    if (mistake == Mistake::writes_before) y.ptr<double>()[-1] = 0;
    if (mistake == Mistake::changes_x) row(x, 0)[0] += 1e-9;
    if (mistake == Mistake::uses_thread && ctx.threads > 1) row(y, 0)[0] *= 1 + 1e-15;
  };
  c.backward = [mistake](Context& ctx, const Args& t) {
    if (ctx.planning) return;
    const Tensor x = t["x"], dx = t["dx"], dy = t["dy"];
    const double* w = t["w"].ptr<double>();
    double* dw = t["dw"].ptr<double>();
    for (int64_t i = 0; i < kCols; ++i) {
      double sum = 0;
      for (int64_t r = 0; r < kRows; ++r) sum += row(dy, r)[i] * row(x, r)[i];
      dw[i] = mistake == Mistake::overwrites_dw ? sum : dw[i] + sum;
    }
    if (mistake == Mistake::leaves_dx) return;
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t i = 0; i < kCols; ++i)
        row(dx, r)[i] = row(dy, r)[i] * w[i] * (mistake == Mistake::wrong_gradient && r == 2 ? 1.0001 : 1);
  };
  return c;
}

std::string complaint_of(Mistake mistake) {
  const OpCase c = scale_case(mistake);
  OpRun run(c, {});
  run.run();
  const std::vector<std::string> all = run.complaints();
  return all.empty() ? "" : all.front();
}

double worst_gradient(Mistake mistake) {
  double worst = 0;
  for (const GradientError& e : gradient_errors(scale_case(mistake))) worst = std::max(worst, e.error);
  return worst;
}

}  // namespace

TEST_CASE("op driver: a correct op passes") {
  CHECK(complaint_of(Mistake::none).empty());
  CHECK(worst_gradient(Mistake::none) < 1e-8);
}

TEST_CASE("op driver: changed inputs and writes outside of a tensor are detected") {
  CHECK(complaint_of(Mistake::writes_padding) == "y: wrote outside of the tensor, first at byte 128 from its start");
  CHECK(complaint_of(Mistake::writes_before) == "y: wrote outside of the tensor, first at byte -8 from its start");
  CHECK(complaint_of(Mistake::changes_x) == "x was changed, or bytes around it");
}

TEST_CASE("op driver: elements that are not written are detected") {
  CHECK(complaint_of(Mistake::leaves_y) == "y: 1 of 35 elements are NaN or were not written");
  CHECK(complaint_of(Mistake::leaves_dx) == "dx: 35 of 35 elements are NaN or were not written");
}

TEST_CASE("op driver: wrong gradients are detected") {
  CHECK(worst_gradient(Mistake::wrong_gradient) > 1e-5);
  CHECK(worst_gradient(Mistake::overwrites_dw) > 1e-5);
}

TEST_CASE("op driver: results that depend on the thread count are detected") {
  const OpCase c = scale_case(Mistake::uses_thread);
  OpRun one(c, {}), again(c, {}), two(c, {.threads = 2});
  for (OpRun* run : {&one, &again, &two}) run->run();
  CHECK(one.same_bits(again));
  CHECK_FALSE(one.same_bits(two));
}

TEST_CASE("op driver: a run takes the initial values of another one, as if it had drawn them") {
  const OpCase c = scale_case(Mistake::none);
  OpRun low(c, {.dtype = DType::bf16, .shift = 1});
  const RunOptions exact{.dtype = DType::f64, .precision = DType::bf16};
  OpRun drawn(c, exact), taken(c, exact, &low), taken_again(c, exact, &taken);
  for (OpRun* run : {&drawn, &taken, &taken_again}) run->run();
  CHECK(taken.same_bits(drawn));
  CHECK(taken_again.same_bits(drawn));
  CHECK(taken.complaints().empty());
  CHECK_THROWS(OpRun(c, {.dtype = DType::f64}, &low));  // another precision
  CHECK_THROWS(OpRun(c, {.dtype = DType::bf16, .seed = 2}, &low));
}

TEST_CASE("op driver: relative error") {
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<double> a = {3, -inf, 4}, b = {3, -inf, 4.5}, c = {3, inf, 4}, zeros = {0, 0, 0};
  CHECK(relative_error(a, a) == 0);
  CHECK(relative_error(b, a) == 0.1);
  CHECK(relative_error(c, a) == inf);
  CHECK(relative_error(zeros, zeros) == 0);
}

}  // namespace triad::test
