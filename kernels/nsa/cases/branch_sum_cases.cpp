// Cases for summing the branches' gradients: rows made from whole 16-byte vectors and others, with and without padding.
#include "kernels/common/op_case.h"
#include "kernels/nsa/branch_sum.h"

namespace triad {

namespace {

OpCase sum_case(const std::string& name, int64_t N, int64_t W, int64_t row_pad = 0) {
  OpCase c{.op = "branch_sum", .name = name};
  c.args = {{.name = "parts", .role = ArgRole::constant, .shape = {N, 3 * W}, .row_pad = row_pad},
            {.name = "out", .role = ArgRole::output, .shape = {N, W}, .row_pad = row_pad}};
  c.forward = [](Context& ctx, const Args& t) { branch_sum(ctx, t["out"], t["parts"]); };
  c.forward_bytes = 8 * static_cast<double>(N * W);
  c.forward_written = 2 * static_cast<double>(N * W);
  return c;
}

}  // namespace

std::vector<OpCase> branch_sum_cases() {
  std::vector<OpCase> cases = {sum_case("1x1", 1, 1),
                               sum_case("7x12", 7, 12),
                               sum_case("33x64", 33, 64),
                               sum_case("129x40, padded", 129, 40, 8),
                               sum_case("31x21, padded", 31, 21, 5),
                               sum_case("32768x256", 32768, 256)};
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
