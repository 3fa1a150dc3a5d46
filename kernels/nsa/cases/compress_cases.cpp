// phi cases.
#include "kernels/nsa/cases/document_cases.h"
#include "kernels/nsa/gate_factors.h"
#include "kernels/ops/cast.h"

namespace triad {

namespace {

OpCase compress_case(std::string name, int64_t B, int64_t T, int64_t H, int64_t D, const PhiOptions& o,
                     int64_t row_pad = 0) {
  const int64_t Tc = compressed_length(T, o.l, o.d);
  OpCase c{.op = "nsa_compress", .name = std::move(name)};
  c.args = {{.name = "x", .role = ArgRole::input, .shape = {B, T, H, D}, .row_pad = row_pad},
            {.name = "y", .role = ArgRole::output, .shape = {B, Tc, H, D}}};
  const double l = static_cast<double>(o.l), blocks = static_cast<double>(B * Tc * H), width = static_cast<double>(D);
  const double rows = static_cast<double>(B * T * H) * width;
  c.forward_flops = 2 * blocks * l * width;
  c.backward_flops = (o.kind == Phi::avg ? 1 : 2) * c.forward_flops;
  c.forward_bytes = 2 * rows + 2 * blocks * width, c.forward_written = 2 * blocks * width;
  c.backward_bytes = (o.kind == Phi::avg ? 2 : 4) * rows + 4 * blocks * width, c.backward_written = 2 * rows;
  if (o.kind == Phi::conv) c.args.push_back({.name = "w", .role = ArgRole::param, .shape = {o.l, D}, .std = 0.3});
  if (o.kind == Phi::mlp) {
    c.args.push_back({.name = "pos", .role = ArgRole::param, .shape = {o.l, D}, .std = 0.3});
    c.args.push_back({.name = "fc1", .role = ArgRole::param, .shape = {2 * D, o.l * D}, .std = 0.2});
    c.args.push_back({.name = "fc2", .role = ArgRole::param, .shape = {D, 2 * D}, .std = 0.2});
    c.forward_flops = 2 * blocks * (l * width * 2 * width + 2 * width * width);
    c.backward_flops = 3 * c.forward_flops;  // backward recomputes fc1
  }
  c.forward = [o](Context& ctx, const Args& a) {
    nsa_compress_forward(ctx, a["y"], a["x"], {a["w"], a["pos"], a["fc1"], a["fc2"]}, o, documents_of(a));
  };
  c.backward = [o](Context& ctx, const Args& a) {
    Scratch::Scope scope(ctx.scratch);
    Tensor dy = a["dy"];  // case dtype; the op expects acc
    if (dy.dtype != acc_dtype(dy.dtype)) {
      dy = scope.alloc(acc_dtype(dy.dtype), dy.shape());
      cast(ctx, dy, a["dy"]);
    }
    nsa_compress_backward(ctx, a["dx"], {a["dw"], a["dpos"], a["dfc1"], a["dfc2"]}, dy, a["x"],
                          {a["w"], a["pos"], a["fc1"], a["fc2"]}, o, documents_of(a));
  };
  return c;
}

// k and v with widths dk and dv, and gates for H heads, which may be factors in the element type or in acc.
OpCase averages_case(std::string name, int64_t B, int64_t T, int64_t Hkv, int64_t dk, int64_t dv, int64_t H,
                     const CompressionBlocks& o, ArgType factors = ArgType::acc, int64_t row_pad = 0) {
  const int64_t Tc = compressed_length(T, o.l, o.d);
  OpCase c{.op = "nsa_averages_and_gates", .name = std::move(name)};
  c.args = {{.name = "k", .role = ArgRole::constant, .shape = {B, T, Hkv, dk}, .row_pad = row_pad},
            {.name = "v", .role = ArgRole::constant, .shape = {B, T, Hkv, dv}},
            {.name = "factors", .role = ArgRole::constant, .shape = {B, T, H, 3}, .type = factors, .row_pad = row_pad},
            {.name = "k_cmp", .role = ArgRole::output, .shape = {B, Tc, Hkv, dk}},
            {.name = "v_cmp", .role = ArgRole::output, .shape = {B, Tc, Hkv, dv}},
            {.name = "gate", .role = ArgRole::output, .shape = {3, B, T, H}, .type = ArgType::acc}};
  c.forward = [o](Context& ctx, const Args& a) {
    nsa_averages_and_gates(ctx, {a["k_cmp"], a["v_cmp"]}, {a["k"], a["v"]}, o, a["gate"], a["factors"],
                           documents_of(a));
  };
  const double rows = static_cast<double>(B * T * Hkv * (dk + dv)), gates = static_cast<double>(3 * B * T * H);
  c.forward_written = 2 * rows / static_cast<double>(o.d) + 4 * gates;
  c.forward_bytes = 2 * rows + 4 * gates + c.forward_written;
  return c;
}

std::vector<OpCase> packed_cases() {
  std::vector<OpCase> cases;
  for (const Phi kind : {Phi::avg, Phi::conv, Phi::mlp}) {
    const std::string phi = kind == Phi::avg ? "avg" : kind == Phi::conv ? "conv" : "mlp";
    const auto add = [&](const char* name, int64_t B, int64_t T, int64_t H, int64_t D, int64_t l, int64_t d,
                         const std::vector<int32_t>& bounds, int64_t row_pad = 0) {
      cases.push_back(packed(compress_case(phi + "_" + name, B, T, H, D, {l, d, kind}, row_pad), bounds, 8));
    };
    add("docs_1_2_3_no_block", 1, 3, 2, 8, 2, 1, kSingleTokens);
    add("docs_1_2_3_l1", 1, 3, 2, 8, 1, 1, kSingleTokens);
    add("docs_33_64_65_127", 1, 127, 2, 8, 8, 4, kMixed, 8);
    add("docs_33_64_65_127_l6_d3", 1, 127, 3, 10, 6, 3, kMixed);
    add("docs_33_64_65_127_l8_d8", 1, 127, 1, 8, 8, 8, kMixed);
    add("docs_empty_tail", 1, 127, 1, 8, 8, 4, kMixedPadded);
    add("docs_two_rows_l7_d3", 2, 127, 2, 8, 7, 3, kTwoRows);
    add("docs_one", 1, 127, 2, 8, 8, 4, {0, 127});
    add("docs_64_of_8", 1, 512, 1, 8, 8, 4, equal_documents(64, 8));
    add("docs_781_2048", 1, 2048, 1, 8, 32, 16, kTwoLong);
    if (kind == Phi::mlp) cases.back().differences = false;  // seconds; smaller cases cover it
    add("docs_130_131_400_700_64", 1, 700, 2, 64, 32, 16, {0, 130, 131, 400, 700}, 8);
    cases.back().cpu = kind != Phi::mlp;
    add("docs_130_131_400_700_128", 1, 700, 1, 128, 16, 8, {0, 130, 131, 400, 700});
    cases.back().cpu = kind != Phi::mlp;
  }
  return cases;
}

}  // namespace

std::vector<OpCase> compress_cases() {
  std::vector<OpCase> cases = {
      compress_case("avg_31_no_block", 1, 31, 2, 8, {32, 16, Phi::avg}),
      compress_case("avg_2x100", 2, 100, 2, 64, {32, 16, Phi::avg}, 8),
      compress_case("avg_l1", 1, 17, 3, 6, {1, 1, Phi::avg}),
      compress_case("avg_l10_d5", 1, 63, 1, 100, {10, 5, Phi::avg}),
      compress_case("conv_31_no_block", 1, 31, 2, 8, {32, 16, Phi::conv}),
      compress_case("conv_2x100", 2, 100, 2, 64, {32, 16, Phi::conv}, 8),
      compress_case("conv_l6_d3", 1, 47, 3, 10, {6, 3, Phi::conv}),
      compress_case("conv_l1", 1, 17, 1, 60, {1, 1, Phi::conv}),
      compress_case("mlp_7_no_block", 1, 7, 2, 8, {8, 4, Phi::mlp}),
      compress_case("mlp_2x33", 2, 33, 2, 8, {8, 4, Phi::mlp}, 8),
      compress_case("mlp_l6_d3", 1, 47, 3, 10, {6, 3, Phi::mlp}),
  };
  for (const Phi kind : {Phi::avg, Phi::conv, Phi::mlp}) {
    const char* names[] = {"avg_m7c", "conv_m7c", "mlp_m7c"};
    cases.push_back(compress_case(names[static_cast<int>(kind)], 16, 2048, 2, 64, {32, 16, kind}));
    cases.back().bench = true;
  }
  for (OpCase& c : packed_cases()) cases.push_back(std::move(c));
  cases.push_back(averages_case("31_no_block", 1, 31, 2, 8, 8, 2, {32, 16}));
  cases.push_back(averages_case("2x100_per_head", 2, 100, 2, 64, 64, 6, {32, 16}, ArgType::element, 8));
  cases.push_back(averages_case("47_widths_192_128", 1, 47, 3, 192, 128, 3, {6, 3}));
  cases.push_back(averages_case("47_one_width_odd", 1, 47, 3, 64, 10, 3, {6, 3}, ArgType::element));
  cases.push_back(averages_case("47_odd", 1, 47, 1, 7, 10, 5, {6, 3}, ArgType::acc, 3));
  cases.push_back(packed(averages_case("docs_33_64_65_127", 1, 127, 2, 8, 16, 4, {8, 4}), kMixed, 8));
  cases.push_back(averages_case("m7c", 16, 2048, 2, 64, 64, 2, {32, 16}));
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
