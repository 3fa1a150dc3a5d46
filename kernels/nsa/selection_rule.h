// NSA's selection rule (select.h): which blocks a token's list always contains (forced blocks), and among which blocks
// the scores choose (candidates). For host and device, in any integer type.
#pragma once

namespace triad {

// The rule for a token at position t in its document, whose own block is `current` = t / l_sel. The list contains the
// forced blocks [0, init_end) and [local_begin, current], and at most `slots` candidates from [init_end,
// candidate_end), which are complete blocks: (j + 1) * l_sel <= t + 1.
template <class Int>
struct SelectionRule {
  Int current, init_end, local_begin, candidate_end, slots;

  constexpr SelectionRule(Int t, Int l_sel, Int n_sel, Int init_blocks, Int local_blocks)
      : current(t / l_sel),
        init_end(least(init_blocks, current + 1)),
        local_begin(most(init_end, current - local_blocks + 1)),
        candidate_end(most(init_end, least((t + 1) / l_sel, local_begin))),
        slots(most(0, n_sel - init_end - (current + 1 - local_begin))) {}

  constexpr bool is_forced(Int block) const { return block < init_end || block >= local_begin; }
  constexpr Int candidates() const { return candidate_end - init_end; }
  // Whether the list has room for all candidates, so that no scores are needed.
  constexpr bool lists_all() const { return candidates() <= slots; }

 private:
  static constexpr Int least(Int a, Int b) { return b < a ? b : a; }
  static constexpr Int most(Int a, Int b) { return a < b ? b : a; }
};

}  // namespace triad
