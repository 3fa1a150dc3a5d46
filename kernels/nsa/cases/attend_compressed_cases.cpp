// Compressed branch cases.
#include "kernels/common/portable_case.h"
#include "kernels/nsa/attend_compressed.h"
#include "kernels/nsa/cases/branch_cases.h"

namespace triad {

namespace {

OpCase compressed_case(std::string name, AttendSizes n, const CompressionBlocks& o, int64_t row_pad = 0) {
  n.S = compressed_length(n.T, o.l, o.d);
  OpCase c{.op = "nsa_attend_compressed", .name = std::move(name), .args = attend_args(n, 1.0, row_pad)};
  c.forward = [o](Context& ctx, const Args& a) {
    nsa_attend_compressed_forward(ctx, {a["o"], a["lse"]}, {a["q"], a["k"], a["v"], documents_of(a)}, o);
  };
  c.backward = [o](Context& ctx, const Args& a) {
    run_branch_backward(ctx, a, o.d, [o, &ctx](const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in) {
      nsa_attend_compressed_backward(ctx, out, grad, in, o);
    });
  };
  set_attend_costs(c, n, compressed_pairs(n.T, o.l, o.d));
  c.differences = n.B * n.T * n.Hq * n.dk < 1'000'000;  // the larger case would take seconds
  return c;
}

std::vector<OpCase> packed_cases() {
  return {
      packed(compressed_case("docs_1_2_3_no_key", {1, 3, 0, 2, 2, 10, 6}, {2, 1}), kSingleTokens, 8),
      packed(compressed_case("docs_33_64_65_127_G4", {1, 127, 0, 8, 2, 8, 8}, {8, 4}), kMixed, 8),
      packed(compressed_case("docs_33_64_65_127_G2_60x100_strided", {1, 127, 0, 2, 1, 60, 100}, {6, 3}, 8), kMixed, 12),
      packed(compressed_case("docs_33_64_65_127_G1_64x64", {1, 127, 0, 1, 1, 64, 64}, {32, 16}), kMixed, 32),
      packed(compressed_case("docs_33_64_65_127_G1_128x128", {1, 127, 0, 1, 1, 128, 128}, {16, 8}), kMixed, 64),
      packed(compressed_case("docs_33_64_65_127_G1_192x128", {1, 127, 0, 1, 1, 192, 128}, {16, 16}), kMixed, 64),
      packed(compressed_case("docs_33_64_65_127_l1", {1, 127, 0, 2, 1, 8, 8}, {1, 1}), kMixed, 8),
      packed(compressed_case("docs_empty_tail_G6", {1, 127, 0, 6, 1, 10, 6}, {8, 4}), kMixedPadded, 8),
      packed(compressed_case("docs_two_rows_G16", {2, 127, 0, 16, 1, 8, 8}, {7, 3}), kTwoRows, 8),
      packed(compressed_case("docs_one", {1, 60, 0, 2, 1, 8, 8}, {8, 4}), {0, 60}, 8),
      packed(compressed_case("docs_64_of_4", {1, 256, 0, 2, 1, 8, 8}, {2, 1}), equal_documents(64, 4), 4),
      packed(compressed_case("docs_781_2048", {1, 2048, 0, 1, 1, 8, 8}, {32, 16}), kTwoLong, 64),
      gpu_sized(packed(compressed_case("docs_130_131_400_700_G6_64x64", {1, 700, 0, 12, 2, 64, 64}, {8, 4}),
                       {0, 130, 131, 400, 700}, 64)),
      gpu_sized(packed(compressed_case("docs_130_131_400_700_G16_128x128", {1, 700, 0, 16, 1, 128, 128}, {4, 2}),
                       {0, 130, 131, 400, 700}, 64)),
      gpu_sized(packed(compressed_case("docs_130_131_400_700_G1_192x128", {1, 700, 0, 2, 2, 192, 128}, {8, 4}),
                       {0, 130, 131, 400, 700}, 64)),
      gpu_sized(packed(compressed_case("docs_64_of_32_G4_64x64", {1, 2048, 0, 4, 1, 64, 64}, {16, 8}),
                       equal_documents(64, 32), 32)),
      gpu_sized(
          packed(compressed_case("docs_781_2048_G2_128x128", {1, 2048, 0, 2, 1, 128, 128}, {32, 16}), kTwoLong, 64)),
      // sm90/backward_d64.cu cuts the row into 32 pieces for each block. In most pieces no token sees it.
      gpu_sized(packed(
          compressed_case("docs_47_of_500_one_of_9268_64x64", {1, 32768, 0, 8, 8, 64, 64}, {32, 16}),
          [] {
            std::vector<int32_t> bounds = equal_documents(47, 500);
            bounds.push_back(32768);
            return bounds;
          }(),
          64)),
  };
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
  for (OpCase& c : packed_cases()) cases.push_back(std::move(c));
  // Without portable_case(), Hopper's kernels would compute these in bf16.
  cases.push_back(portable_case(compressed_case("2x300_l8_d4_G6", {2, 300, 0, 12, 2, 64, 64}, {8, 4})));
  cases.push_back(portable_case(compressed_case("127_l4_d2_strided", {1, 127, 0, 4, 2, 64, 64}, {4, 2}, 8)));
  cases.push_back(portable_case(compressed_case("1100_l8_d4_G1", {1, 1100, 0, 2, 2, 64, 64}, {8, 4})));
  cases.push_back(portable_case(
      packed(compressed_case("docs_33_64_65_127_G3_64x64", {1, 127, 0, 6, 2, 64, 64}, {8, 4}), kMixedPadded, 32)));
  // These cases test the kernels that compute dq, dk and dv together: first Hopper's, then the portable one. The last
  // case has 1,049 keys, enough for the portable kernel to use WideTile on cards that have the shared memory.
  const auto with_unit = [](std::string name, const AttendSizes& n, const CompressionBlocks& o, int64_t row_pad = 0) {
    return with_rounding_unit(compressed_case(std::move(name), n, o, row_pad));
  };
  cases.push_back(with_unit("2x300_l8_d4_G6", {2, 300, 0, 12, 2, 64, 64}, {8, 4}));
  cases.push_back(with_unit("300_l8_d4_128x128", {1, 300, 0, 12, 2, 128, 128}, {8, 4}, 8));
  cases.push_back(portable_case(with_unit("2x300_l8_d4_G6", {2, 300, 0, 12, 2, 64, 64}, {8, 4})));
  cases.push_back(portable_case(with_unit("127_l4_d2_strided", {1, 127, 0, 4, 2, 64, 64}, {4, 2}, 8)));
  cases.push_back(portable_case(with_unit("300_l8_d4_128x128", {1, 300, 0, 12, 2, 128, 128}, {8, 4})));
  cases.push_back(portable_case(
      packed(with_unit("docs_33_64_65_127_G3_64x64", {1, 127, 0, 6, 2, 64, 64}, {8, 4}), kMixedPadded, 32)));
  cases.push_back(portable_case(with_unit("2100_l4_d2_G2", {1, 2100, 0, 2, 1, 64, 64}, {4, 2})));
  return cases;
}

}  // namespace triad
