// Selected branch cases, on random lists of the form that nsa_select writes.
#include <algorithm>
#include <span>

#include "kernels/common/portable_case.h"
#include "kernels/nsa/attend_selected.h"
#include "kernels/nsa/cases/branch_cases.h"
#include "kernels/nsa/gate.h"

namespace triad {

namespace {

using Lists = std::function<std::vector<double>(uint64_t seed)>;

OpCase selected_case(std::string name, const AttendSizes& n, int64_t n_sel, int64_t l_sel, const Lists& lists = nullptr,
                     int64_t row_pad = 0) {
  OpCase c{.op = "nsa_attend_selected", .name = std::move(name), .args = attend_args(n, 1.0, row_pad)};
  Arg index{.name = "block_index", .role = ArgRole::constant, .shape = {n.B, n.T, n.Hkv, n_sel}, .type = ArgType::i32};
  index.fill_all =
      lists ? lists : [=](uint64_t seed) { return random_block_lists(seed, n.B, n.T, n.Hkv, n_sel, l_sel); };
  c.args.push_back(std::move(index));
  c.forward = [l_sel](Context& ctx, const Args& a) {
    nsa_attend_selected_forward(ctx, {a["o"], a["lse"]}, {a["q"], a["k"], a["v"], documents_of(a)}, a["block_index"],
                                l_sel);
  };
  c.backward = [l_sel](Context& ctx, const Args& a) {
    run_branch_backward(ctx, a, 1, [&](const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in) {
      nsa_attend_selected_backward(ctx, out, grad, in, a["block_index"], l_sel);
    });
  };
  set_attend_costs(c, n, selected_pairs(n.T, n_sel, l_sel));
  c.differences = n.T * n.Hq < 2048;  // larger cases, which test GPU routes, would take minutes
  c.cpu = n.B * n.T * n.Hq * (n.dk + n.dv) < 1500000;
  return c;
}

// Every row lists only block 0: all rows add to its keys' gradients, other keys get none, and later rows do not see
// themselves.
std::vector<double> hot_lists(int64_t rows, int64_t n_sel) {
  std::vector<double> lists(static_cast<size_t>(rows * n_sel), -1);
  for (int64_t i = 0; i < rows; ++i) lists[static_cast<size_t>(i * n_sel)] = 0;
  return lists;
}

// Consecutive tokens list different blocks: token t lists the next min(n, blocks) blocks after those of token t - 1,
// cyclically. ahead: lists may contain blocks that begin after t.
std::vector<double> differing_lists(int64_t tokens, int64_t n_sel, int64_t l_sel, bool ahead = false) {
  std::vector<double> lists(static_cast<size_t>(tokens * n_sel), -1);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t blocks = (ahead ? tokens - 1 : t) / l_sel + 1, count = std::min(blocks, n_sel);
    double* const list = lists.data() + t * n_sel;
    for (int64_t i = 0; i < count; ++i) list[i] = static_cast<double>((t * n_sel + i) % blocks);
    std::sort(list, list + count);
  }
  return lists;
}

// Returns the case for the kernel with resident rows, which KernelChoice::candidate chooses for all shapes that it
// supports. The case runs only on the GPU, because on the CPU it would repeat another case.
OpCase on_candidate_kernel(OpCase c) {
  c.name += "_candidate";
  c.kernels.sel = KernelChoice::candidate;
  c.gpu_f32 = c.cpu = c.differences = false;
  return c;
}

// Forward with the branches' gated sum in the kernel's epilogue; kernels that lack it leave it to a separate kernel.
OpCase combined_case(std::string name, const AttendSizes& n, int64_t n_sel, int64_t l_sel) {
  OpCase c = selected_case(std::move(name), n, n_sel, l_sel);
  const Shape rows = {n.B, n.T, n.Hq, n.dv};
  for (const char* branch : {"o_cmp", "o_win"})
    c.args.push_back({.name = branch, .role = ArgRole::constant, .shape = rows});
  c.args.push_back(
      {.name = "gate", .role = ArgRole::constant, .shape = {3, n.B, n.T, n.Hkv}, .type = ArgType::acc, .mean = 1});
  c.args.push_back({.name = "out", .role = ArgRole::output, .shape = rows});
  c.forward = [l_sel](Context& ctx, const Args& a) {
    const AttendIn in{a["q"], a["k"], a["v"]};
    const AttendOut to{a["o"], a["lse"]};
    const CombineAlong along{a["out"], a["o_cmp"], a["o_win"], a["gate"]};
    const bool combines = nsa_attend_selected_combines(ctx, to, in, a["block_index"], l_sel, along);
    nsa_attend_selected_forward(ctx, to, in, a["block_index"], l_sel, combines ? &along : nullptr);
    if (!combines) nsa_combine_forward(ctx, a["out"], {a["o_cmp"], a["o"], a["o_win"]}, a["gate"]);
  };
  c.backward = nullptr;
  return c;
}

// Returns the case with larger queries. In some rows, exponentials relative to the first listed block's largest score
// then exceed 2^60, and the kernels compute these rows, or one step, again.
OpCase peaked(OpCase c) {
  std::ranges::find(c.args, "q", &Arg::name)->std = 40.0;
  return c;
}

// Cases for the forward with resident rows (nsa/sm90/resident_rows.cu), whose tiles have up to 384 tokens.
std::vector<OpCase> resident_rows_cases() {
  std::vector<OpCase> cases = {
      selected_case("2x130_l64_n3_G4", {2, 130, 130, 8, 2, 64, 64}, 3, 64, nullptr, 8),
      selected_case("5_l64_n2_G4", {1, 5, 5, 4, 1, 64, 64}, 2, 64),
      selected_case("1100_l64_n4_G1", {1, 1100, 1100, 2, 2, 64, 64}, 4, 64),
      selected_case("1000_l64_n4_G2", {1, 1000, 1000, 4, 2, 64, 64}, 4, 64, nullptr, 8),
      selected_case("1000_l64_n4_G5", {1, 1000, 1000, 5, 1, 64, 64}, 4, 64),
      selected_case("900_l64_n5_G7", {1, 900, 900, 7, 1, 64, 64}, 5, 64),
      selected_case("1537_l64_n6_G8", {1, 1537, 1537, 8, 1, 64, 64}, 6, 64),
      selected_case("2700_l64_n40_G4", {1, 2700, 2700, 4, 1, 64, 64}, 40, 64),
      selected_case("17000_l64_n16_G4", {1, 17000, 17000, 4, 1, 64, 64}, 16, 64),
      selected_case("4200_l64_n64_G8", {1, 4200, 4200, 8, 1, 64, 64}, 64, 64),
      // Too many blocks for the masks of 384-token and 192-token tiles.
      selected_case("9400_l64_n4_G1", {1, 9400, 9400, 1, 1, 64, 64}, 4, 64),
      selected_case("21800_l64_n4_G2", {1, 21800, 21800, 2, 1, 64, 64}, 4, 64),
      selected_case("27650_l64_n4_G1_128x128", {1, 27650, 27650, 1, 1, 128, 128}, 4, 64),
      selected_case("2x1900_l64_n8_G4", {2, 1900, 1900, 8, 2, 64, 64}, 8, 64),
      selected_case("700_l64_n4_G3_tails", {1, 700, 700, 3, 1, 64, 64}, 4, 64,
                    [](uint64_t seed) { return random_block_lists(seed, 1, 700, 1, 4, 64, true); }),
      selected_case("700_l64_n4_G4_ahead", {1, 700, 700, 4, 1, 64, 64}, 4, 64,
                    [](uint64_t) { return differing_lists(700, 4, 64, true); }),
      // All tokens list the first block alone: a six-item step, and rows that don't see their own key.
      selected_case("700_l64_n4_G4_hot", {1, 700, 700, 8, 2, 64, 64}, 4, 64,
                    [](uint64_t) { return hot_lists(700 * 2, 4); }),
      peaked(selected_case("600_l64_n5_G4_peaked", {1, 600, 600, 4, 1, 64, 64}, 5, 64)),
      combined_case("1200_l64_n5_G4_combine", {1, 1200, 1200, 8, 2, 64, 64}, 5, 64),
      selected_case("8k_G4", {1, 8192, 8192, 32, 8, 64, 64}, 16, 64),
      selected_case("2x130_l64_n3_G4_128x128", {2, 130, 130, 8, 2, 128, 128}, 3, 64, nullptr, 8),
      selected_case("5_l64_n2_G4_128x128", {1, 5, 5, 4, 1, 128, 128}, 2, 64),
      selected_case("1100_l64_n4_G1_128x128", {1, 1100, 1100, 2, 2, 128, 128}, 4, 64),
      selected_case("1000_l64_n4_G2_128x128", {1, 1000, 1000, 4, 2, 128, 128}, 4, 64, nullptr, 8),
      selected_case("1000_l64_n4_G5_128x128", {1, 1000, 1000, 5, 1, 128, 128}, 4, 64),
      selected_case("900_l64_n5_G7_128x128", {1, 900, 900, 7, 1, 128, 128}, 5, 64),
      selected_case("1537_l64_n6_G8_128x128", {1, 1537, 1537, 8, 1, 128, 128}, 6, 64),
      selected_case("4200_l64_n64_G4_128x128", {1, 4200, 4200, 4, 1, 128, 128}, 64, 64),
      selected_case("17000_l64_n16_G4_128x128", {1, 17000, 17000, 4, 1, 128, 128}, 16, 64),
      selected_case("700_l64_n4_G3_tails_128x128", {1, 700, 700, 3, 1, 128, 128}, 4, 64,
                    [](uint64_t seed) { return random_block_lists(seed, 1, 700, 1, 4, 64, true); }),
      selected_case("700_l64_n4_G4_hot_128x128", {1, 700, 700, 8, 2, 128, 128}, 4, 64,
                    [](uint64_t) { return hot_lists(700 * 2, 4); }),
      peaked(selected_case("600_l64_n5_G4_peaked_128x128", {1, 600, 600, 4, 1, 128, 128}, 5, 64)),
      combined_case("1200_l64_n5_G4_combine_128x128", {1, 1200, 1200, 8, 2, 128, 128}, 5, 64),
  };
  for (OpCase& c : cases) {
    c.bench = c.name.starts_with("8k");
    c = on_candidate_kernel(std::move(c));
  }
  return cases;
}

// Every row in a packed case lists only its document's first block.
OpCase with_first_blocks(OpCase c, const std::vector<int32_t>& bounds, int64_t l_sel) {
  const auto lists = std::ranges::find(c.args, "block_index", &Arg::name);
  lists->fill_all = [=, shape = lists->shape](uint64_t) {
    const CaseDocuments documents(bounds, shape[0], shape[1], l_sel);
    std::vector<double> values;
    for (const int32_t first : documents.first_block)
      for (int64_t i = 0; i < shape[2] * shape[3]; ++i) values.push_back(i % shape[3] == 0 ? first : -1);
    return values;
  };
  return c;
}

std::vector<OpCase> packed_cases() {
  std::vector<OpCase> cases = {
      packed(selected_case("docs_1_2_3_10x6", {1, 3, 3, 2, 2, 10, 6}, 3, 8), kSingleTokens, 8),
      packed(selected_case("docs_33_64_65_127_G4", {1, 127, 127, 8, 2, 8, 8}, 4, 8), kMixed, 8),
      packed(selected_case("docs_33_64_65_127_G4_tails", {1, 127, 127, 4, 1, 8, 8}, 9, 8), kMixed, 8, true),
      packed(selected_case("docs_33_64_65_127_G2_60x100_strided", {1, 127, 127, 2, 1, 60, 100}, 3, 12, nullptr, 8),
             kMixed, 12),
      packed(selected_case("docs_33_64_65_127_G1_64x64", {1, 127, 127, 1, 1, 64, 64}, 3, 32), kMixed, 32),
      packed(selected_case("docs_33_64_65_127_G1_128x128", {1, 127, 127, 1, 1, 128, 128}, 3, 16), kMixed, 16),
      packed(selected_case("docs_33_64_65_127_G1_192x128", {1, 127, 127, 1, 1, 192, 128}, 2, 64), kMixed, 64),
      packed(selected_case("docs_33_64_65_127_l1", {1, 127, 127, 2, 1, 8, 8}, 8, 1), kMixed, 1),
      packed(selected_case("docs_empty_tail_G6", {1, 127, 127, 6, 1, 10, 6}, 4, 8), kMixedPadded, 8),
      packed(selected_case("docs_two_rows_G16", {2, 127, 127, 16, 1, 8, 8}, 3, 8), kTwoRows, 8),
      packed(selected_case("docs_one", {1, 60, 60, 2, 1, 8, 8}, 4, 8), {0, 60}, 8),
      packed(selected_case("docs_64_of_4", {1, 256, 256, 2, 1, 8, 8}, 3, 4), equal_documents(64, 4), 4),
      // Id 256, where the second 256 ids begin, has no block (nsa/gpu/inverse_index.cu has 256 ids per CTA).
      packed(selected_case("docs_256_300_l1", {1, 300, 300, 2, 1, 8, 8}, 4, 1), {0, 256, 300}, 1),
      packed(selected_case("docs_781_2048", {1, 2048, 2048, 1, 1, 8, 8}, 4, 32), kTwoLong, 32),
      // On Hopper: the shared KV tile, the query-stationary and the KV-stationary kernel, at each width pair.
      gpu_sized(packed(selected_case("docs_130_131_400_700_G6_64x64", {1, 700, 700, 12, 2, 64, 64}, 4, 64),
                       {0, 130, 131, 400, 700}, 64)),
      gpu_sized(packed(selected_case("docs_130_131_400_700_G6_tails_64x64", {1, 700, 700, 6, 1, 64, 64}, 6, 32),
                       {0, 130, 131, 400, 700}, 32, true)),
      // Blocks of more than 64 keys, whose backward keeps 128 keys in a CTA.
      gpu_sized(selected_case("1100_l128_n4_G16_128x128", {1, 1100, 1100, 32, 2, 128, 128}, 4, 128)),
      gpu_sized(selected_case("900_l96_n3_G6_128x128", {1, 900, 900, 6, 1, 128, 128}, 3, 96, nullptr, 8)),
      gpu_sized(packed(selected_case("docs_781_2048_l128_G4_128x128", {1, 2048, 2048, 4, 1, 128, 128}, 4, 128),
                       kTwoLong, 128)),
      gpu_sized(packed(selected_case("docs_130_131_400_700_G16_128x128", {1, 700, 700, 16, 1, 128, 128}, 4, 32),
                       {0, 130, 131, 400, 700}, 32)),
      gpu_sized(packed(selected_case("docs_130_131_400_700_G4_128x128", {1, 700, 700, 4, 1, 128, 128}, 3, 64),
                       {0, 130, 131, 400, 700}, 64)),
      gpu_sized(packed(selected_case("docs_130_131_400_700_G1_192x128", {1, 700, 700, 2, 2, 192, 128}, 2, 128),
                       {0, 130, 131, 400, 700}, 128)),
      gpu_sized(packed(selected_case("docs_130_131_400_700_G16_192x128", {1, 700, 700, 16, 1, 192, 128}, 3, 32),
                       {0, 130, 131, 400, 700}, 32)),
      gpu_sized(packed(selected_case("docs_64_of_32_G16_64x64", {1, 2048, 2048, 16, 1, 64, 64}, 4, 32),
                       equal_documents(64, 32), 32)),
      gpu_sized(
          packed(selected_case("docs_781_2048_G2_128x128", {1, 2048, 2048, 2, 1, 128, 128}, 8, 64), kTwoLong, 64)),
      gpu_sized(packed(selected_case("docs_1100_1101_2900_far_G6", {1, 2900, 2900, 6, 1, 64, 64}, 8, 32),
                       {0, 1100, 1101, 2900}, 32)),
      gpu_sized(packed(selected_case("docs_two_rows_far_G2_128x128", {2, 1700, 1700, 2, 1, 128, 128}, 4, 32),
                       {0, 900, 1700, 1750, 3400}, 32)),
      gpu_sized(packed(selected_case("docs_1500_2600_far_192x128", {1, 2600, 2600, 1, 1, 192, 128}, 4, 32),
                       {0, 1500, 2600}, 32)),
      // Long and short documents: the KV-stationary kernels compute the long ones.
      gpu_sized(packed(selected_case("docs_3000_3001_3050_6100_far_G6", {1, 6100, 6100, 12, 2, 64, 64}, 8, 32),
                       {0, 3000, 3001, 3050, 6100}, 32)),
      gpu_sized(packed(selected_case("docs_2500_2530_5000_far_G3_tails", {1, 5000, 5000, 3, 1, 64, 64}, 6, 32),
                       {0, 2500, 2530, 5000}, 32, true)),
      gpu_sized(packed(selected_case("docs_2100_2101_4300_far_G12_128x128", {1, 4300, 4300, 12, 1, 128, 128}, 8, 32),
                       {0, 2100, 2101, 4300}, 32)),
      // Documents with few tokens share a work piece in backward.
      gpu_sized(packed(selected_case("docs_short_G6_64x64", {1, 300, 300, 12, 2, 64, 64}, 3, 64),
                       {0, 1, 2, 5, 40, 64, 65, 70, 129, 130, 131, 200, 255, 256, 300}, 64)),
      gpu_sized(packed(selected_case("docs_short_G3_l128_64x64", {2, 300, 300, 3, 1, 64, 64}, 2, 128),
                       {0, 20, 127, 129, 130, 300, 301, 302, 600}, 128)),
      // Documents with one list for all tokens. The first is too long for the shared KV tile's masks.
      gpu_sized(with_first_blocks(packed(selected_case("docs_28500_alike_G1", {1, 29500, 29500, 1, 1, 64, 64}, 2, 32),
                                         {0, 28500, 28501, 28502, 29500}, 32),
                                  {0, 28500, 28501, 28502, 29500}, 32)),
  };
  cases[0].gpu_f32 = cases[0].gpu_bf16 = false;  // one key each: dq and dk are 0, so no relative error exists
  return cases;
}

// Returns cases for the kernels that compute dq, dk and dv together: first for Hopper's, then for the portable one. In
// the last case the portable kernel gets a small card's shared memory, with room for one step's query rows only.
std::vector<OpCase> cases_with_unit() {
  const auto with_unit = [](std::string name, const AttendSizes& n, int64_t n_sel, int64_t l_sel,
                            const Lists& lists = nullptr, int64_t row_pad = 0) {
    return with_rounding_unit(selected_case(std::move(name), n, n_sel, l_sel, lists, row_pad));
  };
  const auto tails = [](uint64_t seed) { return random_block_lists(seed, 2, 300, 2, 3, 64, true); };
  const auto hot = [](uint64_t) { return hot_lists(2600, 4); };
  const auto docs = [&] {
    return packed(with_unit("docs_33_64_65_127_G3_64x64", {1, 127, 127, 6, 2, 64, 64}, 3, 32), kMixedPadded, 32);
  };
  return {
      with_unit("2x300_l64_n3_tails", {2, 300, 300, 12, 2, 64, 64}, 3, 64, tails, 8),
      with_unit("260_l128_n2_128", {1, 260, 260, 6, 1, 128, 128}, 2, 128),
      // Blocks of more than 64 keys, whose backward keeps 128 keys in a CTA; the longest have several CTAs.
      with_unit("1100_l128_n4_G6", {1, 1100, 1100, 12, 2, 64, 64}, 4, 128),
      with_unit("900_l96_n3_G5", {1, 900, 900, 5, 1, 64, 64}, 3, 96, nullptr, 8),
      with_unit("700_l300_n2_G3", {1, 700, 700, 3, 1, 64, 64}, 2, 300),
      with_unit("700_l300_n2_G3_128", {1, 700, 700, 3, 1, 128, 128}, 2, 300),
      packed(with_unit("docs_781_2048_l128_G6", {1, 2048, 2048, 6, 1, 64, 64}, 4, 128), kTwoLong, 128),
      packed(with_unit("docs_short_l128_G3", {1, 300, 300, 3, 1, 64, 64}, 2, 128),
             {0, 1, 2, 5, 40, 64, 65, 70, 129, 130, 131, 200, 255, 256, 300}, 128),
      docs(),
      portable_case(with_unit("2x300_l64_n3_tails", {2, 300, 300, 12, 2, 64, 64}, 3, 64, tails, 8)),
      portable_case(with_unit("260_l128_n2_G5", {1, 260, 260, 5, 1, 64, 64}, 2, 128)),
      portable_case(with_unit("260_l128_n2_128", {1, 260, 260, 6, 1, 128, 128}, 2, 128)),
      portable_case(with_unit("400_l64_n3_G1", {1, 400, 400, 2, 2, 64, 64}, 3, 64)),
      portable_case(with_unit("100_l8_n9_G4", {1, 100, 100, 4, 1, 64, 64}, 9, 8)),
      portable_case(with_unit("2600_l64_n4_hot_G6", {1, 2600, 2600, 6, 1, 64, 64}, 4, 64, hot)),
      portable_case(docs()),
      small_card_case(with_unit("2x300_l64_n3_tails", {2, 300, 300, 12, 2, 64, 64}, 3, 64, tails, 8)),
  };
}

}  // namespace

