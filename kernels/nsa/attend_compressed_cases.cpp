// Cases of the compressed branch.
#include "kernels/nsa/attend_compressed.h"
#include "kernels/nsa/gate.h"
#include "kernels/nsa/nsa_cases.h"

namespace triad {

namespace {

OpCase compressed_case(std::string name, AttendSizes n, const CompressedOptions& o, int64_t row_pad = 0) {
  n.S = compressed_length(n.T, o.l, o.d);
  OpCase c{.op = "nsa_attend_compressed", .name = std::move(name), .args = attend_args(n, 1.0, row_pad)};
  c.forward = [o](Context& ctx, const Args& a) {
    nsa_attend_compressed_forward(ctx, {a["o"], a["lse"]}, {a["q"], a["k"], a["v"]}, o);
  };
  c.backward = [o](Context& ctx, const Args& a) {
    Scratch::Scope scope(ctx.scratch);
    const Tensor delta = scope.alloc(a["lse"].dtype, a["lse"].shape());
    attention_delta(ctx, delta, a["do"], a["o"]);
    nsa_attend_compressed_backward(ctx, {a["dq"], a["dk"], a["dv"]}, {a["do"], {}, delta, a["lse"]},
                                   {a["q"], a["k"], a["v"]}, o);
  };
  set_attend_costs(c, n, compressed_pairs(n.T, o.l, o.d));
  return c;
}

}  // namespace

std::vector<OpCase> attend_compressed_cases() {
  std::vector<OpCase> cases = {
      compressed_case("31_no_block", {1, 31, 0, 4, 2, 8, 8}, {32, 16}),
      compressed_case("2x48_two_blocks", {2, 48, 0, 4, 2, 8, 8}, {32, 16}),
      compressed_case("63_l8_d4", {2, 63, 0, 6, 2, 10, 6}, {8, 4}),
      compressed_case("40_l1_d1", {1, 40, 0, 2, 1, 32, 32}, {1, 1}),
      compressed_case("127_l32_d16_G16", {1, 127, 0, 16, 1, 64, 64}, {32, 16}),
      compressed_case("127_l4_d2_strided", {1, 127, 0, 4, 2, 64, 64}, {4, 2}, 8),
      compressed_case("111_l16_d8_192x128", {1, 111, 0, 2, 2, 192, 128}, {16, 8}),
      compressed_case("90_l12_d6_60x100", {1, 90, 0, 8, 1, 60, 100}, {12, 6}),
      compressed_case("300_l8_d4_128x128", {1, 300, 0, 12, 2, 128, 128}, {8, 4}, 8),
      compressed_case("2x290_l2_d1_128x128_G16", {2, 290, 0, 16, 1, 128, 128}, {2, 1}),
      compressed_case("20_l32_d16_128x128_no_block", {1, 20, 0, 4, 2, 128, 128}, {32, 16}),
      compressed_case("m7c", {16, 2048, 0, 12, 2, 64, 64}, {32, 16}),
  };
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
