// Cases of the selection by a taught index, which has no gradient.
#include "kernels/common/portable_case.h"
#include "kernels/nsa/cases/document_cases.h"
#include "kernels/nsa/select_index.h"

namespace triad {

namespace {

struct Blocks {
  int64_t l_sel, n_sel, init_blocks = 1, local_blocks = 2, every = 1;
};

OpCase select_case(std::string name, int64_t B, int64_t T, int64_t Hkv, int64_t di, const Blocks& blocks,
                   double std = 1.0, int64_t row_pad = 0) {
  SelectOptions o;
  o.l_sel = blocks.l_sel, o.n_sel = blocks.n_sel, o.init_blocks = blocks.init_blocks,
  o.local_blocks = blocks.local_blocks, o.every = blocks.every;
  OpCase c{.op = "nsa_select_index", .name = std::move(name)};
  c.args = {
      {.name = "iq", .role = ArgRole::constant, .shape = {B, T, Hkv, di}, .std = std, .row_pad = row_pad},
      {.name = "ik", .role = ArgRole::constant, .shape = {B, T, 1, di}, .std = std, .row_pad = row_pad},
      {.name = "block_index", .role = ArgRole::saved, .shape = {B, T, Hkv, o.n_sel}, .type = ArgType::i32},
  };
  c.forward = [o](Context& ctx, const Args& a) {
    nsa_select_index(ctx, a["block_index"], a["iq"], a["ik"], o, documents_of(a));
  };
  const double rows = static_cast<double>(B * T), width = static_cast<double>(di);
  c.forward_flops = 2 * window_pairs(T, T) * static_cast<double>(B * Hkv) * width;
  c.forward_bytes = 2 * rows * width * static_cast<double>(Hkv + 1) + 4 * rows * static_cast<double>(Hkv * o.n_sel);
  c.cpu = static_cast<double>(B * Hkv) * window_pairs(T, T) * width < 1e8;
  return c;
}

}  // namespace

std::vector<OpCase> select_index_cases() {
  std::vector<OpCase> cases = {
      select_case("2x127_l8_n4", 2, 127, 2, 16, {8, 4}),
      select_case("333_l32_n5_di6", 1, 333, 1, 6, {32, 5}),
      select_case("300_l1_n20_strided", 1, 300, 2, 32, {1, 20}, 1.0, 8),
      select_case("400_l24_no_init", 1, 400, 3, 64, {24, 6, 0, 1}),
      select_case("400_l48_two_init", 1, 400, 2, 10, {48, 6, 2, 3}),
      select_case("n_beyond_blocks", 1, 200, 2, 32, {64, 16}),
      select_case("5_below_a_block", 1, 5, 1, 2, {128, 16, 0, 1}),
      select_case("2x127_l8_n4_every_8", 2, 127, 2, 16, {8, 4, 1, 2, 8}),
      select_case("400_l24_every_3_strided", 1, 400, 3, 64, {24, 6, 1, 2, 3}, 1.0, 8),
      select_case("400_ties", 1, 400, 2, 32, {32, 5}, 0.0),
      packed(select_case("docs_1_2_3", 1, 3, 2, 10, {8, 4}), kSingleTokens, 8),
      packed(select_case("docs_33_64_65_127", 1, 127, 2, 8, {8, 4}), kMixed, 8),
      packed(select_case("docs_33_64_65_127_every_4", 1, 127, 2, 8, {8, 4, 1, 2, 4}), kMixed, 8),
      packed(select_case("docs_33_64_65_127_l12_two_init", 1, 127, 1, 60, {12, 5, 2, 3}), kMixed, 12),
      packed(select_case("docs_33_64_65_127_ties", 1, 127, 1, 64, {4, 5}, 0.0), kMixed, 4),
      packed(select_case("docs_33_64_65_127_l1_no_init", 1, 127, 1, 8, {1, 6, 0, 1}), kMixed, 1),
      packed(select_case("docs_empty_tail", 1, 127, 1, 10, {8, 4}), kMixedPadded, 8),
      packed(select_case("docs_two_rows", 2, 127, 2, 8, {8, 5}), kTwoRows, 8),
      // More blocks than shared memory holds scores of; more slots than the warp collects at once; more than one chunk.
      select_case("3000_l1_n40_no_init", 1, 3000, 1, 4, {1, 40, 0, 1}),
      select_case("700_l16_n5_di250", 1, 700, 1, 250, {16, 5}),
      // Shapes of Hopper: blocks of 128 and of 64, widths of 16 to 128, more blocks than a tile of keys has.
      gpu_sized(select_case("1100_l128_n4_di64", 1, 1100, 4, 64, {128, 4, 0, 1})),
      gpu_sized(select_case("2x3000_l64_n8_di128", 2, 3000, 2, 128, {64, 8})),
      gpu_sized(select_case("2600_l128_n16_di16", 1, 2600, 2, 16, {128, 16, 0, 1})),
      gpu_sized(select_case("3000_l128_n4_di48_ties", 1, 3000, 1, 48, {128, 4, 0, 1}, 0.0)),
      gpu_sized(packed(select_case("docs_130_131_700_1333_l128", 1, 1333, 2, 64, {128, 3, 0, 1}),
                       {0, 130, 131, 700, 1333}, 128)),
      gpu_sized(packed(select_case("docs_3001_9000_l64", 1, 9000, 1, 64, {64, 8}), {0, 3001, 9000}, 64)),
      gpu_sized(select_case("1100_l128_n4_di64_every_16", 1, 1100, 4, 64, {128, 4, 0, 1, 16})),
      gpu_sized(select_case("2x9000_l64_n8_di128_every_64", 2, 9000, 2, 128, {64, 8, 1, 2, 64})),
      gpu_sized(
          packed(select_case("docs_3001_9000_l64_every_16", 1, 9000, 1, 64, {64, 8, 1, 2, 16}), {0, 3001, 9000}, 64)),
      portable_case(gpu_sized(select_case("2x3000_l64_n8_di128", 2, 3000, 2, 128, {64, 8}))),
      gpu_sized(select_case("9000_l64_n33_no_init", 1, 9000, 5, 64, {64, 33, 0, 1})),
      gpu_sized(select_case("9000_l128_n40_di80", 1, 9000, 1, 80, {128, 40, 0, 1})),
      select_case("8k_l128_n16", 1, 8192, 4, 64, {128, 16, 0, 1}),
  };
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
