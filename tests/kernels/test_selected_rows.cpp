// The selected branch's forward on a GPU. The test changes every third token's query and block list. All other outputs
// must keep their bits. The changed queries are so large that the softmax's exponentials overflow in some rows, which
// the kernels then compute again.
#include <cmath>
#include <numbers>

#include "kernels/nsa/attend_selected.h"
#include "kernels/nsa/cases/nsa_cases.h"
#include "tests/support/nsa_problem.h"

namespace {

using namespace triad;
using namespace triad::test;

constexpr int64_t kBlockTokens = 64;

struct Case {
  Sizes n;
  int64_t n_sel;
  std::string kernel;  // that a Hopper card has to choose
  KernelChoice wanted = KernelChoice::automatic;
  bool lists_change = true;
  double factor = 40;  // factor on the queries that the test changes
};

// one sequence's o and lse, [T,Hq,dv] and [T,Hq], and the kernel that computed them.
struct Result {
  Values o, lse;
  std::string kernel;
};

Shape key_shape(const Case& c) { return {1, c.n.T, c.n.Hkv, c.n.dk}; }
Values keys(const Case& c) { return random_values(key_shape(c).numel(), 1); }
Values lists(const Case& c, uint64_t seed) {
  return random_block_lists(seed, 1, c.n.T, c.n.Hkv, c.n_sel, kBlockTokens);
}

Result forward(const Case& c, const Values& q, const Values& block_index) {
  Lab lab(Setting{Device::cuda(), DType::bf16});
  KernelChoices choices;
  choices.sel = c.wanted;
  lab.ctx().routes = Routes(choices);
  const Sizes& n = c.n;
  const Shape values = {1, n.T, n.Hkv, n.dv};
  const AttendIn in{lab.from(q, {1, n.T, n.Hq(), n.dk}, DType::bf16), lab.from(keys(c), key_shape(c), DType::bf16),
                    lab.from(random_values(values.numel(), 2), values, DType::bf16)};
  const AttendOut out{lab.poisoned({1, n.T, n.Hq(), n.dv}, DType::bf16), lab.poisoned({1, n.T, n.Hq()}, DType::f32)};
  nsa_attend_selected_forward(lab.ctx(), out, in, lab.from(block_index, {1, n.T, n.Hkv, c.n_sel}, DType::i32),
                              kBlockTokens);
  return {lab.values(out.o), lab.values(out.lse), lab.ctx().routes.counts().back().kernel};
}

// Whether the test changes this token's query and list.
bool changes(int64_t token) { return token % 3 == 0; }

// Returns log2(e) times the largest score between token t's first head and the block's keys. q: [T,Hq,dk].
double largest_power(const Case& c, const Values& q, const Values& k, int64_t t, int64_t block) {
  double largest = -INFINITY;
  for (int64_t key = block * kBlockTokens; key < (block + 1) * kBlockTokens && key <= t; ++key) {
    double s = 0;
    for (int64_t i = 0; i < c.n.dk; ++i)
      s += q[static_cast<size_t>(t * c.n.Hq() * c.n.dk + i)] * k[static_cast<size_t>(key * c.n.Hkv * c.n.dk + i)];
    largest = std::max(largest, s / std::sqrt(static_cast<double>(c.n.dk)) * std::numbers::log2e);
  }
  return largest;
}

// Counts the tokens whose first head has to be computed again because exponentials overflow. The kernels do that if
// exponentials, relative to the first listed block's largest, exceed 2^60. Here the limit is 2^70, since scores are not
// rounded as on the GPU.
int64_t overflowing_rows(const Case& c, const Values& q, const Values& block_index) {
  const Values k = keys(c);
  int64_t count = 0;
  for (int64_t t = 0; t < c.n.T; ++t) {
    const double* const list = block_index.data() + t * c.n.Hkv * c.n_sel;
    const double first = largest_power(c, q, k, t, static_cast<int64_t>(list[0]));
    bool overflows = false;
    for (int64_t i = 1; i < c.n_sel && list[i] >= 0; ++i)
      overflows = overflows || largest_power(c, q, k, t, static_cast<int64_t>(list[i])) > first + 70;
    count += overflows ? 1 : 0;
  }
  return count;
}

}  // namespace

TEST_CASE("the selected branch: a row's bits do not depend on other rows (GPU)", "[nsa][gpu]") {
  if (!require_gpu()) return;
  // The last case keeps its lists. The query-stationary kernel computes a block by wgmma or by mma.sync, depending on
  // neighbouring tokens' lists; whether both give the same bits isn't tested here. With queries multiplied by 10^12, a
  // row's exponentials exceed 2^60 even when the kernel computes them again, relative to the row's largest score. The
  // kernel must still end. The changed tokens' outputs may be NaN; all others must keep their bits.
  for (const Case& c : {Case{{600, 1, 4, 64, 64}, 5, "resident_rows", KernelChoice::candidate},
                        {{600, 1, 4, 64, 64}, 5, "resident_rows", KernelChoice::candidate, true, 1e12},
                        {{600, 1, 4, 128, 128}, 5, "resident_rows", KernelChoice::candidate},
                        {{1000, 2, 1, 64, 64}, 5, "resident_rows", KernelChoice::candidate},
                        {{8300, 1, 2, 64, 64}, 16, "resident_rows"},
                        {{600, 1, 4, 64, 64}, 5, "shared_tile"},
                        {{600, 1, 4, 64, 64}, 5, kGeneralKernel, KernelChoice::general},
                        {{600, 1, 4, 128, 128}, 5, kGeneralKernel, KernelChoice::general},
                        {{16500, 1, 1, 64, 64}, 16, "kv_stationary or shared_tile"},
                        {{500, 1, 16, 128, 128}, 4, "query_stationary", KernelChoice::automatic, false}}) {
    INFO(c.n.str() << ", " << c.kernel);
    const Values q = random_values(c.n.T * c.n.Hq() * c.n.dk, 3), list = lists(c, 4), other = lists(c, 5);
    Values changed_q = q, changed_list = list;
    const int64_t q_size = c.n.Hq() * c.n.dk, list_size = c.n.Hkv * c.n_sel;
    for (size_t i = 0; i < q.size(); ++i)
      if (changes(static_cast<int64_t>(i) / q_size)) changed_q[i] *= c.factor;
    for (size_t i = 0; i < list.size(); ++i)
      if (c.lists_change && changes(static_cast<int64_t>(i) / list_size)) changed_list[i] = other[i];
    REQUIRE(overflowing_rows(c, changed_q, changed_list) > 3);
    const Result before = forward(c, q, list), after = forward(c, changed_q, changed_list);
    if (Lab(Setting{Device::cuda(), DType::bf16}).ctx().may_use_sm90()) {
      CHECK(before.kernel == c.kernel);
      CHECK(after.kernel == c.kernel);
    }
    const auto kept = [&](const Values& a, const Values& b) {
      const int64_t token_size = static_cast<int64_t>(a.size()) / c.n.T;
      bool result = a.size() == b.size();
      for (size_t i = 0; i < a.size(); ++i)
        if (!changes(static_cast<int64_t>(i) / token_size)) result = result && a[i] == b[i] && std::isfinite(a[i]);
      return result;
    };
    CHECK(kept(before.o, after.o));
    CHECK(kept(before.lse, after.lse));
  }
}
