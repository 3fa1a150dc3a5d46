// Cases for argmax and advance(), which computes the next position.
#include <limits>

#include "kernels/common/op_case.h"
#include "kernels/decode/argmax.h"

namespace triad {

namespace {

// fill: the logits; random if absent.
OpCase argmax_case(std::string name, int64_t N, int64_t width, int64_t vocab,
                   std::function<double(int64_t, uint64_t)> fill = nullptr) {
  OpCase c{.op = "argmax", .name = std::move(name)};
  c.args = {{.name = "logits", .role = ArgRole::constant, .shape = {N, width}, .row_pad = 3, .fill = std::move(fill)},
            {.name = "token", .role = ArgRole::saved, .shape = {N}, .type = ArgType::i32}};
  c.forward = [vocab](Context& ctx, const Args& a) { argmax(ctx, a["token"], a["logits"], vocab); };
  c.forward_written = 4 * static_cast<double>(N);
  c.forward_bytes = 2 * static_cast<double>(N * vocab) + c.forward_written;
  return c;
}

OpCase advance_case(std::string name, int64_t N, int64_t last) {
  OpCase c{.op = "argmax", .name = std::move(name)};
  Arg before{.name = "before", .role = ArgRole::constant, .shape = {N}, .type = ArgType::i32};
  before.fill = [last](int64_t i, uint64_t) { return static_cast<double>(i % (last + 1)); };
  c.args = {before, {.name = "position", .role = ArgRole::saved, .shape = {N}, .type = ArgType::i32}};
  c.forward = [last](Context& ctx, const Args& a) {
    copy(ctx, a["position"], a["before"]);
    advance(ctx, a["position"], last);
  };
  return c;
}

}  // namespace

std::vector<OpCase> argmax_cases() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
  std::vector<OpCase> cases = {
      argmax_case("1x1", 1, 1, 1),
      argmax_case("3x37_of_33", 3, 37, 33),
      argmax_case("2x50304", 2, 50304, 50257),
      // Equal logits: the lowest index is the result, across threads too.
      argmax_case("equals", 4, 5000, 4999,
                  [](int64_t i, uint64_t seed) { return double((i * 7 + int64_t(seed)) % 5); }),
      argmax_case("all_equal", 2, 3000, 3000, [](int64_t, uint64_t) { return -1.5; }),
      // The largest logit is in a padding column.
      argmax_case("padding", 2, 1100, 1030, [](int64_t i, uint64_t) { return double(i % 1100); }),
      // Rows 1 to 3 have a NaN, +infinity or -infinity within the vocabulary, row 0 has none; rows 4 to 6 have them in
      // padding columns, which are ignored.
      argmax_case("not_finite", 7, 1500, 1400,
                  [=](int64_t i, uint64_t) {
                    const int64_t row = i / 1500, j = i % 1500;
                    const double values[] = {0, kNan, kInfinity, -kInfinity};
                    if (row > 0 && j == (row <= 3 ? 1300 + row : 1450)) return values[row <= 3 ? row : row - 3];
                    return double(j * 13 % 1400);
                  }),
      advance_case("advance", 300, 299),
      advance_case("advance_to_0", 2, 0),
      argmax_case("m7c", 1, 50304, 50257),
      argmax_case("m7c_64", 64, 50304, 50257),
  };
  for (size_t i = cases.size() - 2; i < cases.size(); ++i) cases[i].bench = true;
  return cases;
}

}  // namespace triad
