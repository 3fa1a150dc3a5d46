// The loss by position, and the difference between two models' losses on the same tokens, for `triad eval`.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "io/data/documents.h"
#include "io/json_config.h"

namespace triad {

// The file in a run's folder in which `triad report` looks for PositionLosses::csv().
inline constexpr const char* kPositionsCsv = "positions.csv";

// Losses of a source's predictions, evaluated in rows of seq_len tokens, which begin at multiples. A prediction's
// position is that of the last token that the model has read for it, counted from 0 at the row's beginning, or if
// attention stays within documents, at its document's beginning in this row.
class PositionLosses {
 public:
  // within: the documents that attention stays within, or null.
  PositionLosses(int64_t seq_len, const DocumentIndex* within);
  // Adds the loss for the prediction after the token at `position` in the source. Positions ascend.
  void add(int64_t position, double loss);

  // The mean difference between two models' losses, and its standard error. Predictions in a row depend on each other,
  // so the error is estimated from the rows: if row r of n has N_r predictions whose differences sum to D_r, the mean
  // is d = sum D_r / sum N_r, and the error sqrt(n / (n - 1) sum (D_r - d N_r)^2) / sum N_r; NaN for one row.
  struct Difference {
    double mean = 0, standard_error = 0;
    int64_t rows = 0;
  };
  // This model's losses minus those of `other`, over all positions. Throws Error if the two do not have the same
  // predictions.
  Difference minus(const PositionLosses& other) const;

  // [{from, to, positions, loss, ppl}]: ranges that end at 2,048 tokens, 4,096, 8,192, ..., and the last at seq_len;
  // those without predictions are left out. other: if given, also against_loss, difference and standard_error.
  Json json(const PositionLosses* other = nullptr) const;
  // CSV text with the columns from,to,positions,loss,perplexity and a row for each range that json() has.
  std::string csv() const;
  // A line for each range.
  std::string table(const PositionLosses* other = nullptr) const;
  int64_t ranges() const { return ranges_; }

 private:
  struct Sum {
    double loss = 0;
    int64_t positions = 0;
  };
  static constexpr int64_t kFirstEnd = 2 << 10;
  int64_t begin_of(int64_t range) const { return range == 0 ? 0 : kFirstEnd << (range - 1); }
  int64_t end_of(int64_t range) const { return std::min(kFirstEnd << range, seq_len_); }
  int64_t rows() const { return static_cast<int64_t>(sums_.size()) / ranges_; }
  const Sum& at(int64_t row, int64_t range) const { return sums_[static_cast<size_t>(row * ranges_ + range)]; }
  Sum total(int64_t range) const;
  // The difference over the ranges [first, end).
  Difference minus(const PositionLosses& other, int64_t first, int64_t end) const;

  int64_t seq_len_, ranges_;
  const DocumentIndex* within_;
  int64_t document_ = 0;   // document that holds the last position
  std::vector<Sum> sums_;  // [rows, ranges]
};

}  // namespace triad
