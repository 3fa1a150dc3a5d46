// Dense causal attention cases.
#include "kernels/common/portable_case.h"
#include "kernels/nsa/cases/branch_cases.h"
#include "kernels/nsa/dense_attention.h"

namespace triad {

namespace {

OpCase dense_case(std::string name, const AttendSizes& n, double q_std = 1.0, int64_t row_pad = 0) {
  OpCase c{.op = "dense_attention", .name = std::move(name), .args = attend_args(n, q_std, row_pad)};
  use_rounded_dq(c);
  c.forward = [](Context& ctx, const Args& a) {
    dense_attention_forward(ctx, {a["o"], a["lse"]}, {a["q"], a["k"], a["v"], documents_of(a)});
  };
  c.backward = [](Context& ctx, const Args& a) {
    Scratch::Scope scope(ctx.scratch);
    const Tensor dq = scope.alloc(acc_dtype(a["q"].dtype), a["q"].shape());
    dense_attention_backward(ctx, {dq, a["dk"], a["dv"]}, a["do"], {a["q"], a["k"], a["v"], documents_of(a)},
                             {a["o"], a["lse"]});
    round_dq(ctx, a, dq);
  };
  set_attend_costs(c, n, window_pairs(n.T, n.T));
  return c;
}

std::vector<OpCase> packed_cases() {
  std::vector<OpCase> cases = {
      packed(dense_case("docs_1_2_3_10x6", {1, 3, 3, 2, 2, 10, 6}), kSingleTokens, 8),
      packed(dense_case("docs_33_64_65_127_G4", {1, 127, 127, 8, 2, 8, 8}), kMixed, 8),
      packed(dense_case("docs_33_64_65_127_G2_60x100_strided", {1, 127, 127, 2, 1, 60, 100}, 1.0, 8), kMixed, 16),
      packed(dense_case("docs_33_64_65_127_G1_64x64", {1, 127, 127, 1, 1, 64, 64}), kMixed, 32),
      packed(dense_case("docs_33_64_65_127_G1_192x128", {1, 127, 127, 1, 1, 192, 128}), kMixed, 64),
      packed(dense_case("docs_empty_tail_G6", {1, 127, 127, 6, 1, 10, 6}), kMixedPadded, 8),
      packed(dense_case("docs_two_rows_G16", {2, 127, 127, 16, 1, 8, 8}), kTwoRows, 8),
      packed(dense_case("docs_one", {1, 60, 60, 2, 1, 8, 8}), {0, 60}, 8),
      packed(dense_case("docs_64_of_4", {1, 256, 256, 2, 1, 8, 8}), equal_documents(64, 4), 4),
      gpu_sized(packed(dense_case("docs_781_2048_G1_64x64", {1, 2048, 2048, 1, 1, 64, 64}), kTwoLong, 64)),
      gpu_sized(packed(dense_case("docs_130_131_400_700_G6_64x64", {1, 700, 700, 12, 2, 64, 64}),
                       {0, 130, 131, 400, 700}, 64)),
      gpu_sized(packed(dense_case("docs_130_131_400_700_G16_128x128", {1, 700, 700, 16, 1, 128, 128}),
                       {0, 130, 131, 400, 700}, 64)),
      gpu_sized(packed(dense_case("docs_130_131_400_700_G1_192x128", {1, 700, 700, 2, 2, 192, 128}),
                       {0, 130, 131, 400, 700}, 64)),
      gpu_sized(packed(dense_case("docs_two_rows_G2_128x128", {2, 300, 300, 4, 2, 128, 128}),
                       {0, 70, 300, 301, 429, 600}, 64)),
  };
  cases[0].gpu_f32 = cases[0].gpu_bf16 = false;  // one key each: dq and dk are 0, so no relative error exists
  return cases;
}

}  // namespace

std::vector<OpCase> dense_attention_cases() {
  std::vector<OpCase> cases = {
      dense_case("1x1", {1, 1, 1, 1, 1, 4, 4}),
      dense_case("2x31", {2, 31, 31, 4, 2, 8, 8}),
      dense_case("33_10x6", {1, 33, 33, 6, 1, 10, 6}),
      dense_case("65_strided", {1, 65, 65, 4, 2, 64, 64}, 1.0, 8),
      dense_case("97_192x128", {1, 97, 97, 2, 2, 192, 128}),
      dense_case("90_60x100", {1, 90, 90, 8, 2, 60, 100}),
      dense_case("129_G32", {1, 129, 129, 32, 1, 64, 64}),
      dense_case("2x300_G6", {2, 300, 300, 12, 2, 64, 64}),
      dense_case("270_128x128_G1", {1, 270, 270, 2, 2, 128, 128}),
      dense_case("300_peaked", {1, 300, 300, 12, 2, 64, 64}, 30.0),
      dense_case("m7c", {16, 2048, 2048, 12, 2, 64, 64}),
  };
  cases[0].gpu_f32 = cases[0].gpu_bf16 = false;  // one key: dq and dk are 0, so no relative error exists
  // Forward only, with logits up to +-100. In some rows exponentials relative to the largest of the first scores exceed
  // 2^60.
  cases[cases.size() - 2].backward = nullptr, cases[cases.size() - 2].f32_tolerance = 1e-3;
  cases.back().bench = true;
  for (OpCase& c : packed_cases()) cases.push_back(std::move(c));
  // The portable kernel that computes dq, dk and dv together runs these cases.
  cases.push_back(portable_case(dense_case("2x300_G6", {2, 300, 300, 12, 2, 64, 64})));
  cases.push_back(portable_case(dense_case("1700_G1", {1, 1700, 1700, 1, 1, 64, 64})));
  cases.push_back(portable_case(dense_case("270_128x128_G1_strided", {1, 270, 270, 2, 2, 128, 128}, 1.0, 8)));
  cases.push_back(
      portable_case(packed(dense_case("docs_781_2048_G1_64x64", {1, 2048, 2048, 1, 1, 64, 64}), kTwoLong, 64)));
  cases.push_back(small_card_case(dense_case("270_128x128_G1", {1, 270, 270, 2, 2, 128, 128})));
  return cases;
}

}  // namespace triad
