// Gate and list statistics cases: two micro-steps add to the same pieces, which are then merged.
#include "kernels/nsa/cases/document_cases.h"
#include "kernels/nsa/stats.h"

namespace triad {

namespace {

OpCase stats_case(std::string name, int64_t B, int64_t T, int64_t Hkv, const SelectOptions& o) {
  OpCase c{.op = "nsa_stats", .name = std::move(name)};
  // Random sigmoid gates; the first row's gates are all 0, and one of the second row's is 1.
  const int64_t rows = B * T * Hkv;
  const auto gate = [rows](int64_t i, uint64_t seed) {
    if (i % rows < 2) return i == 1 ? 1.0 : 0.0;
    return Philox(seed, 5).uniform(static_cast<uint64_t>(i));
  };
  c.args = {{.name = "gate", .role = ArgRole::constant, .shape = {3, B, T, Hkv}, .type = ArgType::acc, .fill = gate},
            {.name = "block_index",
             .role = ArgRole::constant,
             .shape = {B, T, Hkv, o.n_sel},
             .type = ArgType::i32,
             .fill_all = [=](uint64_t s) { return random_block_lists(s, B, T, Hkv, o.n_sel, o.l_sel, true); }},
            {.name = "pieces", .role = ArgRole::saved, .shape = {kStatsPieces, NsaStats::count}, .type = ArgType::f64},
            {.name = "out", .role = ArgRole::saved, .shape = {1, NsaStats::count}, .type = ArgType::f64}};
  c.forward = [o](Context& ctx, const Args& a) {
    const Tensor pieces = a["pieces"];
    zero(ctx, pieces);
    for (int i = 0; i < 2; ++i) nsa_stats(ctx, pieces, a["gate"], a["block_index"], o, documents_of(a));
    nsa_stats_merge(ctx, a["out"], pieces.view({1, kStatsPieces, NsaStats::count}));
  };
  c.forward_bytes = 2 * static_cast<double>(rows) * (12 + 4 * static_cast<double>(o.n_sel)), c.forward_written = 0;
  return c;
}

}  // namespace

std::vector<OpCase> stats_cases() {
  std::vector<OpCase> cases = {stats_case("1_row", 1, 1, 1, {8, 4, 8, 4}),
                               stats_case("2x127_l'8_n4", 2, 127, 2, {8, 4, 8, 4}),
                               stats_case("1x701_G3_l'32_n7", 1, 701, 3, {16, 8, 32, 7, 2, 3}),
                               stats_case("1x1500_l'16_n64", 1, 1500, 1, {16, 8, 16, 64, 0, 1}),
                               stats_case("m7c", 16, 2048, 2, {32, 16, 64, 16})};
  cases.back().bench = true;
  const auto add = [&](const char* name, int64_t B, int64_t T, int64_t Hkv, const SelectOptions& o,
                       const std::vector<int32_t>& bounds) {
    cases.push_back(packed(stats_case(name, B, T, Hkv, o), bounds, o.l_sel, true));
  };
  add("docs_1_2_3", 1, 3, 1, {8, 4, 8, 4}, kSingleTokens);
  add("docs_33_64_65_127", 1, 127, 2, {8, 4, 8, 4}, kMixed);
  add("docs_empty_tail", 1, 127, 2, {8, 4, 8, 4}, kMixedPadded);
  add("docs_two_rows", 2, 127, 3, {8, 4, 8, 5, 2, 3}, kTwoRows);
  add("docs_one", 1, 127, 1, {8, 4, 8, 4}, {0, 127});
  add("docs_64_of_8", 1, 512, 2, {8, 4, 8, 4}, equal_documents(64, 8));
  add("docs_781_2048", 1, 2048, 2, {32, 16, 64, 16}, kTwoLong);
  return cases;
}

}  // namespace triad
