// Gate and gated sum cases.
#include "kernels/common/portable_case.h"
#include "kernels/nsa/gate.h"
#include "kernels/ops/rope.h"

namespace triad {

namespace {

struct GateSizes {
  int64_t B, T, Hq, Hkv, width;  // width: dk in gate cases, dv in gated sum cases
};

// Backward writes dq_group. In cases that are checked (not timed), rope_backward with a rotation by 0 adds it to every
// dq head, as in a layer.
OpCase gate_case(std::string name, const GateSizes& n, const GateOptions& o, int64_t row_pad = 0, bool bench = false) {
  const int64_t hidden = n.width / 2;
  OpCase c{.op = "nsa_gate", .name = std::move(name), .bench = bench};
  const ArgRole q_role = bench ? ArgRole::constant : ArgRole::input_acc;
  c.args = {{.name = "q", .role = q_role, .shape = {n.B, n.T, n.Hq, n.width}, .row_pad = row_pad},
            {.name = "dq_group",
             .role = ArgRole::saved,
             .shape = o.has_gradient() ? Shape{n.B, n.T, n.Hkv, n.width} : Shape{},
             .type = ArgType::acc},
            {.name = "one",
             .role = ArgRole::constant,
             .shape = {n.T, n.width / 2},
             .type = ArgType::acc,
             .std = 0,
             .mean = 1},
            {.name = "zero", .role = ArgRole::constant, .shape = {n.T, n.width / 2}, .type = ArgType::acc, .std = 0},
            {.name = "fc1_w", .role = ArgRole::param, .shape = {hidden, n.width}, .std = 0.3},
            {.name = "fc1_b", .role = ArgRole::param, .shape = {hidden}, .std = 0.3},
            {.name = "fc2_w", .role = ArgRole::param, .shape = {3, hidden}, .std = 0.5},
            {.name = "fc2_b", .role = ArgRole::param, .shape = {3}, .std = 0.5},
            {.name = "gate", .role = ArgRole::output, .shape = {3, n.B, n.T, n.Hkv}, .type = ArgType::acc}};
  c.forward = [o](Context& ctx, const Args& a) {
    nsa_gate_forward(ctx, a["gate"], a["q"], {a["fc1_w"], a["fc1_b"], a["fc2_w"], a["fc2_b"]}, o);
  };
  if (o.has_gradient())
    c.backward = [o](Context& ctx, const Args& a) {
      nsa_gate_backward(ctx, a["dq_group"], {a["dfc1_w"], a["dfc1_b"], a["dfc2_w"], a["dfc2_b"]}, a["dgate"], a["gate"],
                        a["q"], {a["fc1_w"], a["fc1_b"], a["fc2_w"], a["fc2_b"]}, o);
      if (const Tensor dq = a["dq"]; !dq.empty()) rope_backward(ctx, dq, dq, a["one"], a["zero"], {}, a["dq_group"]);
    };
  const double groups = static_cast<double>(n.B * n.T * n.Hkv), width = static_cast<double>(n.width);
  const double elements = static_cast<double>(n.B * n.T * n.Hq) * width;
  c.forward_flops = groups * width * width;
  c.backward_flops = 3 * c.forward_flops;
  c.forward_bytes = 2 * elements + 12 * groups, c.forward_written = 12 * groups;
  c.backward_bytes = 2 * elements + groups * (4 * width + 24), c.backward_written = 4 * groups * width;
  return c;
}

// Backward recomputes out and writes |dout|, dgate and, into scratch, delta, which the branches' cases cover.
OpCase combine_case(std::string name, const GateSizes& n, int64_t row_pad = 0) {
  OpCase c{.op = "nsa_gate", .name = std::move(name)};
  const Shape heads = {n.B, n.T, n.Hq, n.width};
  c.args = {{.name = "o_cmp", .role = ArgRole::constant, .shape = heads, .row_pad = row_pad},
            {.name = "o_sel", .role = ArgRole::constant, .shape = heads, .row_pad = row_pad},
            {.name = "o_win", .role = ArgRole::constant, .shape = heads, .row_pad = row_pad},
            {.name = "gate", .role = ArgRole::input, .shape = {3, n.B, n.T, n.Hkv}, .type = ArgType::acc},
            {.name = "out", .role = ArgRole::output, .shape = heads},
            {.name = "out again", .role = ArgRole::saved, .shape = heads, .row_pad = row_pad},
            {.name = "dout norm", .role = ArgRole::saved, .shape = {n.B, n.T, n.Hq}, .type = ArgType::acc}};
  c.forward = [](Context& ctx, const Args& a) {
    nsa_combine_forward(ctx, a["out"], {a["o_cmp"], a["o_sel"], a["o_win"]}, a["gate"]);
  };
  c.backward = [](Context& ctx, const Args& a) {
    Scratch::Scope scope(ctx.scratch);
    const Tensor out = a["out"], gate = a["gate"];
    const Tensor delta = scope.alloc(gate.dtype, {3, out.size(0), out.size(1), out.size(2)});
    nsa_combine_backward(ctx, a["dgate"], delta, a["dout"], {a["o_cmp"], a["o_sel"], a["o_win"]}, gate, a["out again"],
                         a["dout norm"]);
  };
  const double rows = static_cast<double>(n.B * n.T * n.Hq), elements = rows * static_cast<double>(n.width);
  const double gates = 3.0 * static_cast<double>(n.B * n.T * n.Hkv);
  c.forward_flops = 6 * elements, c.backward_flops = 6 * elements;
  c.forward_bytes = 8 * elements + 4 * gates, c.forward_written = 2 * elements;
  c.backward_bytes = 10 * elements + 8 * gates + 16 * rows;
  c.backward_written = 2 * elements + 4 * gates + 16 * rows;
  return c;
}

}  // namespace

std::vector<OpCase> gate_cases() {
  std::vector<OpCase> cases = {
      gate_case("softmax_1x1", {1, 1, 2, 1, 4}, {}),
      gate_case("softmax_2x33_strided", {2, 33, 6, 2, 64}, {.temperature = 0.7}, 8),
      gate_case("sigmoid_2x33", {2, 33, 4, 4, 32}, {.kind = GateKind::sigmoid, .temperature = 2}),
      gate_case("softmax_65_G16", {1, 65, 16, 1, 60}, {}),
      gate_case("softmax_31_192", {1, 31, 2, 1, 192}, {}),
      gate_case("softmax_3x85", {3, 85, 12, 2, 64}, {}),
      gate_case("softmax_2x47_groups3", {2, 47, 12, 3, 64}, {}),
      gate_case("sigmoid_300_128", {1, 300, 16, 1, 128}, {.kind = GateKind::sigmoid, .temperature = 0.6}, 8),
      gate_case("force_sel", {1, 9, 4, 2, 8}, {.force = Branch::sel}),
      gate_case("uniform", {1, 9, 4, 2, 8}, {.uniform = true}),
      small_card_case(gate_case("softmax_2x31_250", {2, 31, 6, 2, 250}, {})),  // fc1 in global memory
      combine_case("combine_1x1", {1, 1, 1, 1, 4}),
      combine_case("combine_2x33_strided", {2, 33, 6, 2, 64}, 8),
      combine_case("combine_65_100", {1, 65, 16, 1, 100}),
      combine_case("combine_2x67_128", {2, 67, 20, 2, 128}),
      gate_case("m7c", {16, 2048, 12, 2, 64}, {}, 0, true),
      gate_case("m7c_64k", {1, 65536, 12, 2, 64}, {}, 0, true),
      gate_case("16384_d128", {1, 16384, 64, 4, 128}, {}, 0, true),
      combine_case("combine_m7c", {16, 2048, 12, 2, 64}),
  };
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
