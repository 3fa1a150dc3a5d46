// Rank sum cases, with lengths that are and are not multiples of 16 bytes.
#include <fmt/format.h>

#include "kernels/common/op_case.h"
#include "kernels/step/rank_sum.h"

namespace triad {

namespace {

OpCase rank_sum_case(std::string name, int64_t world, int64_t n, int64_t rank) {
  OpCase c{.op = "rank_sum", .name = std::move(name)};
  c.args = {{.name = "own", .role = ArgRole::constant, .shape = {n}},
            {.name = "parts", .role = ArgRole::constant, .shape = {world, n}},
            {.name = "sum", .role = ArgRole::output, .shape = {n}}};
  c.forward = [rank](Context& ctx, const Args& t) { rank_sum(ctx, t["sum"], t["own"], t["parts"], rank); };
  c.forward_flops = static_cast<double>((world - 1) * n);
  c.forward_bytes = 2 * static_cast<double>((world + 1) * n), c.forward_written = 2 * static_cast<double>(n);
  return c;
}

}  // namespace

std::vector<OpCase> rank_sum_cases() {
  std::vector<OpCase> cases = {rank_sum_case("2x64 rank 0", 2, 64, 0), rank_sum_case("2x63 rank 1", 2, 63, 1),
                               rank_sum_case("8x4096 rank 5", 8, 4096, 5), rank_sum_case("3x1031 rank 2", 3, 1031, 2)};
  cases.push_back(rank_sum_case("2x3276800", 2, 3276800, 1));
  cases.back().bench = true;
  for (const int64_t n : {4096, 1031}) {
    cases.push_back(rank_sum_case(fmt::format("4x{} rank 3, sum in f32", n), 4, n, 3));
    cases.back().args.back().type = ArgType::acc;
  }
  return cases;
}

}  // namespace triad
