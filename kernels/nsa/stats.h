// Whether NSA's gates and selection are well, in a few sums over the rows (token, group) of a layer (log.stats).
//   gates:  p_b = gate_b / (gate_cmp + gate_sel + gate_win), which sigmoid gates need and softmax gates have already.
//           entropy = -sum of p_b ln p_b, ln 3 at most; a row has collapsed if that is below 0.1 (its largest p is
//           then above 0.97). A row whose gates are all 0 is dead: it hears no branch, and no gradient will open one.
//           It has no shares and no entropy, so it is counted by itself and left out of all other sums of gates.
//   lists:  the tokens of a row are those up to its own in the blocks it lists; a listed block is forced if it is one
//           of the initial or local ones, and shared if the list of the token before holds it too.
// A kernel of its own reads what the gate's and the selection's have just left in the L2 cache (5 MB a layer at M7C):
// neighbours' lists are other CTAs', and the kernels that make gates and lists keep their registers.
#pragma once
#include <limits>

#include "kernels/nsa/select.h"

namespace triad {

// Of any number of rows; of none, all are 0. Counts are exact. What is not a number in one row is none in the sums and
// extremes of all, in whatever order rows are merged.
struct NsaStats {
  enum Field : int64_t {
    rows,
    dead,     // rows
    entropy,  // a sum over the rows that are not dead, as all that follow unless they say something else
    entropy_min,
    largest,  // p
    largest_max,
    collapsed,           // rows
    share,               // p of the three branches, in the order of Branch
    tokens = share + 3,  // selected; from here on of all rows
    tokens_max,
    at_max,     // rows that have tokens_max
    blocks,     // listed
    forced,     // of those
    followers,  // listed blocks of the rows that have a token before
    shared,     // of those
    count
  };
  static constexpr double kCollapsedEntropy = 0.1;
  double at[count] = {};

  constexpr double live() const { return at[rows] - at[dead]; }
  constexpr double mean(int64_t field) const { return at[field] / at[rows]; }  // of dead rows, and of lists
  // Of the other fields of gates; NaN where no row is live.
  constexpr double gate_mean(int64_t field) const {
    return live() > 0 ? at[field] / live() : std::numeric_limits<double>::quiet_NaN();
  }
  constexpr double gate_extreme(int64_t field) const {
    return live() > 0 ? at[field] : std::numeric_limits<double>::quiet_NaN();
  }
  constexpr double forced_share() const { return at[forced] / at[blocks]; }
  constexpr double overlap() const { return at[shared] / at[followers]; }  // NaN where no row has a token before

  constexpr void add_gates(double cmp, double sel, double win, double its_entropy) {
    const double its_largest = greater(greater(cmp, sel), win);
    at[entropy_min] = live() == 0 ? its_entropy : lesser(at[entropy_min], its_entropy);
    at[largest_max] = live() == 0 ? its_largest : greater(at[largest_max], its_largest);
    at[rows] += 1, at[entropy] += its_entropy, at[largest] += its_largest;
    at[collapsed] += its_entropy < kCollapsedEntropy;
    at[share] += cmp, at[share + 1] += sel, at[share + 2] += win;
  }
  constexpr void add_dead_gates() { at[rows] += 1, at[dead] += 1; }
  // list, before [n]: those of token t and of the one before, nullptr for the first.
  constexpr void add_list(const int32_t* list, const int32_t* before, int64_t t, int64_t n, const SelectOptions& o) {
    int64_t its_tokens = 0, its_blocks = 0, its_forced = 0, its_shared = 0, j = 0;
    for (; its_blocks < n && list[its_blocks] >= 0; ++its_blocks) {
      const int64_t block = list[its_blocks], begin = block * o.l_sel, end = begin + o.l_sel;
      if (begin <= t) its_tokens += (end <= t + 1 ? end : t + 1) - begin;
      its_forced += block < o.init_blocks || block > t / o.l_sel - o.local_blocks;
      if (before == nullptr) continue;
      while (j < n && before[j] >= 0 && before[j] < block) ++j;  // both ascend
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
  // NaN if one of them is.
  static constexpr double lesser(double a, double b) { return a < b || a != a ? a : b; }
  static constexpr double greater(double a, double b) { return a > b || a != a ? a : b; }
  constexpr void add_most(double its_tokens, double its_rows) {
    if (its_tokens > at[tokens_max]) at[tokens_max] = its_tokens, at[at_max] = 0;
    if (its_tokens == at[tokens_max]) at[at_max] += its_rows;
  }
};
static_assert(sizeof(NsaStats) == NsaStats::count * sizeof(double));  // tensors hold it as so many f64

// Rows are summed in this many pieces, so that sums come out with the same bits each time.
inline constexpr int64_t kStatsPieces = 256;

// pieces [kStatsPieces, NsaStats::count] f64, the rows merged into them (zeros: none so far)
//   <-  gate [3,B,T,Hkv] acc, block_index [B,T,Hkv,n] i32, both contiguous
void nsa_stats(Context&, Tensor pieces, ConstTensor gate, ConstTensor block_index, const SelectOptions&);
// out [L, NsaStats::count] f64 overwritten  <-  pieces [L, kStatsPieces, NsaStats::count] f64: all of a layer's merged
void nsa_stats_merge(Context&, Tensor out, ConstTensor pieces);

namespace cuda {
void nsa_stats(Context&, Tensor pieces, ConstTensor gate, ConstTensor block_index, const SelectOptions&);
void nsa_stats_merge(Context&, Tensor out, ConstTensor pieces);
}  // namespace cuda
}  // namespace triad
