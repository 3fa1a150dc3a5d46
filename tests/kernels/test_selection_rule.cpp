// Compares SelectionRule, which the CPU, the GPU and decoding share, with the rule written out block by block.
#include <cstdint>
#include <set>

#include "kernels/nsa/selection_rule.h"
#include "tests/support/test.h"

using namespace triad;

namespace {

void check_rule(int64_t t, int64_t l_sel, int64_t n_sel, int64_t init_blocks, int64_t local_blocks) {
  INFO("token " << t << ", l' " << l_sel << ", n " << n_sel << ", init " << init_blocks << ", local " << local_blocks);
  const int64_t current = t / l_sel;
  std::set<int64_t> forced, candidates;
  for (int64_t j = 0; j <= current; ++j) {
    if (j < init_blocks || current - j < local_blocks)
      forced.insert(j);
    else if ((j + 1) * l_sel <= t + 1)
      candidates.insert(j);
  }
  const SelectionRule<int64_t> rule(t, l_sel, n_sel, init_blocks, local_blocks);
  std::set<int64_t> rule_forced, rule_candidates;
  for (int64_t j = 0; j <= current; ++j)
    if (rule.is_forced(j)) rule_forced.insert(j);
  for (int64_t j = rule.init_end; j < rule.candidate_end; ++j) rule_candidates.insert(j);
  CHECK(rule_forced == forced);
  CHECK(rule_candidates == candidates);
  CHECK(rule.current == current);
  CHECK(rule.slots == n_sel - static_cast<int64_t>(forced.size()));
  CHECK(rule.lists_all() == (static_cast<int64_t>(candidates.size()) <= rule.slots));
}

}  // namespace

TEST_CASE("the selection rule: forced blocks, candidates and slots of every token") {
  for (const int64_t l_sel : {1, 3, 8})
    for (const int64_t init_blocks : {0, 1, 3})
      for (const int64_t local_blocks : {1, 2, 4})
        for (int64_t n_sel = init_blocks + local_blocks; n_sel <= init_blocks + local_blocks + 2; ++n_sel)
          for (int64_t t = 0; t < 12 * l_sel; ++t) check_rule(t, l_sel, n_sel, init_blocks, local_blocks);
}