std::vector<OpCase> attend_selected_cases() {
  std::vector<OpCase> cases = {
      selected_case("1x1", {1, 1, 1, 1, 1, 4, 4}, 3, 64),
      selected_case("2x33_l4_n4", {2, 33, 33, 4, 2, 8, 8}, 4, 4),
      selected_case("31_l1_n8", {1, 31, 31, 2, 1, 10, 6}, 8, 1),
      selected_case("63_l16_n50", {1, 63, 63, 6, 1, 32, 32}, 50, 16),
      selected_case("127_l16_n4_strided", {1, 127, 127, 4, 2, 64, 64}, 4, 16, nullptr, 8),
      selected_case("127_l32_n3_G16", {1, 127, 127, 16, 1, 64, 64}, 3, 32),
      selected_case("111_l24_n3_192x128", {1, 111, 111, 2, 2, 192, 128}, 3, 24),
      selected_case("90_l8_n6_60x100", {1, 90, 90, 8, 1, 60, 100}, 6, 8),
      selected_case("65_l8_hot", {1, 65, 65, 4, 2, 16, 16}, 4, 8, [](uint64_t) { return hot_lists(65 * 2, 4); }),
      selected_case("100_l8_tails", {1, 100, 100, 4, 2, 16, 16}, 9, 8,
                    [](uint64_t seed) { return random_block_lists(seed, 1, 100, 2, 9, 8, true); }),
      // Many blocks per list entry: on Hopper nsa/sm90/kv_stationary.cu computes the far blocks.
      selected_case("2x1300_l32_n4_far", {2, 1300, 1300, 4, 2, 64, 64}, 4, 32),
      selected_case("2900_l32_n8_far_G6", {1, 2900, 2900, 6, 1, 64, 64}, 8, 32),
      selected_case("1300_l32_n4_far_tails", {1, 1300, 1300, 3, 1, 64, 64}, 4, 32,
                    [](uint64_t seed) { return random_block_lists(seed, 1, 1300, 1, 4, 32, true); }),
      selected_case("1300_l32_n4_far_ahead", {1, 1300, 1300, 3, 1, 64, 64}, 4, 32,
                    [](uint64_t) { return differing_lists(1300, 4, 32, true); }),
      selected_case("1700_l32_n4_far_128x128", {1, 1700, 1700, 4, 2, 128, 128}, 4, 32),
      selected_case("2600_l64_n4_far_192x128", {1, 2600, 2600, 1, 1, 192, 128}, 4, 64, nullptr, 8),
      selected_case("4100_l128_n4_far", {1, 4100, 4100, 1, 1, 64, 64}, 4, 128),
      gpu_sized(selected_case("8300_l64_n4_far", {1, 8300, 8300, 4, 1, 64, 64}, 4, 64)),
      gpu_sized(selected_case("4500_l64_n4_far_128x128", {1, 4500, 4500, 4, 1, 128, 128}, 4, 64)),
      // A sequence has 8 times as many blocks as a list has entries: Hopper chooses nsa/sm90/resident_rows.cu.
      gpu_sized(selected_case("9000_l64_n16_far_G6", {1, 9000, 9000, 6, 1, 64, 64}, 16, 64)),
      gpu_sized(selected_case("2x3300_l64_n6_far_G4", {2, 3300, 3300, 4, 1, 64, 64}, 6, 64)),
      gpu_sized(selected_case("3300_l64_n6_alike_G4", {1, 3300, 3300, 4, 1, 64, 64}, 6, 64,
                              [](uint64_t) { return hot_lists(3300, 6); })),
      // More than 1,024 blocks, the limit for the shared KV tile's row masks: the query-stationary kernel runs. Longer
      // lists, which take the CPU minutes, are in tests/kernels/test_large.cpp.
      gpu_sized(selected_case("32801_l32_n2_G1", {1, 32801, 32801, 1, 1, 64, 64}, 2, 32)),
      selected_case("300_l64_n3_128x128", {1, 300, 300, 12, 2, 128, 128}, 3, 64, nullptr, 8),
      selected_case("2x260_l32_n4_128x128_G16", {2, 260, 260, 16, 1, 128, 128}, 4, 32),
      // Groups with 16 heads, and with 12 heads and more blocks than list entries: nsa/sm90/query_stationary.cu.
      selected_case("40_l64_n4_128x128_G16", {1, 40, 40, 16, 1, 128, 128}, 4, 64),
      selected_case("2x770_l32_n4_128x128_G8", {2, 770, 770, 8, 1, 128, 128}, 4, 32, nullptr, 8),
      selected_case("580_l32_n3_128x128_G8", {1, 580, 580, 8, 1, 128, 128}, 3, 32),
      selected_case("770_l32_n4_128x128_G12", {1, 770, 770, 12, 1, 128, 128}, 4, 32),
      selected_case(
          "193_l32_n5_tails_128x128_G16", {1, 193, 193, 16, 1, 128, 128}, 5, 32,
          [](uint64_t seed) { return random_block_lists(seed, 1, 193, 1, 5, 32, true); }, 8),
      selected_case("150_l128_n2_128x128_G16", {1, 150, 150, 16, 1, 128, 128}, 2, 128),
      selected_case("70_l64_n2_128x128_G32", {1, 70, 70, 32, 1, 128, 128}, 2, 64),
      selected_case("100_l64_hot_128x128_G16", {1, 100, 100, 32, 2, 128, 128}, 4, 64,
                    [](uint64_t) { return hot_lists(100 * 2, 4); }),
      // Twelve consecutive tokens list up to 102 different blocks: more than the query-stationary kernel sorts.
      selected_case("3250_l32_n9_differ_128x128_G16", {1, 3250, 3250, 16, 1, 128, 128}, 9, 32,
                    [](uint64_t) { return differing_lists(3250, 9, 32); }),
      selected_case("100_l32_n3_192x128_G16", {1, 100, 100, 16, 1, 192, 128}, 3, 32),
      selected_case("2x70_l32_n3_64x64_G16", {2, 70, 70, 16, 1, 64, 64}, 3, 32),
      selected_case("270_l128_n2_128x128_G1", {1, 270, 270, 2, 2, 128, 128}, 2, 128),
      selected_case("700_l64_hot_128x128", {1, 700, 700, 4, 2, 128, 128}, 4, 64,
                    [](uint64_t) { return hot_lists(700 * 2, 4); }),
      selected_case("100_l8_tails_128x128", {1, 100, 100, 4, 2, 128, 128}, 9, 8,
                    [](uint64_t seed) { return random_block_lists(seed, 1, 100, 2, 9, 8, true); }),
      selected_case("2x300_l64_n3_tails", {2, 300, 300, 12, 2, 64, 64}, 3, 64,
                    [](uint64_t seed) { return random_block_lists(seed, 2, 300, 2, 3, 64, true); }),
      selected_case("400_l64_n3_G1", {1, 400, 400, 2, 2, 64, 64}, 3, 64),
      selected_case("260_l128_n2_128", {1, 260, 260, 6, 1, 128, 128}, 2, 128),
      selected_case("m7c", {16, 2048, 2048, 12, 2, 64, 64}, 16, 64),
      selected_case("8k_G4_64x64", {1, 8192, 8192, 32, 8, 64, 64}, 16, 64),
      selected_case("8k_G4_128x128", {1, 8192, 8192, 32, 8, 128, 128}, 16, 64),
  };
  for (OpCase& c : std::span(cases).last(3)) c.bench = true;
  cases[0].gpu_f32 = cases[0].gpu_bf16 = false;  // one key: dq and dk are 0, so no relative error exists
  for (OpCase& c : packed_cases()) cases.push_back(std::move(c));
  // Without portable_case(), Hopper's kernels would compute these in bf16.
  cases.push_back(portable_case(selected_case(
      "2x300_l64_n3_tails", {2, 300, 300, 12, 2, 64, 64}, 3, 64,
      [](uint64_t seed) { return random_block_lists(seed, 2, 300, 2, 3, 64, true); }, 8)));
  cases.push_back(portable_case(selected_case("260_l128_n2_G5", {1, 260, 260, 5, 1, 64, 64}, 2, 128)));
  OpCase forward_alone = peaked(selected_case("600_l64_n5_G4_peaked", {1, 600, 600, 4, 1, 64, 64}, 5, 64));
  forward_alone.backward = nullptr, forward_alone.f32_tolerance = 1e-3;  // p is nearly one-hot
  cases.push_back(portable_case(std::move(forward_alone)));
  cases.push_back(portable_case(selected_case("400_l64_n3_G1", {1, 400, 400, 2, 2, 64, 64}, 3, 64)));
  // All tokens list the first block alone: backward cuts its tokens into several pieces, and other blocks have none.
  cases.push_back(portable_case(selected_case("2600_l64_n4_hot_G6", {1, 2600, 2600, 6, 1, 64, 64}, 4, 64,
                                              [](uint64_t) { return hot_lists(2600, 4); })));
  cases.push_back(portable_case(
      packed(selected_case("docs_33_64_65_127_G3_64x64", {1, 127, 127, 6, 2, 64, 64}, 3, 32), kMixedPadded, 32)));
  for (OpCase& c : cases_with_unit()) cases.push_back(std::move(c));
  cases.push_back(small_card_case(selected_case("300_l64_n3", {1, 300, 300, 6, 2, 64, 64}, 3, 64)));
  for (OpCase& c : resident_rows_cases()) cases.push_back(std::move(c));
  // CompactTile, whose kernel for dk and dv reads the token lists from global memory.
  cases.push_back(small_card_case(selected_case("300_l64_n3_128x128", {1, 300, 300, 6, 2, 128, 128}, 3, 64)));
  cases.push_back(small_card_case(selected_case("111_l24_n3_192x128", {1, 111, 111, 2, 2, 192, 128}, 3, 24)));
  cases.push_back(
      small_card_case(selected_case("150_l16_n5_256x250_G40", {1, 150, 150, 40, 1, 256, 250}, 5, 16, nullptr, 8)));
  return cases;
}

}  // namespace triad
