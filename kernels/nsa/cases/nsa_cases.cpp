// Whole NSA cases. The block lists are inputs, because the output is discontinuous where a selection changes.
#include "kernels/nsa/nsa.h"

#include "kernels/common/portable_case.h"
#include "kernels/nsa/cases/document_cases.h"
#include "kernels/ops/rope.h"

namespace triad {

namespace {

struct NsaSizes {
  int64_t B, T, Hq, Hkv, dk, dv;
};
const char* const kBranchNames[] = {"cmp", "sel", "win"};

void add_weight_args(std::vector<Arg>& args, const NsaSizes& n, const NsaConfig& c) {
  auto add = [&](std::string name, Shape shape, double std) {
    args.push_back({.name = std::move(name), .role = ArgRole::param, .shape = shape, .std = std});
  };
  add("fc1_w", {n.dk / 2, n.dk}, 0.3);
  add("fc1_b", {n.dk / 2}, 0.3);
  add("fc2_w", {3, n.dk / 2}, 0.5);
  add("fc2_b", {3}, 0.5);
  for (const auto& [phi, D] : {std::pair<std::string, int64_t>{"phi_k_", n.dk}, {"phi_v_", n.dv}}) {
    if (c.phi == Phi::conv) add(phi + "w", {c.l, D}, 0.3);
    if (c.phi != Phi::mlp) continue;
    add(phi + "pos", {c.l, D}, 0.3);
    add(phi + "fc1", {2 * D, c.l * D}, 0.2);
    add(phi + "fc2", {D, 2 * D}, 0.2);
  }
}

// Returns the weights or their gradients among the arguments. d: the prefix of their names, "" or "d".
template <class Weights>
Weights weights_of(const Args& a, const std::string& d) {
  auto phi = [&](const std::string& p) -> decltype(Weights::phi_k) {
    return {a[d + p + "w"], a[d + p + "pos"], a[d + p + "fc1"], a[d + p + "fc2"]};
  };
  return {phi("phi_k_"), phi("phi_v_"), {a[d + "fc1_w"], a[d + "fc1_b"], a[d + "fc2_w"], a[d + "fc2_b"]}};
}
NsaIn in_of(const Args& a) {
  return {a["q"], {a["k_cmp"], a["k_sel"], a["k_win"]}, {a["v_cmp"], a["v_sel"], a["v_win"]}, documents_of(a)};
}
NsaSaved saved_of(const Args& a) {
  return {a["k_c"],
          a["v_c"],
          a["block_index"],
          a["gate"],
          {a["o_cmp"], a["o_sel"], a["o_win"]},
          {a["lse_cmp"], a["lse_sel"], a["lse_win"]}};
}

OpCase nsa_case(std::string name, const NsaSizes& n, const NsaConfig& c) {
  const int64_t Tc = compressed_length(n.T, c.l, c.d);
  OpCase r{.op = "nsa", .name = std::move(name)};
  r.args = {
      {.name = "q", .role = ArgRole::input, .shape = {n.B, n.T, n.Hq, n.dk}},
      {.name = "out", .role = ArgRole::output, .shape = {n.B, n.T, n.Hq, n.dv}},
      {.name = "out again", .role = ArgRole::saved, .shape = {n.B, n.T, n.Hq, n.dv}},
      {.name = "one", .role = ArgRole::constant, .shape = {n.T, n.dk / 2}, .type = ArgType::acc, .std = 0, .mean = 1},
      {.name = "zero", .role = ArgRole::constant, .shape = {n.T, n.dk / 2}, .type = ArgType::acc, .std = 0},
      {.name = "k_c", .role = ArgRole::saved, .shape = {n.B, Tc, n.Hkv, n.dk}},
      {.name = "v_c", .role = ArgRole::saved, .shape = {n.B, Tc, n.Hkv, n.dv}},
      {.name = "gate", .role = ArgRole::saved, .shape = {3, n.B, n.T, n.Hkv}, .type = ArgType::acc}};
  for (const std::string branch : kBranchNames) {
    r.args.push_back({.name = "k_" + branch, .role = ArgRole::input, .shape = {n.B, n.T, n.Hkv, n.dk}});
    r.args.push_back({.name = "v_" + branch, .role = ArgRole::input, .shape = {n.B, n.T, n.Hkv, n.dv}});
    r.args.push_back({.name = "o_" + branch, .role = ArgRole::saved, .shape = {n.B, n.T, n.Hq, n.dv}});
    r.args.push_back(
        {.name = "lse_" + branch, .role = ArgRole::saved, .shape = {n.B, n.T, n.Hq}, .type = ArgType::acc});
  }
  Arg lists{
      .name = "block_index", .role = ArgRole::constant, .shape = {n.B, n.T, n.Hkv, c.n_sel}, .type = ArgType::i32};
  lists.fill_all = [=](uint64_t seed) { return random_block_lists(seed, n.B, n.T, n.Hkv, c.n_sel, c.l_sel); };
  r.args.push_back(std::move(lists));
  add_weight_args(r.args, n, c);

  r.forward = [c](Context& ctx, const Args& a) {
    nsa_forward(ctx, a["out"], saved_of(a), in_of(a), weights_of<NsaWeights>(a, ""), c, true);
  };
  r.backward = [c](Context& ctx, const Args& a) {
    Scratch::Scope scope(ctx.scratch);
    const Tensor dq = a["dq"];  // case dtype; the op writes two parts, which rope_backward adds
    const DType acc = acc_dtype(dq.dtype);
    const Tensor dq_branches = dq.dtype == acc ? dq : scope.alloc(acc, dq.shape());
    const Tensor dq_group = scope.alloc(acc, Tensor(a["k_cmp"]).shape());
    const NsaGrad grad{dq_branches,
                       dq_group,
                       {a["dk_cmp"], a["dk_sel"], a["dk_win"]},
                       {a["dv_cmp"], a["dv_sel"], a["dv_win"]},
                       a["out again"]};
    nsa_backward(ctx, grad, weights_of<NsaWeightGrads>(a, "d"), a["dout"], in_of(a), saved_of(a),
                 weights_of<NsaWeights>(a, ""), c);
    rope_backward(ctx, dq, dq_branches, a["one"], a["zero"], {}, dq_group);
  };
  AttendSizes costs{n.B, n.T, n.T, n.Hq, n.Hkv, n.dk, n.dv};
  set_attend_costs(r, costs,
                   compressed_pairs(n.T, c.l, c.d) + selected_pairs(n.T, c.n_sel, c.l_sel) + window_pairs(n.T, c.w));
  const double kv = 2.0 * static_cast<double>(n.B * n.T * n.Hkv) * static_cast<double>(n.dk + n.dv);
  r.forward_bytes += 2 * kv, r.backward_bytes += 4 * kv;  // three key-value pairs, not one
  r.differences = n.B * n.T * n.Hq * n.dk < 100'000;      // larger cases, which test GPU routes, would take minutes
  return r;
}

NsaConfig config(int64_t l, int64_t d, int64_t l_sel, int64_t n_sel, int64_t w) {
  NsaConfig c;
  c.l = l, c.d = d, c.l_sel = l_sel, c.n_sel = n_sel, c.w = w;
  return c;
}
NsaConfig small(Phi phi = Phi::avg, const GateOptions& gate = {}) {
  NsaConfig c = config(8, 4, 8, 4, 12);
  c.phi = phi, c.gate = gate;
  return c;
}

std::vector<OpCase> packed_cases() {
  const GateOptions sigmoid{.kind = GateKind::sigmoid};
  std::vector<OpCase> cases;
  const auto add = [&](const char* name, const NsaSizes& n, const NsaConfig& c, const std::vector<int32_t>& bounds) {
    cases.push_back(packed(nsa_case(name, n, c), bounds, c.l_sel));
  };
  add("docs_1_2_3", {1, 3, 2, 1, 8, 8}, small(), kSingleTokens);
  cases.back().gpu_bf16 = false;  // one key each: dk is 0 up to rounding, so no relative error exists
  add("docs_5_14_31_G2_avg", {1, 31, 4, 2, 8, 8}, small(), {0, 5, 14, 15, 31});
  add("docs_5_14_31_G1_conv_sigmoid", {1, 31, 2, 2, 10, 6}, small(Phi::conv, sigmoid), {0, 5, 14, 15, 31});
  add("docs_5_14_31_G4_mlp", {1, 31, 4, 1, 8, 8}, small(Phi::mlp), {0, 5, 14, 15, 31});
  add("docs_33_64_65_127_G4_sigmoid", {1, 127, 4, 1, 8, 8}, small(Phi::avg, sigmoid), kMixed);
  add("docs_two_rows_G6_conv", {2, 31, 6, 1, 8, 8}, small(Phi::conv), {0, 9, 31, 32, 41, 62});
  add("docs_empty_tail_G16", {1, 31, 16, 1, 6, 10}, config(4, 2, 4, 5, 7), {0, 9, 31, 31, 31});
  add("docs_one", {1, 31, 2, 1, 8, 8}, small(), {0, 31});
  add("docs_64_of_4", {1, 256, 1, 1, 8, 8}, config(2, 1, 4, 3, 3), equal_documents(64, 4));
  cases.back().differences = false;  // they would take seconds, and smaller cases cover them
  // GPU routes. On Hopper: backward for head widths 64 and 128, and in two kernels, each with and without the gated sum
  // in the selected branch's epilogue.
  const std::vector<int32_t> four = {0, 130, 131, 250, 333}, rows = {0, 70, 300, 301, 429, 600};
  const size_t first_for_gpu = cases.size();
  add("docs_130_131_250_333_64_G6", {1, 333, 12, 2, 64, 64}, config(32, 16, 64, 3, 70), four);
  add("docs_130_131_250_333_64_G16", {1, 333, 16, 1, 64, 64}, config(16, 8, 32, 4, 100), four);
  add("docs_130_131_250_333_128_G6", {1, 333, 6, 1, 128, 128}, config(32, 16, 64, 3, 70), four);
  add("docs_130_131_250_333_192x128_G6", {1, 333, 6, 1, 192, 128}, config(32, 16, 64, 3, 70), four);
  add("docs_two_rows_128_G16", {2, 300, 16, 1, 128, 128}, config(8, 4, 32, 4, 130), rows);
  add("docs_two_rows_192x128_G1", {2, 300, 2, 2, 192, 128}, config(32, 16, 32, 4, 130), rows);
  add("docs_64_of_32_64_G4", {1, 2048, 4, 1, 64, 64}, config(16, 8, 32, 3, 512), equal_documents(64, 32));
  add("docs_781_2048_64_G2", {1, 2048, 2, 1, 64, 64}, config(32, 16, 64, 6, 200), kTwoLong);
  add("docs_781_2048_128_G1", {1, 2048, 1, 1, 128, 128}, config(32, 16, 64, 6, 200), kTwoLong);
  for (size_t i = first_for_gpu; i < cases.size(); ++i) cases[i].cpu = false;
  return cases;
}

}  // namespace

std::vector<OpCase> nsa_cases() {
  std::vector<OpCase> cases = {
      nsa_case("5_no_block", {1, 5, 2, 1, 8, 8}, small()),
      nsa_case("2x33_avg", {2, 33, 4, 2, 8, 8}, small()),
      nsa_case("50_conv_sigmoid", {1, 50, 6, 1, 10, 6}, small(Phi::conv, {.kind = GateKind::sigmoid})),
      nsa_case("41_mlp", {1, 41, 4, 2, 8, 12}, small(Phi::mlp, {.temperature = 0.5})),
      nsa_case("40_force_sel", {1, 40, 4, 2, 8, 8}, small(Phi::avg, {.force = Branch::sel})),
      nsa_case("40_uniform", {1, 40, 4, 4, 8, 8}, small(Phi::conv, {.uniform = true})),
      nsa_case("24_all_ones", {1, 24, 2, 1, 16, 16}, config(1, 1, 1, 24, 24)),
      nsa_case("127_m7c_heads", {1, 127, 12, 2, 64, 64}, config(32, 16, 32, 3, 48)),
      nsa_case("2x200_64_G1", {2, 200, 2, 2, 64, 64}, config(8, 4, 64, 2, 70)),
      nsa_case("70_64_G16", {1, 70, 16, 1, 64, 64}, config(16, 8, 16, 4, 1000)),
      nsa_case("70_128_wide_G16", {1, 70, 16, 1, 128, 128}, config(16, 8, 16, 4, 50)),
      nsa_case("2x333_128_wide", {2, 333, 12, 2, 128, 128}, config(32, 16, 32, 4, 100)),
      nsa_case("270_128_wide_G16", {1, 270, 32, 2, 128, 128}, config(8, 4, 64, 3, 130)),
      // Shapes at which Hopper's selected branch computes the gated sum in its epilogue.
      nsa_case("2x150_64_G6", {2, 150, 12, 2, 64, 64}, config(32, 16, 64, 2, 70)),
      nsa_case("140_128_G6", {1, 140, 6, 1, 128, 128}, config(32, 16, 64, 2, 70)),
      nsa_case("140_192x128_G6", {1, 140, 6, 1, 192, 128}, config(32, 16, 64, 2, 70)),
      nsa_case("m7c", {16, 2048, 12, 2, 64, 64}, NsaConfig{}),
  };
  cases.back().bench = true;
  for (OpCase& c : cases)
    if (c.name == "2x333_128_wide" || c.name == "270_128_wide_G16") c.cpu = false;
  for (OpCase& c : packed_cases()) cases.push_back(std::move(c));
  // The portable kernel that computes dq, dk and dv together runs these cases, whole rows and packed ones. In some a
  // block has several pieces: equally long in the compressed branch, cut from the tokens that list the block in the
  // selected branch, from the rows that see it in the window branch.
  cases.push_back(portable_case(nsa_case("2x150_64_G6", {2, 150, 12, 2, 64, 64}, config(32, 16, 64, 2, 70))));
  cases.push_back(portable_case(nsa_case("1700_64_G3", {1, 1700, 6, 2, 64, 64}, config(32, 16, 64, 5, 300))));
  cases.push_back(portable_case(nsa_case("900_128_G5", {1, 900, 5, 1, 128, 128}, config(32, 16, 64, 4, 200))));
  cases.push_back(portable_case(
      packed(nsa_case("docs_781_2048_64_G2", {1, 2048, 2, 1, 64, 64}, config(32, 16, 64, 6, 200)), kTwoLong, 64)));
  cases.push_back(
      portable_case(packed(nsa_case("docs_two_rows_128_G16", {2, 300, 16, 1, 128, 128}, config(8, 4, 32, 4, 130)),
                           {0, 70, 300, 301, 429, 600}, 32)));
  // The compressed branch has 1,049 keys: enough for WideTile, on cards that have the shared memory.
  cases.push_back(portable_case(nsa_case("2100_64_d2_G2", {1, 2100, 4, 2, 64, 64}, config(4, 2, 64, 4, 100))));
  // Of these three cases, the first has listed blocks as long as two key tiles, the second has 8-key blocks, where a
  // warp has 16, and the third one has no compressed block.
  cases.push_back(portable_case(nsa_case("600_64_l128_G2", {1, 600, 2, 1, 64, 64}, config(32, 16, 128, 3, 100))));
  cases.push_back(portable_case(nsa_case("300_64_l8_G4", {1, 300, 4, 1, 64, 64}, config(8, 4, 8, 5, 50))));
  cases.push_back(portable_case(nsa_case("20_64_no_block", {1, 20, 2, 1, 64, 64}, config(32, 16, 64, 2, 8))));
  // Two branches' gates are 0, and the kernels replace their rows' statistics.
  NsaConfig selected_alone = config(32, 16, 64, 3, 100);
  selected_alone.gate.force = Branch::sel;
  cases.push_back(portable_case(nsa_case("300_64_G4_force_sel", {1, 300, 4, 1, 64, 64}, selected_alone)));
  cases.push_back(small_card_case(nsa_case("333_64_G4", {1, 333, 8, 2, 64, 64}, config(32, 16, 64, 3, 100))));
  cases.push_back(small_card_case(nsa_case("333_128_G6", {1, 333, 12, 2, 128, 128}, config(32, 16, 64, 3, 100))));
  return cases;
}

}  // namespace triad
