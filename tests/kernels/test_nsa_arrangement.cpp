// How NSA's parts are scheduled doesn't change the bits: branches on concurrent streams or one after another, and the
// gated combination in the selected branch's kernel or in its own.
#include <algorithm>
#include <array>
#include <cmath>

#include "tests/support/nsa_problem.h"

namespace {

using namespace triad;
using namespace triad::test;

// Returns all forward outputs and backward gradients, concatenated.
Values all_results(const Setting& setting, const Sizes& n) {
  Problem p(setting, n, config(32, 16, 64, 8, 200));
  Lab& lab = p.lab;
  const DType T = setting.dtype, acc = acc_dtype(T);
  const Tensor dout = lab.from(random_values(p.out.numel(), 99), p.out.shape(), T);
  const NsaIn in{p.q, {p.k[0], p.k[1], p.k[2]}, {p.v[0], p.v[1], p.v[2]}};
  const NsaGrad grad{
      lab.poisoned(p.q.shape(), acc),
      lab.poisoned({1, n.T, n.Hkv, n.dk}, acc),
      {lab.poisoned(p.k[0].shape(), T), lab.poisoned(p.k[0].shape(), T), lab.poisoned(p.k[0].shape(), T)},
      {lab.poisoned(p.v[0].shape(), T), lab.poisoned(p.v[0].shape(), T), lab.poisoned(p.v[0].shape(), T)},
      lab.poisoned(p.out.shape(), T)};
  NsaWeightGrads dw;
  const auto zeros = [&](const ConstTensor& like) {
    return lab.from(Values(static_cast<size_t>(like.numel()), 0.0), like.shape(), acc);
  };
  const GateWeights& gate = p.weights.gate;
  dw.gate = {zeros(gate.fc1_w), zeros(gate.fc1_b), zeros(gate.fc2_w), zeros(gate.fc2_b)};
  p.forward();
  nsa_backward(lab.ctx(), grad, dw, dout, in, p.saved, p.weights, p.c);
  Values all;
  for (const Tensor& t :
       {p.out, p.saved.block_index, p.saved.gate, grad.dq, grad.dq_group, grad.k[0], grad.k[1], grad.k[2], grad.v[0],
        grad.v[1], grad.v[2], grad.out, dw.gate.fc1_w, dw.gate.fc1_b, dw.gate.fc2_w, dw.gate.fc2_b}) {
    const Values values = lab.values(t);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

// Compares concurrent branches with sequential ones. Each shape is long enough for several CTA waves, so the branches
// do overlap on the GPU.
void check_concurrent_branches(const Setting& setting) {
  for (const Sizes& n : {Sizes{3001, 2, 6, 64, 64}, {1031, 2, 16, 128, 128}, {700, 1, 4, 192, 128}}) {
    INFO(n.str() << " " << name_of(setting.dtype));
    Setting sequential = setting;
    sequential.side_streams = false;
    const Values expected = all_results(sequential, n);
    CHECK(std::all_of(expected.begin(), expected.end(), [](double x) { return std::isfinite(x); }));
    for (int run = 0; run < 3; ++run) CHECK(all_results(setting, n) == expected);
  }
}

// Checks that the selected branch's kernel, if it also combines the branches, gives the same bits as
// nsa_combine_forward afterwards. The shapes reach each selected-branch kernel: the query-stationary one; the shared KV
// tile, with up to 32 blocks, where a list is one word of bits, and with more; resident rows; KV-stationary. `alike`:
// neighbouring rows have nearly the same lists.
void check_combined(const Setting& setting) {
  struct Case {
    Sizes n;
    bool alike;
  };
  for (const Case& x : {Case{{1501, 2, 16, 64, 64}, false},
                        {{403, 1, 14, 128, 128}, false},
                        {{1501, 3, 6, 64, 64}, false},
                        {{2301, 1, 6, 64, 64}, false},
                        {{2203, 1, 5, 128, 128}, false},
                        {{301, 2, 6, 192, 128}, false},
                        {{9301, 1, 6, 64, 64}, false},
                        {{9301, 1, 1, 64, 64}, false},
                        {{9301, 1, 1, 64, 64}, true},
                        {{300, 1, 16, 192, 128}, false}}) {
    INFO(x.n.str() << " " << name_of(setting.dtype) << (x.alike ? " lists alike" : ""));
    Problem p(setting, x.n, config(32, 16, 64, 16, 512));
    if (x.alike) {
      Values lists;
      for (int64_t row = 0; row < x.n.T * x.n.Hkv; ++row) {
        const int64_t current = row / x.n.Hkv / p.c.l_sel, past = std::max<int64_t>(current + 1 - p.c.n_sel, 0);
        for (int64_t i = 0; i < p.c.n_sel; ++i)  // block 0 and the last n_sel - 1 blocks
          lists.push_back(static_cast<double>(i > current ? -1 : i == 0 ? 0 : past + i));
      }
      p.lab.assign(p.saved.block_index, lists);
    }
    p.forward(x.alike);
    const std::array<ConstTensor, 3> o{p.saved.o[0], p.saved.o[1], p.saved.o[2]};
    if (setting.dtype == DType::bf16)
      CHECK(nsa_attend_selected_combines(p.lab.ctx(), {p.saved.o[kSel], p.saved.lse[kSel]}, {p.q, p.k[kSel], p.v[kSel]},
                                         p.saved.block_index, p.c.l_sel, {p.out, o[kCmp], o[kWin], p.saved.gate}));
    const Tensor after = p.lab.poisoned(p.out.shape(), setting.dtype);
    nsa_combine_forward(p.lab.ctx(), after, o, p.saved.gate);
    const Values expected = p.lab.values(after);
    CHECK(std::all_of(expected.begin(), expected.end(), [](double v) { return std::isfinite(v); }));
    CHECK(p.lab.values(p.out) == expected);
  }
}

}  // namespace

TEST_CASE("NSA's branches give the same bits concurrently and one after another (GPU)", "[nsa][gpu]") {
  on_gpu(check_concurrent_branches);
}

TEST_CASE("Combining in the selected branch's kernel gives the bits of combining afterwards (GPU)", "[nsa][gpu]") {
  on_gpu(check_combined);
}
