// Health statistics for NSA's gates and block lists (log.stats), summed over a layer's rows. A row is one token and
// group.
//   gates: p_b = gate_b / (gate_cmp + gate_sel + gate_win), the identity for softmax gates. Their entropy is
//          -sum_b p_b ln p_b, at most ln 3. A row is collapsed if its entropy is below 0.1 (its largest p is then above
//          0.97). A row whose gates are all 0 is dead: it passes no branch and gets no gradient that could reopen a
//          gate. Dead rows have no p and no entropy; they are excluded from all other gate statistics.
//   lists: a row's tokens are the tokens s <= t in its listed blocks. A listed block is forced if it is an initial or a
//          local one, and shared if the previous token's list contains it too.
// On the GPU a separate kernel computes the statistics, while gates and lists are still in L2. The gate and selection
// kernels cannot: a list is compared with the previous token's, which another CTA writes, and they have no registers to
// spare.
#pragma once
#include <limits>

#include "kernels/nsa/select.h"

namespace triad {

// Statistics over any number of rows: sums, extremes and counts; all are 0 for no rows. Counts are exact. A NaN in one
// row makes that field's sum or extreme NaN, in whichever order rows are merged.
struct NsaStats {
  enum Field : int64_t {
    rows,                // row count
    dead,                // dead row count
    entropy,             // entropy sum; this and the next fields up to `share` are over the rows not dead
    entropy_min,         // the least entropy
    largest,             // largest p, summed over rows
    largest_max,         // the greatest p
    collapsed,           // collapsed row count
    share,               // sums of p, one per branch, in Branch order
    tokens = share + 3,  // tokens in each row's list, summed; this and the next fields are over all rows
    tokens_max,          // the most tokens in a row's list
    at_max,              // rows that have tokens_max
    blocks,              // listed blocks
    forced,              // forced blocks among `blocks`
    followers,           // listed blocks in rows with a previous token in their document
    shared,              // shared blocks among `followers`
    count                // field count
  };
  static constexpr double kCollapsedEntropy = 0.1;
  double at[count] = {};

  // Rows that are not dead.
  constexpr double live() const { return at[rows] - at[dead]; }
  // A field's mean over all rows: for `dead` and the list fields.
  constexpr double mean(int64_t field) const { return at[field] / at[rows]; }
  // A field's mean or extreme over the rows that are not dead, NaN if all are: for the other gate fields.
  constexpr double gate_mean(int64_t field) const {
    return live() > 0 ? at[field] / live() : std::numeric_limits<double>::quiet_NaN();
  }
  constexpr double gate_extreme(int64_t field) const {
    return live() > 0 ? at[field] : std::numeric_limits<double>::quiet_NaN();
  }
  // The forced blocks' share among all listed blocks.
  constexpr double forced_share() const { return at[forced] / at[blocks]; }
  // The fraction of listed blocks that the previous token lists too, in rows that have one; NaN if there is no such
  // row.
  constexpr double overlap() const { return at[shared] / at[followers]; }

  // Adds a row that is not dead. cmp, sel, win: the row's p, one per branch; row_entropy: their entropy.
  constexpr void add_gates(double cmp, double sel, double win, double row_entropy) {
    const double row_largest = greater(greater(cmp, sel), win);
    at[entropy_min] = live() == 0 ? row_entropy : lesser(at[entropy_min], row_entropy);
    at[largest_max] = live() == 0 ? row_largest : greater(at[largest_max], row_largest);
    at[rows] += 1, at[entropy] += row_entropy, at[largest] += row_largest;
    at[collapsed] += row_entropy < kCollapsedEntropy;
    at[share] += cmp, at[share + 1] += sel, at[share + 2] += win;
  }
  constexpr void add_dead_gates() { at[rows] += 1, at[dead] += 1; }  // also for a row without gates
  // Adds the list [n] of a row whose token is at position t of its document. before [n] is the previous token's list,
  // nullptr for t = 0; first_block is the id of the document's first block.
  constexpr void add_list(const int32_t* list, const int32_t* before, int64_t t, int64_t n, const SelectOptions& o,
                          int64_t first_block = 0) {
    const auto rule = o.rule(t);
    int64_t row_tokens = 0, list_blocks = 0, list_forced = 0, list_shared = 0, j = 0;
    for (; list_blocks < n && list[list_blocks] >= 0; ++list_blocks) {
      const int64_t id = list[list_blocks], block = id - first_block, begin = block * o.l_sel, end = begin + o.l_sel;
      if (begin <= t) row_tokens += (end <= t + 1 ? end : t + 1) - begin;
      list_forced += rule.is_forced(block);
      if (before == nullptr) continue;
      while (j < n && before[j] >= 0 && before[j] < id) ++j;  // both lists ascend
      list_shared += j < n && before[j] == id;
    }
    at[tokens] += static_cast<double>(row_tokens);
    add_most(static_cast<double>(row_tokens), 1);
    at[blocks] += static_cast<double>(list_blocks), at[forced] += static_cast<double>(list_forced);
    if (before == nullptr) return;
    at[followers] += static_cast<double>(list_blocks), at[shared] += static_cast<double>(list_shared);
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
  // min and max, but NaN if either number is NaN.
  static constexpr double lesser(double a, double b) { return a < b || a != a ? a : b; }
  static constexpr double greater(double a, double b) { return a > b || a != a ? a : b; }
  // Updates tokens_max and at_max with row_count rows that have row_tokens tokens each.
  constexpr void add_most(double row_tokens, double row_count) {
    if (row_tokens > at[tokens_max]) at[tokens_max] = row_tokens, at[at_max] = 0;
    if (row_tokens == at[tokens_max]) at[at_max] += row_count;
  }
};
static_assert(sizeof(NsaStats) == NsaStats::count * sizeof(double));  // tensors store it as `count` f64

// Rows are summed in this fixed number of pieces, so the sums have the same bits in every run.
inline constexpr int64_t kStatsPieces = 256;

// Adds the rows of a layer to pieces [kStatsPieces, NsaStats::count] f64, which have to be zeros before the first call
//   <-  gate [3,B,T,Hkv] acc, or absent: attention without gates; block_index [B,T,Hkv,n] i32; both contiguous
// With documents.part, the first rows of each run of tokens have no previous token.
void nsa_stats(Context&, Tensor pieces, ConstTensor gate, ConstTensor block_index, const SelectOptions&,
               const Documents& documents = {});
// Merges the pieces of L layers: out [L, NsaStats::count] f64 overwritten  <-  pieces [L, kStatsPieces,
// NsaStats::count] f64
void nsa_stats_merge(Context&, Tensor out, ConstTensor pieces);

namespace cuda {
void nsa_stats(Context&, Tensor pieces, ConstTensor gate, ConstTensor block_index, const SelectOptions&,
               const Documents&);
void nsa_stats_merge(Context&, Tensor out, ConstTensor pieces);
}  // namespace cuda
}  // namespace triad
