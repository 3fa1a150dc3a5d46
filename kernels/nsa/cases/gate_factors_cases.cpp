// Cases with gates given as factors.
#include "kernels/common/op_case.h"
#include "kernels/nsa/gate_factors.h"

namespace triad {

namespace {

OpCase factors_case(std::string name, int64_t B, int64_t T, int64_t H, ArgType type) {
  OpCase c{.op = "nsa_gate_factors", .name = std::move(name)};
  c.args = {{.name = "factors", .role = ArgRole::input, .shape = {B, T, H, 3}, .type = type, .row_pad = 2},
            {.name = "gate", .role = ArgRole::output, .shape = {3, B, T, H}, .type = ArgType::acc}};
  c.forward = [](Context& ctx, const Args& a) { nsa_gate_factors_forward(ctx, a["gate"], a["factors"]); };
  c.backward = [](Context& ctx, const Args& a) { nsa_gate_factors_backward(ctx, a["dfactors"], a["dgate"]); };
  const double n = static_cast<double>(3 * B * T * H);
  c.forward_bytes = c.backward_bytes = 6 * n, c.forward_written = 4 * n, c.backward_written = 2 * n;
  return c;
}

OpCase no_factors_case() {
  OpCase c{.op = "nsa_gate_factors", .name = "absent"};
  c.args = {{.name = "gate", .role = ArgRole::output, .shape = {3, 2, 7, 3}, .type = ArgType::acc}};
  c.forward = [](Context& ctx, const Args& a) { nsa_gate_factors_forward(ctx, a["gate"], {}); };
  return c;
}

// An nsa_gate_dout case. H: gates per token and branch; Hkv: bounds on them per token and branch. The op computes the
// gradients of the branches' outputs o_b in out = sum_b gate_b * o_b, so it is itself a backward.
OpCase dout_case(std::string name, int64_t B, int64_t T, int64_t Hq, int64_t H, int64_t Hkv, int64_t dv,
                 int64_t row_pad = 0) {
  OpCase c{.op = "nsa_gate_dout", .name = std::move(name)};
  const Shape heads{B, T, Hq, dv};
  c.args = {{.name = "dout", .role = ArgRole::constant, .shape = heads, .row_pad = row_pad},
            {.name = "gate", .role = ArgRole::constant, .shape = {3, B, T, H}, .type = ArgType::acc},
            {.name = "cmp", .role = ArgRole::output, .shape = heads},
            {.name = "sel", .role = ArgRole::output, .shape = heads, .row_pad = row_pad},
            {.name = "win", .role = ArgRole::output, .shape = heads},
            {.name = "bounds", .role = ArgRole::output, .shape = {3, B, T, Hkv}, .type = ArgType::acc}};
  c.forward = [](Context& ctx, const Args& a) {
    nsa_gate_dout(ctx, {a["cmp"], a["sel"], a["win"]}, a["bounds"], a["dout"], a["gate"]);
  };
  const double n = static_cast<double>(heads.numel());
  c.forward_bytes = 8 * n, c.forward_written = 6 * n;
  return c;
}

}  // namespace

std::vector<OpCase> gate_factors_cases() {
  std::vector<OpCase> cases = {
      factors_case("1x1", 1, 1, 1, ArgType::element),
      factors_case("2x33_6", 2, 33, 6, ArgType::element),
      factors_case("300_4_acc", 1, 300, 4, ArgType::acc),
      no_factors_case(),
      dout_case("1x1", 1, 1, 1, 1, 1, 4),
      dout_case("2x33_per_head_strided", 2, 33, 6, 6, 2, 64, 8),
      dout_case("65_per_head_odd", 1, 65, 8, 8, 1, 37),
      dout_case("40_per_group", 1, 40, 12, 2, 2, 128),
      dout_case("8192_per_head_128", 1, 8192, 64, 64, 4, 128),
  };
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
