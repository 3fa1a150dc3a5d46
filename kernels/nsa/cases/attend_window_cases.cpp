// Window branch cases.
#include "kernels/common/portable_case.h"
#include "kernels/nsa/attend_window.h"
#include "kernels/nsa/cases/branch_cases.h"

namespace triad {

namespace {

OpCase window_case(std::string name, const AttendSizes& n, int64_t w, double q_std = 1.0, int64_t row_pad = 0) {
  OpCase c{.op = "nsa_attend_window", .name = std::move(name), .args = attend_args(n, q_std, row_pad)};
  c.forward = [w](Context& ctx, const Args& a) {
    nsa_attend_window_forward(ctx, {a["o"], a["lse"]}, {a["q"], a["k"], a["v"], documents_of(a)}, w);
  };
  c.backward = [w](Context& ctx, const Args& a) {
    run_branch_backward(ctx, a, 1, [w, &ctx](const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in) {
      nsa_attend_window_backward(ctx, out, grad, in, w);
    });
  };
  set_attend_costs(c, n, window_pairs(n.T, w));
  return c;
}

// A forward-only case, in which a row's largest score often comes late. With q_std = 30, exponentials relative to the
// largest of the first scores exceed 2^60 in some rows, so the kernels compute these scores again. With 150 they would
// exceed the float range.
OpCase peaked_case(std::string name, const AttendSizes& n, int64_t window, double q_std = 30.0) {
  OpCase c = window_case(std::move(name), n, window, q_std);
  c.backward = nullptr, c.f32_tolerance = 1e-3;
  return c;
}

std::vector<OpCase> packed_cases() {
  std::vector<OpCase> cases = {
      packed(window_case("docs_1_2_3_10x6", {1, 3, 3, 2, 2, 10, 6}, 2), kSingleTokens, 8),
      packed(window_case("docs_33_64_65_127_G4", {1, 127, 127, 8, 2, 8, 8}, 20), kMixed, 8),
      packed(window_case("docs_33_64_65_127_G2_60x100_strided", {1, 127, 127, 2, 1, 60, 100}, 40, 1.0, 8), kMixed, 16),
      packed(window_case("docs_33_64_65_127_G1_64x64", {1, 127, 127, 1, 1, 64, 64}, 1000), kMixed, 32),
      packed(window_case("docs_33_64_65_127_G1_128x128", {1, 127, 127, 1, 1, 128, 128}, 31), kMixed, 64),
      packed(window_case("docs_33_64_65_127_G1_192x128", {1, 127, 127, 1, 1, 192, 128}, 31), kMixed, 64),
      packed(window_case("docs_empty_tail_G6", {1, 127, 127, 6, 1, 10, 6}, 20), kMixedPadded, 8),
      packed(window_case("docs_two_rows_G16", {2, 127, 127, 16, 1, 8, 8}, 25), kTwoRows, 8),
      packed(window_case("docs_one", {1, 60, 60, 2, 1, 8, 8}, 20), {0, 60}, 8),
      packed(window_case("docs_64_of_4", {1, 256, 256, 2, 1, 8, 8}, 7), equal_documents(64, 4), 4),
      packed(window_case("docs_781_2048", {1, 2048, 2048, 1, 1, 8, 8}, 33), kTwoLong, 64),
      gpu_sized(packed(window_case("docs_130_131_400_700_G6_64x64", {1, 700, 700, 12, 2, 64, 64}, 100),
                       {0, 130, 131, 400, 700}, 64)),
      gpu_sized(packed(window_case("docs_130_131_400_700_G16_128x128", {1, 700, 700, 16, 1, 128, 128}, 200),
                       {0, 130, 131, 400, 700}, 64)),
      gpu_sized(packed(window_case("docs_130_131_400_700_G1_192x128", {1, 700, 700, 2, 2, 192, 128}, 200),
                       {0, 130, 131, 400, 700}, 64)),
      gpu_sized(packed(window_case("docs_64_of_32_G4_64x64", {1, 2048, 2048, 4, 1, 64, 64}, 512),
                       equal_documents(64, 32), 32)),
      gpu_sized(packed(window_case("docs_781_2048_G2_128x128", {1, 2048, 2048, 2, 1, 128, 128}, 512), kTwoLong, 64)),
  };
  cases[0].gpu_f32 = cases[0].gpu_bf16 = false;  // one key each: dq and dk are 0, so no relative error exists
  return cases;
}

}  // namespace

std::vector<OpCase> attend_window_cases() {
  std::vector<OpCase> cases = {
      window_case("1x1", {1, 1, 1, 1, 1, 4, 4}, 1),
      window_case("2x31_w7", {2, 31, 31, 4, 2, 8, 8}, 7),
      window_case("33_w1000", {1, 33, 33, 6, 1, 10, 6}, 1000),
      window_case("65_w32_strided", {1, 65, 65, 4, 2, 64, 64}, 32, 1.0, 8),
      window_case("127_w64_G16", {1, 127, 127, 16, 1, 32, 32}, 64),
      window_case("97_w40_192x128", {1, 97, 97, 2, 2, 192, 128}, 40),
      window_case("90_w50_60x100", {1, 90, 90, 8, 2, 60, 100}, 50),
      window_case("96_w48_peaked", {1, 96, 96, 4, 1, 64, 64}, 48, 30.0),
      window_case("2x300_w100_G6", {2, 300, 300, 12, 2, 64, 64}, 100),
      window_case("150_w70_128", {1, 150, 150, 6, 2, 128, 128}, 70),
      window_case("129_w129_G32", {1, 129, 129, 32, 1, 64, 64}, 129),
      window_case("300_w130_128x128", {1, 300, 300, 12, 2, 128, 128}, 130, 1.0, 8),
      window_case("2x131_w64_128x128_G16", {2, 131, 131, 16, 1, 128, 128}, 64),
      window_case("270_w200_128x128_G1", {1, 270, 270, 2, 2, 128, 128}, 200),
      peaked_case("300_w130_peaked", {1, 300, 300, 12, 2, 64, 64}, 130),
      peaked_case("300_w130_peaked_128x128", {1, 300, 300, 12, 2, 128, 128}, 130),
      window_case("m7c", {16, 2048, 2048, 12, 2, 64, 64}, 512),
  };
  cases[0].gpu_f32 = cases[0].gpu_bf16 = false;  // one key: dq and dk are 0, so no relative error exists
  // Logits up to +-100: p is nearly one-hot, and gradients are differences between nearly equal numbers.
  cases[7].f32_tolerance = 1e-3;
  cases[7].gpu_bf16 = false;
  cases.back().bench = true;
  for (OpCase& c : packed_cases()) cases.push_back(std::move(c));
  // Head widths 64, 128 and 192 in bf16, which Hopper's kernels would compute without portable_case(): rows without
  // padded columns, at one and at two tiles in shared memory.
  cases.push_back(portable_case(window_case("2x300_w100_G6", {2, 300, 300, 12, 2, 64, 64}, 100)));
  cases.push_back(portable_case(window_case("131_w64_G5_strided", {1, 131, 131, 5, 1, 64, 64}, 64, 1.0, 8)));
  cases.push_back(portable_case(window_case("150_w70_128_G3", {1, 150, 150, 6, 2, 128, 128}, 70)));
  cases.push_back(portable_case(window_case("97_w40_192x128", {1, 97, 97, 2, 2, 192, 128}, 40)));
  cases.push_back(portable_case(peaked_case("300_w130_steep", {1, 300, 300, 12, 2, 64, 64}, 130, 150.0)));
  cases.push_back(portable_case(peaked_case("300_w130_steep_128x128", {1, 300, 300, 12, 2, 128, 128}, 130, 150.0)));
  // In these cases the kernel that adds dk's and dv's partial sums takes one column at a time, because the widths are
  // no multiples of 4. In the second case there are more columns than the kernel has threads.
  cases.push_back(portable_case(window_case("300_w60_10x6", {1, 300, 300, 2, 1, 10, 6}, 60)));
  cases.push_back(portable_case(window_case("300_w60_250x251", {1, 300, 300, 2, 1, 250, 251}, 60)));
  cases.push_back(portable_case(
      packed(window_case("docs_33_64_65_127_G3_64x64", {1, 127, 127, 6, 2, 64, 64}, 40), kMixedPadded, 32)));
  // One head per group.
  cases.push_back(portable_case(window_case("300_w90_G1", {1, 300, 300, 2, 2, 64, 64}, 90)));
  cases.push_back(portable_case(
      packed(window_case("docs_33_64_65_127_G1_64x64", {1, 127, 127, 2, 2, 64, 64}, 40), kMixedPadded, 32)));
  // These cases test the kernels that compute dq, dk and dv together: first Hopper's, then the portable one. In the
  // last one the portable kernel gets a small card's shared memory, with room for one step's query rows only.
  const auto with_unit = [](std::string name, const AttendSizes& n, int64_t w, int64_t row_pad = 0) {
    return with_rounding_unit(window_case(std::move(name), n, w, 1.0, row_pad));
  };
  cases.push_back(with_unit("2x300_w100_G6", {2, 300, 300, 12, 2, 64, 64}, 100));
  cases.push_back(with_unit("150_w70_128_G3", {1, 150, 150, 6, 2, 128, 128}, 70, 8));
  cases.push_back(portable_case(with_unit("2x300_w100_G6", {2, 300, 300, 12, 2, 64, 64}, 100)));
  cases.push_back(portable_case(with_unit("131_w64_G5_strided", {1, 131, 131, 5, 1, 64, 64}, 64, 8)));
  cases.push_back(portable_case(with_unit("150_w70_128_G3", {1, 150, 150, 6, 2, 128, 128}, 70)));
  cases.push_back(portable_case(
      packed(with_unit("docs_33_64_65_127_G3_64x64", {1, 127, 127, 6, 2, 64, 64}, 40), kMixedPadded, 32)));
  cases.push_back(small_card_case(with_unit("300_w90_G1", {1, 300, 300, 2, 2, 64, 64}, 90)));
  cases.push_back(small_card_case(window_case("2x300_w100_G6", {2, 300, 300, 12, 2, 64, 64}, 100)));
  // CompactTile: in f32 the kernels for dk and dv, for dq too, and for all three; in bf16 the last case's kernel for dk
  // and dv.
  cases.push_back(small_card_case(window_case("150_w70_128_G3", {1, 150, 150, 6, 2, 128, 128}, 70)));
  cases.push_back(small_card_case(window_case("97_w40_192x128", {1, 97, 97, 2, 2, 192, 128}, 40, 1.0, 8)));
  cases.push_back(small_card_case(window_case("2x131_w64_256x250_G5", {2, 131, 131, 5, 1, 256, 250}, 64)));
  return cases;
}

}  // namespace triad
