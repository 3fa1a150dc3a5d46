// Selection cases (no gradient).
#include <tuple>
#include <utility>

#include "kernels/common/portable_case.h"
#include "kernels/nsa/cases/document_cases.h"
#include "kernels/nsa/select.h"

namespace triad {

namespace {

OpCase select_case(std::string name, int64_t B, int64_t T, int64_t Hq, int64_t Hkv, int64_t dk, const SelectOptions& o,
                   double std = 1.0) {
  const int64_t Tc = compressed_length(T, o.l, o.d);
  OpCase c{.op = "nsa_select", .name = std::move(name)};
  // lse is random: any value scales all the head's probabilities alike, so the lists are still well defined.
  c.args = {
      {.name = "q", .role = ArgRole::constant, .shape = {B, T, Hq, dk}, .std = std},
      {.name = "k_cmp", .role = ArgRole::constant, .shape = {B, Tc, Hkv, dk}, .std = std},
      {.name = "lse_cmp", .role = ArgRole::constant, .shape = {B, T, Hq}, .type = ArgType::acc, .std = 0.5, .mean = 3},
      {.name = "block_index", .role = ArgRole::saved, .shape = {B, T, Hkv, o.n_sel}, .type = ArgType::i32}};
  c.forward = [o](Context& ctx, const Args& a) {
    nsa_select(ctx, a["block_index"], a["q"], a["k_cmp"], a["lse_cmp"], o, documents_of(a));
  };
  const double width = static_cast<double>(dk), rows = static_cast<double>(B * T);
  c.forward_flops = 2 * compressed_pairs(T, o.l, o.d) * static_cast<double>(B * Hq) * width;
  c.forward_bytes = rows * static_cast<double>(Hq) * (2 * width + 4) + 2 * static_cast<double>(B * Tc * Hkv) * width +
                    4 * rows * static_cast<double>(Hkv * o.n_sel);
  return c;
}

std::vector<OpCase> packed_cases() {
  return {
      packed(select_case("docs_1_2_3", 1, 3, 2, 2, 10, {8, 4, 8, 4}), kSingleTokens, 8),
      packed(select_case("docs_33_64_65_127_G4", 1, 127, 8, 2, 8, {8, 4, 8, 4}), kMixed, 8),
      packed(select_case("docs_33_64_65_127_two_init", 1, 127, 2, 1, 60, {6, 3, 12, 5, 2, 3}), kMixed, 12),
      packed(select_case("docs_33_64_65_127_ties", 1, 127, 2, 1, 64, {4, 2, 4, 5}, 0.0), kMixed, 4),
      packed(select_case("docs_33_64_65_127_l1_no_init", 1, 127, 2, 1, 8, {1, 1, 1, 6, 0, 1}), kMixed, 1),
      packed(select_case("docs_empty_tail_G6", 1, 127, 6, 1, 10, {8, 4, 8, 4}), kMixedPadded, 8),
      packed(select_case("docs_two_rows_G16", 2, 127, 16, 1, 8, {8, 4, 8, 5}), kTwoRows, 8),
      packed(select_case("docs_33_64_65_127_G4_every_8", 1, 127, 8, 2, 8, {8, 4, 8, 4, 1, 2, 8}), kMixed, 8),
      packed(select_case("docs_one", 1, 127, 2, 1, 8, {8, 4, 8, 4}), {0, 127}, 8),
      packed(select_case("docs_64_of_4", 1, 256, 2, 1, 8, {4, 2, 4, 4}), equal_documents(64, 4), 4),
      packed(select_case("docs_781_2048", 1, 2048, 1, 1, 8, {32, 16, 64, 6}), kTwoLong, 64),
      // Hopper's kernel: each head width; tiles in which documents begin and end
      gpu_sized(packed(select_case("docs_130_131_700_1333_dk64_G6", 1, 1333, 12, 2, 64, {32, 16, 64, 6}),
                       {0, 130, 131, 700, 1333}, 64)),
      gpu_sized(
          packed(select_case("docs_130_131_700_1333_dk64_G6_every_16", 1, 1333, 12, 2, 64, {32, 16, 64, 6, 1, 2, 16}),
                 {0, 130, 131, 700, 1333}, 64)),
      gpu_sized(packed(select_case("docs_two_rows_dk128_G2_l'32", 2, 700, 4, 2, 128, {32, 16, 32, 6}),
                       {0, 331, 700, 701, 1400}, 32)),
      gpu_sized(
          packed(select_case("docs_781_2048_dk192_G16_l'128", 1, 2048, 16, 1, 192, {32, 16, 128, 5}), kTwoLong, 128)),
      gpu_sized(packed(select_case("docs_64_of_32_dk64_G1", 1, 2048, 1, 1, 64, {16, 16, 32, 5}),
                       equal_documents(64, 32), 32)),
      gpu_sized(
          packed(select_case("docs_500_1201_dk64_ties", 1, 1201, 4, 2, 64, {32, 16, 32, 5}, 0.0), {0, 500, 1201}, 32)),
      gpu_sized(packed(select_case("docs_3001_9000_dk64_l'32_long_rows", 1, 9000, 2, 1, 64, {32, 16, 32, 8}),
                       {0, 3001, 9000}, 32)),
  };
}

}  // namespace

std::vector<OpCase> select_cases() {
  std::vector<OpCase> cases = {
      select_case("31_no_block", 1, 31, 4, 2, 8, {32, 16, 64, 16}),
      select_case("2x127_l8_n4", 2, 127, 4, 2, 16, {8, 4, 8, 4}),
      select_case("333_l32_n5_G6", 1, 333, 6, 1, 64, {32, 16, 32, 5}),
      select_case("507_n3_all_forced", 1, 507, 4, 2, 32, {32, 16, 64, 3}),
      select_case("300_l1_n20", 1, 300, 2, 1, 32, {1, 1, 1, 20}),
      select_case("400_no_init", 1, 400, 16, 1, 60, {16, 8, 24, 6, 0, 1}),
      select_case("400_two_init", 1, 400, 8, 2, 192, {16, 8, 48, 6, 2, 3}),
      select_case("n_beyond_blocks", 1, 200, 4, 2, 32, {32, 16, 64, 16}),
      select_case("2x127_l8_n4_every_4", 2, 127, 4, 2, 16, {8, 4, 8, 4, 1, 2, 4}),
      select_case("333_l32_n5_G6_every_32", 1, 333, 6, 1, 64, {32, 16, 32, 5, 1, 2, 32}),
      select_case("400_ties", 1, 400, 4, 2, 32, {32, 16, 32, 5}, 0.0),
      // Hopper's kernel in bf16: each head width, selection blocks with 2, 4 and 8 compressed keys, odd and even
      // groups, partial tiles at the end
      select_case("1333_dk64_G6", 1, 1333, 12, 2, 64, {32, 16, 64, 8}),
      select_case("2x700_dk128_G3_l'32", 2, 700, 6, 2, 128, {32, 16, 32, 6}),
      select_case("1333_dk64_G6_every_16", 1, 1333, 12, 2, 64, {32, 16, 64, 8, 1, 2, 16}),
      gpu_sized(select_case("9000_dk64_G6_l'32_long_rows_every_2", 1, 9000, 6, 1, 64, {32, 16, 32, 8, 1, 2, 2})),
      gpu_sized(select_case("1500_dk192_G16_l'128", 1, 1500, 16, 1, 192, {32, 16, 128, 5})),
      // small groups at dk 128; wide tiles, the last case with columns that no head uses
      select_case("1333_dk128_G1", 1, 1333, 2, 2, 128, {32, 16, 64, 8}),
      select_case("2x700_dk128_G2_l'32", 2, 700, 4, 2, 128, {32, 16, 32, 6}),
      gpu_sized(select_case("1333_dk128_G4", 1, 1333, 8, 2, 128, {32, 16, 64, 8})),
      gpu_sized(select_case("2x700_dk128_G8_l'32", 2, 700, 16, 2, 128, {32, 16, 32, 6})),
      gpu_sized(select_case("1333_dk128_G6", 1, 1333, 12, 2, 128, {32, 16, 64, 8})),
      select_case("900_dk64_G1_no_overlap", 1, 900, 1, 1, 64, {16, 16, 64, 6, 0, 1}),
      select_case("700_dk64_ties", 1, 700, 4, 2, 64, {32, 16, 32, 5}, 0.0),
      select_case("2600_dk64_n36_ties", 1, 2600, 2, 1, 64, {32, 16, 64, 36, 1, 2}, 0.0),
      // long score rows: in scratch, in shared memory, and with all scores equal; and more heads than one pass holds
      gpu_sized(select_case("9000_dk64_G6_l'32_long_rows", 1, 9000, 6, 1, 64, {32, 16, 32, 8})),
      select_case("9000_dk64_l'32_n24", 1, 9000, 1, 1, 64, {32, 16, 32, 24}),
      select_case("9000_dk64_l'32_ties", 1, 9000, 2, 1, 64, {32, 16, 32, 24, 1, 2}, 0.0),
      select_case("700_dk128_G32", 1, 700, 32, 1, 128, {32, 16, 64, 4}),
      select_case("m7c", 16, 2048, 12, 2, 64, {32, 16, 64, 16}),
  };
  cases.back().bench = true;
  cases.back().f32_tolerance = 1e-2;  // a few among 65,536 lists have two scores equal within rounding
  for (OpCase& c : packed_cases()) cases.push_back(std::move(c));
  // The portable kernel in bf16. Without portable_case(), Hopper's kernel would compute these cases. Their sizes cover
  // pooling with bounds known at compile time (l' = 4 d) and with others, blocks that two key tiles share, and key
  // tiles that all tokens see. With one local block, a token does not see all keys that overlap its last candidate. On
  // a small card the scores do not fit shared memory.
  cases.push_back(portable_case(select_case("1333_dk64_G6", 1, 1333, 12, 2, 64, {32, 16, 64, 8})));
  cases.push_back(portable_case(select_case("2x700_dk128_G3_l'32", 2, 700, 6, 2, 128, {32, 16, 32, 6})));
  cases.push_back(portable_case(select_case("2600_dk64_n36_ties", 1, 2600, 2, 1, 64, {32, 16, 64, 36, 1, 2}, 0.0)));
  cases.push_back(portable_case(select_case("9000_dk64_G6_l'32_long_rows", 1, 9000, 6, 1, 64, {32, 16, 32, 8})));
  cases.push_back(
      portable_case(packed(select_case("docs_130_131_700_1333_dk64_G6", 1, 1333, 12, 2, 64, {32, 16, 64, 6}),
                           {0, 130, 131, 700, 1333}, 64)));
  cases.push_back(portable_case(select_case("5000_dk64_G2_one_local", 1, 5000, 2, 1, 64, {32, 16, 64, 8, 1, 1})));
  cases.push_back(portable_case(
      packed(select_case("docs_3001_9000_dk64", 1, 9000, 2, 1, 64, {32, 16, 64, 8}), {0, 3001, 9000}, 64)));
  // All scores are equal, so all candidates tie: at most 32 in the first case, at most 64 in the second, more in the
  // third.
  for (const auto& [name, T, n] :
       {std::tuple{"1500_dk64_n9_ties", 1500, 9}, {"3000_dk64_n9_ties", 3000, 9}, {"4700_dk64_n9_ties", 4700, 9}})
    cases.push_back(portable_case(select_case(name, 1, T, 1, 1, 64, {32, 16, 64, n, 1, 2}, 0.0)));
  // Three blocks in a list are forced, so the lists in these three cases have 21, 24 and 25 slots for other blocks. For
  // at most 24 slots, a warp collects the best candidates. For more, it bisects to find the lowest score that belongs
  // to the list.
  for (const auto& [name, n] : {std::pair{"4700_dk64_n24", 24}, {"4700_dk64_n27", 27}, {"4700_dk64_n28", 28}})
    cases.push_back(portable_case(select_case(name, 1, 4700, 1, 1, 64, {32, 16, 64, n, 1, 2})));
  // The kernel has instances for heads up to 64, 128, 192 and 256 columns wide. Narrower heads get zero columns.
  cases.push_back(portable_case(select_case("1333_dk128_G6", 1, 1333, 12, 2, 128, {32, 16, 64, 8})));
  for (const auto& [name, dk] :
       {std::pair{"2x700_dk32_G2", 32}, {"2x700_dk72_G2", 72}, {"2x700_dk192_G2", 192}, {"2x700_dk256_G2", 256}})
    cases.push_back(portable_case(select_case(name, 2, 700, 4, 2, dk, {32, 16, 64, 5})));
  // A selection that forces no block at the sequence's beginning.
  cases.push_back(portable_case(select_case("1333_dk64_no_init", 1, 1333, 2, 1, 64, {32, 16, 64, 6, 0, 1})));
  // 32 heads' q is more than the kernel holds in shared memory, so it loads the heads in two turns.
  cases.push_back(portable_case(select_case("700_dk128_G32", 1, 700, 32, 1, 128, {32, 16, 64, 4})));
  // Here the kernel does not pool scores in registers: with 10,300 tokens and 4-token selection blocks, the sums that
  // one warp passes to the next would take too much shared memory.
  cases.push_back(portable_case(select_case("10300_dk64_l'4", 1, 10300, 1, 1, 64, {2, 1, 4, 8})));
  // Sequences so long that a small card has no room for the scores in shared memory: scratch memory holds them.
  cases.push_back(small_card_case(select_case("6000_dk64_G2_l'4", 1, 6000, 2, 1, 64, {2, 1, 4, 8})));
  cases.push_back(small_card_case(select_case("9000_dk64_G6_l'8", 1, 9000, 6, 1, 64, {16, 8, 8, 8})));
  return cases;
}

}  // namespace triad
