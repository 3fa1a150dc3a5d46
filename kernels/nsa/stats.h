// Health statistics of NSA's gates and block lists, summed over the rows (token, group) of a layer (log.stats).
//   gates: p_b = gate_b / (gate_cmp + gate_sel + gate_win), the identity for softmax gates. Their entropy is
//          -sum_b p_b ln p_b, at most ln 3. A row is collapsed if its entropy is below 0.1 (its largest p is then above
//          0.97). A row whose gates are all 0 is dead: it passes no branch and gets no gradient that could reopen a
//          gate. Dead rows have no p and no entropy; they are excluded from all other gate statistics.
//   lists: tokens of a row: the tokens s <= t in its listed blocks. A listed block is forced if it is an initial or a
//          local one, and shared if the list of the previous token contains it too.
// A separate kernel computes them, from gates and lists that are still in L2: a list is compared with its neighbour's,
// which another CTA wrote, and the gate and selection kernels need all their registers.
#pragma once
#include <limits>

#include "kernels/nsa/select.h"

namespace triad {

// Sums, extremes and counts over any number of rows; all 0 over no rows. Counts are exact. A NaN in one row makes the
// sums and extremes of that field NaN, regardless of the order in which rows are merged.
struct NsaStats {
  enum Field : int64_t {
    rows,
    dead,     // rows
    entropy,  // sum over the live (not dead) rows, like the gate fields below
    entropy_min,
    largest,  // sum of the largest p
    largest_max,
    collapsed,           // rows
    share,               // sums of p of the three branches, in the order of Branch
    tokens = share + 3,  // selected tokens; from here on sums over all rows
    tokens_max,
    at_max,     // rows that have tokens_max
    blocks,     // listed blocks
    forced,     // forced ones among them
    followers,  // listed blocks of the rows with t > 0
    shared,     // shared ones among them
    count
  };
  static constexpr double kCollapsedEntropy = 0.1;
  double at[count] = {};

  constexpr double live() const { return at[rows] - at[dead]; }
  constexpr double mean(int64_t field) const { return at[field] / at[rows]; }  // for `dead` and the list fields
  // For the other gate fields; NaN if no row is live.
  constexpr double gate_mean(int64_t field) const {
    return live() > 0 ? at[field] / live() : std::numeric_limits<double>::quiet_NaN();
  }
  constexpr double gate_extreme(int64_t field) const {
    return live() > 0 ? at[field] : std::numeric_limits<double>::quiet_NaN();
  }
  constexpr double forced_share() const { return at[forced] / at[blocks]; }
  constexpr double overlap() const { return at[shared] / at[followers]; }  // NaN if no row has t > 0

  constexpr void add_gates(double cmp, double sel, double win, double its_entropy) {
    const double its_largest = greater(greater(cmp, sel), win);
    at[entropy_min] = live() == 0 ? its_entropy : lesser(at[entropy_min], its_entropy);
    at[largest_max] = live() == 0 ? its_largest : greater(at[largest_max], its_largest);
    at[rows] += 1, at[entropy] += its_entropy, at[largest] += its_largest;
    at[collapsed] += its_entropy < kCollapsedEntropy;
    at[share] += cmp, at[share + 1] += sel, at[share + 2] += win;
  }
  constexpr void add_dead_gates() { at[rows] += 1, at[dead] += 1; }
  // list [n] of token t, before [n]: the list of token t - 1, nullptr for t = 0.
  constexpr void add_list(const int32_t* list, const int32_t* before, int64_t t, int64_t n, const SelectOptions& o) {
    const auto rule = o.rule(t);
    int64_t its_tokens = 0, its_blocks = 0, its_forced = 0, its_shared = 0, j = 0;
    for (; its_blocks < n && list[its_blocks] >= 0; ++its_blocks) {
      const int64_t block = list[its_blocks], begin = block * o.l_sel, end = begin + o.l_sel;
      if (begin <= t) its_tokens += (end <= t + 1 ? end : t + 1) - begin;
      its_forced += rule.is_forced(block);
      if (before == nullptr) continue;
      while (j < n && before[j] >= 0 && before[j] < block) ++j;  // both lists ascend
      its_shared += j < n && before[j] == block;
    }
    at[tokens] += static_cast<double>(its_tokens);
    add_most(static_cast<double>(its_tokens), 1);
    at[blocks] += static_cast<double>(its_blocks), at[forced] += static_cast<double>(its_forced);
    if (before == nullptr) return;
    at[followers] += static_cast<double>(its_blocks), at[shared] += static_cast<double>(its_shared);
  }
  constexpr void merge(const NsaStats& other) {
    if (other.at[rows] == 0) return;
    double least = at[entropy_min], most = at[largest_max];
    if (other.live() > 0) {
      least = live() == 0 ? other.at[entropy_min] : lesser(least, other.at[entropy_min]);
      most = live() == 0 ? other.at[largest_max] : greater(most, other.at[largest_max]);
    }
    const double tokens_before = at[tokens_max], rows_before = at[at_max];
    for (int64_t i = 0; i < count; ++i) at[i] += other.at[i];
    at[entropy_min] = least, at[largest_max] = most;
    at[tokens_max] = tokens_before, at[at_max] = rows_before;
    add_most(other.at[tokens_max], other.at[at_max]);
  }

 private:
  // NaN if either operand is.
  static constexpr double lesser(double a, double b) { return a < b || a != a ? a : b; }
  static constexpr double greater(double a, double b) { return a > b || a != a ? a : b; }
  constexpr void add_most(double its_tokens, double its_rows) {
    if (its_tokens > at[tokens_max]) at[tokens_max] = its_tokens, at[at_max] = 0;
    if (its_tokens == at[tokens_max]) at[at_max] += its_rows;
  }
};
static_assert(sizeof(NsaStats) == NsaStats::count * sizeof(double));  // tensors store it as `count` f64

// Rows are summed in this fixed number of pieces, so that the sums have the same bits in every run.
inline constexpr int64_t kStatsPieces = 256;

// pieces [kStatsPieces, NsaStats::count] f64: the rows are merged into them; zeros before the first call
//   <-  gate [3,B,T,Hkv] acc, block_index [B,T,Hkv,n] i32, both contiguous
void nsa_stats(Context&, Tensor pieces, ConstTensor gate, ConstTensor block_index, const SelectOptions&);
// out [L, NsaStats::count] f64 overwritten  <-  pieces [L, kStatsPieces, NsaStats::count] f64: each layer's pieces,
// merged
void nsa_stats_merge(Context&, Tensor out, ConstTensor pieces);

namespace cuda {
void nsa_stats(Context&, Tensor pieces, ConstTensor gate, ConstTensor block_index, const SelectOptions&);
void nsa_stats_merge(Context&, Tensor out, ConstTensor pieces);
}  // namespace cuda
}  // namespace triad
