// Cases for the index that the selected branch or dense attention teaches: forward's output is the index loss, and
// backward's the index gradients. The branch's q, k and v are constants, since the teacher has no gradient.
#include "kernels/common/portable_case.h"
#include "kernels/nsa/attend_selected.h"
#include "kernels/nsa/cases/branch_cases.h"
#include "kernels/nsa/dense_attention.h"

namespace triad {

namespace {

struct IndexSizes {
  AttendSizes branch;
  int64_t di;
  int64_t n_sel = 0, l_sel = 0;  // block lists for the selected branch; 0: dense attention
};

IndexIn index_in(const Args& a) { return {a["iq"], a["ik"]}; }

// Runs the backward of the branch and its index. The branch's gradients go to scratch memory, and so do the index's if
// dik is empty.
void run_backward(Context& ctx, const Args& a, int64_t l_sel, const LossScale& scale, Tensor loss, Tensor dik) {
  Scratch::Scope scope(ctx.scratch);
  const AttendIn in{a["q"], a["k"], a["v"], documents_of(a)};
  const DType acc = a["lse"].dtype;
  const auto like = [&](const char* name, DType dtype) { return scope.alloc(dtype, a[name].shape()); };
  const Tensor dq = like("q", acc), dk = like("k", in.k.dtype), dv = like("v", in.k.dtype), diq = like("iq", acc);
  const Tensor dout = like("o", in.q.dtype);
  zero(ctx, dout);
  IndexBackward index{index_in(a), a["index lse"], diq, dik, loss, scale, a["padding begin"]};
  if (dik.empty()) index.dk = like("ik", in.k.dtype);
  if (l_sel == 0) {
    dense_attention_backward(ctx, {dq, dk, dv}, dout, in, {a["o"], a["lse"]}, &index);
  } else {
    const Tensor delta = like("lse", acc);
    attention_delta(ctx, delta, dout, a["o"]);
    zero(ctx, dq);
    nsa_attend_selected_backward(ctx, {dq, dk, dv}, {dout, {}, delta, a["lse"]}, in, a["block_index"], l_sel, &index);
  }
  if (!dik.empty()) rope_backward(ctx, a["diq"], diq, a["one"], a["zero"]);  // rounds to the case's dtype
}

OpCase index_case(std::string name, const IndexSizes& n, double std = 1.0, int64_t row_pad = 0) {
  const AttendSizes& s = n.branch;
  const Shape angles = {s.T, n.di / 2};
  OpCase c{.op = "nsa_index", .name = std::move(name)};
  c.args = {{.name = "iq", .role = ArgRole::input, .shape = {s.B, s.T, s.Hkv, n.di}, .std = std, .row_pad = row_pad},
            {.name = "ik", .role = ArgRole::input, .shape = {s.B, s.S, 1, n.di}, .std = std, .row_pad = row_pad}};
  for (Arg arg : attend_args(s, 1.0, row_pad)) {
    const bool written = arg.role == ArgRole::output || arg.role == ArgRole::saved;
    arg.role = written ? ArgRole::saved : ArgRole::constant;
    c.args.push_back(std::move(arg));
  }
  c.args.push_back({.name = "index lse", .role = ArgRole::saved, .shape = {s.B, s.T, s.Hkv}, .type = ArgType::acc});
  // The loss's upstream gradient `dloss` is filled like this argument, so it is 0.7.
  c.args.push_back(
      {.name = "loss", .role = ArgRole::output, .shape = {1}, .type = ArgType::f64, .std = 0.0, .mean = 0.7});
  c.args.push_back(
      {.name = "one", .role = ArgRole::constant, .shape = angles, .type = ArgType::acc, .std = 0, .mean = 1});
  c.args.push_back({.name = "zero", .role = ArgRole::constant, .shape = angles, .type = ArgType::acc, .std = 0});
  if (n.l_sel > 0) {
    Arg lists{
        .name = "block_index", .role = ArgRole::constant, .shape = {s.B, s.T, s.Hkv, n.n_sel}, .type = ArgType::i32};
    lists.fill_all = [=](uint64_t seed) { return random_block_lists(seed, s.B, s.T, s.Hkv, n.n_sel, n.l_sel); };
    c.args.push_back(std::move(lists));
  }
  c.forward = [l_sel = n.l_sel](Context& ctx, const Args& a) {
    const AttendIn in{a["q"], a["k"], a["v"], documents_of(a)};
    const IndexForward index{index_in(a), a["index lse"]};
    if (l_sel == 0)
      dense_attention_forward(ctx, {a["o"], a["lse"]}, in, &index);
    else
      nsa_attend_selected_forward(ctx, {a["o"], a["lse"]}, in, a["block_index"], l_sel, nullptr, &index);
    zero(ctx, a["loss"]);
    run_backward(ctx, a, l_sel, 1.0, a["loss"], {});
  };
  c.backward = [l_sel = n.l_sel](Context& ctx, const Args& a) {
    Scratch::Scope scope(ctx.scratch);
    const Tensor loss = scope.alloc(DType::f64, {1});
    zero(ctx, loss);
    run_backward(ctx, a, l_sel, ConstTensor(a["dloss"]), loss, a["dik"]);
  };
  const double pairs = n.l_sel > 0 ? selected_pairs(s.T, n.n_sel, n.l_sel) : window_pairs(s.T, s.T);
  set_attend_costs(c, s, pairs);
  c.differences = s.T * s.Hq < 1024;
  c.cpu = s.B * s.T * s.Hq * (s.dk + s.dv) < 1500000;
  return c;
}

// In sequence b, the rows from token begins[b] on are padding.
OpCase padded(OpCase c, const std::vector<double>& begins) {
  c.name += "_padded";
  c.args.push_back({.name = "padding begin",
                    .role = ArgRole::constant,
                    .shape = {static_cast<int64_t>(begins.size())},
                    .type = ArgType::i32,
                    .fill = [begins](int64_t i, uint64_t) { return begins[static_cast<size_t>(i)]; }});
  return c;
}

}  // namespace

std::vector<OpCase> index_cases() {
  std::vector<OpCase> cases = {
      index_case("sel_2x33_l4_n4", {{2, 33, 33, 4, 2, 8, 8}, 8, 4, 4}),
      index_case("sel_31_l1_n8_di2", {{1, 31, 31, 2, 1, 10, 6}, 2, 8, 1}),
      index_case("sel_63_all_blocks_G6", {{1, 63, 63, 6, 1, 32, 32}, 16, 50, 16}),
      index_case("sel_127_l16_strided", {{1, 127, 127, 4, 2, 64, 64}, 64, 4, 16}, 1.0, 8),
      index_case("sel_90_60x100_di6", {{1, 90, 90, 8, 1, 60, 100}, 6, 6, 8}),
      index_case("sel_40_G20_di200", {{1, 40, 40, 20, 1, 16, 16}, 200, 4, 8}),
      index_case("sel_70_G1_peaked", {{1, 70, 70, 3, 3, 16, 16}, 10, 4, 8}, 4.0),
      padded(index_case("sel_2x33", {{2, 33, 33, 4, 2, 8, 8}, 8, 4, 4}), {20, 33}),
      packed(index_case("sel_docs_33_64_65_127", {{1, 127, 127, 4, 2, 8, 8}, 8, 4, 8}), kMixed, 8),
      packed(index_case("sel_docs_two_rows", {{2, 127, 127, 4, 1, 8, 8}, 4, 3, 8}), kTwoRows, 8),
      index_case("dense_2x31", {{2, 31, 31, 4, 2, 8, 8}, 8}),
      index_case("dense_65_strided", {{1, 65, 65, 4, 2, 64, 64}, 64}, 1.0, 8),
      index_case("dense_90_60x100_di6", {{1, 90, 90, 8, 2, 60, 100}, 6}),
      padded(index_case("dense_2x31", {{2, 31, 31, 4, 2, 8, 8}, 8}), {0, 17}),
      packed(index_case("dense_docs_33_64_65_127", {{1, 127, 127, 4, 2, 8, 8}, 8}), kMixed, 8),
      // Hopper's kernels: 128-key and 64-key blocks, heads 64 and 128 wide, 1 to 16 heads per group, index widths up to
      // 128.
      gpu_sized(index_case("sel_1100_l128_n4_G16_128x128_di64", {{1, 1100, 1100, 32, 2, 128, 128}, 64, 4, 128})),
      gpu_sized(index_case("sel_2x700_l128_n3_G8_128x128_di128", {{2, 700, 700, 16, 2, 128, 128}, 128, 3, 128})),
      gpu_sized(index_case("sel_1000_l64_n4_G6_64x64_di64", {{1, 1000, 1000, 12, 2, 64, 64}, 64, 4, 64})),
      gpu_sized(index_case("sel_900_l128_n4_G1_64x64_di16", {{1, 900, 900, 2, 2, 64, 64}, 16, 4, 128})),
      gpu_sized(index_case("sel_700_l64_n5_G4_128x128_di48", {{1, 700, 700, 4, 1, 128, 128}, 48, 5, 64})),
      padded(gpu_sized(index_case("sel_2x600_l128_n3_G4_64x64", {{2, 600, 600, 8, 2, 64, 64}, 64, 3, 128})),
             {333, 600}),
      gpu_sized(packed(index_case("sel_docs_781_2048_l128_G4_128x128", {{1, 2048, 2048, 4, 1, 128, 128}, 64, 4, 128}),
                       kTwoLong, 128)),
      gpu_sized(index_case("dense_700_G16_128x128_di64", {{1, 700, 700, 32, 2, 128, 128}, 64})),
      gpu_sized(index_case("dense_2x600_G6_64x64_di128", {{2, 600, 600, 12, 2, 64, 64}, 128})),
      gpu_sized(packed(index_case("dense_docs_781_2048_G2_64x64", {{1, 2048, 2048, 2, 1, 64, 64}, 64}), kTwoLong, 128)),
      // The portable kernels, with several work items per block.
      portable_case(
          gpu_sized(index_case("sel_1200_l64_n4_G6_64x64_di64", {{1, 1200, 1200, 12, 2, 64, 64}, 64, 4, 64}))),
      portable_case(gpu_sized(index_case("dense_1100_G16_128x128_di128", {{1, 1100, 1100, 16, 1, 128, 128}, 128}))),
      small_card_case(index_case("sel_70_256x256_di254", {{1, 70, 70, 8, 2, 256, 256}, 254, 4, 16})),
      index_case("sel_8k_n16_l128_G16", {{1, 8192, 8192, 64, 4, 128, 128}, 64, 16, 128}),
  };
  cases.back().bench = true;
  return cases;
}

}  // namespace triad
