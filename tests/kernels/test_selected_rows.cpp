// The selected branch's forward on a GPU: the bits of a row do not depend on other rows, even if the scores of these
// are so large that the kernel has to compute their powers again.
#include <cmath>

#include "kernels/nsa/attend_selected.h"
#include "kernels/nsa/nsa_cases.h"
#include "tests/support/nsa_problem.h"

namespace {

using namespace triad;
using namespace triad::test;

constexpr int64_t kBlockTokens = 64;

struct Case {
  Sizes n;
  int64_t n_sel;
  KernelChoice kernel = KernelChoice::automatic;
};

// o and lse of one sequence, [T,Hq,dv] and [T,Hq], bf16.
struct Rows {
  Values o, lse;
};

Rows forward(const Case& c, const Values& q, const Values& lists) {
  Lab lab(Setting{Device::cuda(), DType::bf16});
  KernelChoices choices;
  choices.sel = c.kernel;
  lab.ctx().routes = Routes(choices);
  const Sizes& n = c.n;
  const Shape keys = {1, n.T, n.Hkv, n.dk}, values = {1, n.T, n.Hkv, n.dv};
  const AttendIn in{lab.from(q, {1, n.T, n.Hq(), n.dk}, DType::bf16),
                    lab.from(random_values(keys.numel(), 1), keys, DType::bf16),
                    lab.from(random_values(values.numel(), 2), values, DType::bf16)};
  const AttendOut out{lab.poisoned({1, n.T, n.Hq(), n.dv}, DType::bf16), lab.poisoned({1, n.T, n.Hq()}, DType::f32)};
  nsa_attend_selected_forward(lab.ctx(), out, in, lab.from(lists, {1, n.T, n.Hkv, c.n_sel}, DType::i32), kBlockTokens);
  return {lab.values(out.o), lab.values(out.lse)};
}

Values queries(const Case& c) { return random_values(c.n.T * c.n.Hq() * c.n.dk, 3); }
Values random_lists(const Case& c) { return random_block_lists(4, 1, c.n.T, c.n.Hkv, c.n_sel, kBlockTokens); }

// Scores of queries that are kPeak times as large deviate by 58 powers of two. In some rows, scores of a later block
// then exceed those of the first one by so many powers of two that resident rows compute the powers again.
constexpr double kPeak = 40;

}  // namespace

TEST_CASE("the selected branch: a row's bits do not depend on other rows (GPU)", "[nsa][gpu]") {
  if (!require_gpu()) return;
  for (const Case& c : {Case{{600, 1, 4, 64, 64}, 5, KernelChoice::candidate},
                        {{600, 1, 4, 64, 64}, 5},
                        {{9301, 1, 1, 64, 64}, 16},
                        {{500, 1, 16, 128, 128}, 4}}) {
    INFO(c.n.str());
    const Values plain = queries(c), lists = random_lists(c);
    const auto peaked = [](int64_t token) { return token % 3 == 0; };
    const int64_t row = c.n.Hq() * c.n.dk;
    Values q = plain;
    for (size_t i = 0; i < q.size(); ++i)
      if (peaked(static_cast<int64_t>(i) / row)) q[i] *= kPeak;
    const Rows before = forward(c, plain, lists), after = forward(c, q, lists);
    const auto same = [&](const Values& a, const Values& b) {
      const int64_t of_token = static_cast<int64_t>(a.size()) / c.n.T;
      bool result = a.size() == b.size();
      for (size_t i = 0; i < a.size(); ++i)
        if (!peaked(static_cast<int64_t>(i) / of_token)) result = result && a[i] == b[i] && std::isfinite(a[i]);
      return result;
    };
    CHECK(same(before.o, after.o));
    CHECK(same(before.lse, after.lse));
    CHECK(before.o != after.o);
  }
}
