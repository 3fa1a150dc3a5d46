// Cases for a decoding step's skinny linear layers. There is no backward.
#include "kernels/common/op_case.h"
#include "kernels/decode/skinny_linear.h"
#include "kernels/ops/matmul.h"

namespace triad {

namespace {

using Activation = SkinnyLinearOptions::Activation;

OpCase few_case(std::string name, int64_t N, int64_t in, int64_t out, bool norm, Activation activation, bool addend) {
  OpCase c{.op = "skinny_linear", .name = std::move(name)};
  const int64_t rows = activation == Activation::swiglu ? 2 * out : out;
  c.args = {{.name = "x", .role = ArgRole::constant, .shape = {N, in}},
            {.name = "w", .role = ArgRole::constant, .shape = {rows, in}, .std = 0.2},
            {.name = "y", .role = ArgRole::saved, .shape = {N, out}}};
  if (norm) c.args.push_back({.name = "norm", .role = ArgRole::constant, .shape = {in}, .std = 0.3, .mean = 1});
  if (addend) c.args.push_back({.name = "addend", .role = ArgRole::constant, .shape = {N, out}});
  c.forward = [activation](Context& ctx, const Args& a) {
    skinny_linear(ctx, a["y"], a["x"], a["w"],
                  {.norm = a["norm"], .eps = 1e-6, .activation = activation, .addend = a["addend"]});
  };
  c.forward_flops = 2.0 * static_cast<double>(N * in * rows);
  c.cpu = N * in * out < 20'000'000;
  c.forward_bytes = 2.0 * static_cast<double>(rows * in + N * (in + out));
  c.forward_written = 2.0 * static_cast<double>(N * out);
  return c;
}

// The case with the same addend for every row.
OpCase biased(OpCase c) {
  const int64_t N = c.args[0].shape[0];
  c.name += "_bias";
  c.args.push_back({.name = "bias", .role = ArgRole::constant, .shape = {c.args[2].shape[1]}});
  c.forward = [N](Context& ctx, const Args& a) {
    skinny_linear(ctx, a["y"], a["x"], a["w"], {.norm = a["norm"], .eps = 1e-6, .addend = repeat_row(a["bias"], N)});
  };
  return c;
}

}  // namespace

std::vector<OpCase> skinny_linear_cases() {
  std::vector<OpCase> cases = {
      few_case("1x1x1", 1, 1, 1, false, Activation::none, false),
      few_case("3x20x37_norm", 3, 20, 37, true, Activation::none, false),
      few_case("1x768x130_norm", 1, 768, 130, true, Activation::none, false),
      few_case("8x200x33_norm_silu", 8, 200, 33, true, Activation::silu, false),
      few_case("5x64x70_norm_swiglu", 5, 64, 70, true, Activation::swiglu, false),
      few_case("2x3072x96_addend", 2, 3072, 96, false, Activation::none, true),
      few_case("4x1000x9_addend", 4, 1000, 9, false, Activation::none, true),
      few_case("1x768x1541_norm_silu", 1, 768, 1541, true, Activation::silu, false),  // a warp computes four columns
      few_case("1x136x1547_swiglu", 1, 136, 1547, false, Activation::swiglu, false),
      few_case("1x200x3073_addend", 1, 200, 3073, false, Activation::none, true),
      // In f32 the most shared memory a CTA may use.
      few_case("8x3072x96_addend", 8, 3072, 96, false, Activation::none, true),
      few_case("6x136x2117_addend", 6, 136, 2117, false, Activation::none, true),  // a CTA computes 16 columns in bf16
      few_case("7x64x6405_norm", 7, 64, 6405, true, Activation::none, false),      // CTAs loop over columns
      // The longest rows that a warp holds in registers, and longer ones, which it processes in blocks.
      few_case("8x768x32_swiglu", 8, 768, 32, false, Activation::swiglu, false),
      few_case("3x1000x2120_norm_silu", 3, 1000, 2120, true, Activation::silu, false),
      few_case("2x1608x19_norm_swiglu", 2, 1608, 19, true, Activation::swiglu, false),  // rows in two blocks
      few_case("5x6152x21_norm_silu", 5, 6152, 21, true, Activation::silu, false),      // rows in three blocks
      // Rows in three blocks, and CTAs loop over columns.
      few_case("2x3080x4300_norm", 2, 3080, 4300, true, Activation::none, false),
      few_case("9x64x40_norm_silu", 9, 64, 40, true, Activation::silu, false),
      // More than 8 rows, in bf16 in 2, 4 and 8 tiles: rows in one block and in several, CTAs that loop over columns,
      // one row more than a kernel takes.
      few_case("12x200x37_norm_addend", 12, 200, 37, true, Activation::none, true),
      few_case("17x64x70_norm_swiglu", 17, 64, 70, true, Activation::swiglu, false),
      few_case("64x1608x200_norm_silu", 64, 1608, 200, true, Activation::silu, false),
      few_case("64x3072x96_addend", 64, 3072, 96, false, Activation::none, true),
      few_case("65x264x4300_norm_addend", 65, 264, 4300, true, Activation::none, true),
      few_case("256x192x384_norm_swiglu", 256, 192, 384, true, Activation::swiglu, false),
      few_case("64x768x8600_norm", 64, 768, 8600, true, Activation::none, false),
      few_case("33x760x2200_norm_swiglu", 33, 760, 2200, true, Activation::swiglu, false),
      // In bf16 on Hopper by clusters: slices of the inner dimension, some of them short; CTAs that loop over columns;
      // rows that two CTAs of an SM cannot hold.
      few_case("12x4200x37_norm_addend", 12, 4200, 37, true, Activation::none, true),
      few_case("17x5000x70_norm_swiglu", 17, 5000, 70, true, Activation::swiglu, false),
      few_case("64x4104x200_norm_silu", 64, 4104, 200, true, Activation::silu, false),
      few_case("64x1024x8600_addend", 64, 1024, 8600, false, Activation::none, true),
      few_case("20x10000x300_silu", 20, 10000, 300, false, Activation::silu, false),
      few_case("64x20000x72", 64, 20000, 72, false, Activation::none, false),  // too long for a cluster
      biased(few_case("1x768x130_norm", 1, 768, 130, true, Activation::none, false)),
      biased(few_case("3x64x41", 3, 64, 41, false, Activation::none, false)),
      biased(few_case("8x200x33_norm", 8, 200, 33, true, Activation::none, false)),
      biased(few_case("9x64x40_norm", 9, 64, 40, true, Activation::none, false)),
      few_case("m7c_qkv", 1, 768, 1536, true, Activation::none, false),
      few_case("m7c_fc1", 1, 768, 3072, true, Activation::silu, false),
      few_case("m7c_fc2", 1, 3072, 768, false, Activation::none, true),
      few_case("m7c_head", 1, 768, 50304, true, Activation::none, false),
      few_case("m7c_fc1_8_rows", 8, 768, 3072, true, Activation::silu, false),
      few_case("m7c_fc2_8_rows", 8, 3072, 768, false, Activation::none, true),
      few_case("m7c_head_8_rows", 8, 768, 50304, true, Activation::none, false),
      few_case("m7c_qkv_64_rows", 64, 768, 1536, true, Activation::none, false),
      few_case("m7c_fc1_64_rows", 64, 768, 3072, true, Activation::silu, false),
      few_case("m7c_fc2_64_rows", 64, 3072, 768, false, Activation::none, true),
      few_case("m7c_head_64_rows", 64, 768, 50304, true, Activation::none, false),
  };
  for (size_t i = cases.size() - 11; i < cases.size(); ++i) cases[i].bench = true;
  return cases;
}

}  // namespace triad
