// What a run draws from the components of a mixture, for the banner, the heartbeats and metrics.json.
#pragma once
#include <string>

#include "train/run/data_source.h"

namespace triad {

// Cursors are RunState::cursor. Without a mixture all texts and objects are empty.
class MixtureReport {
 public:
  explicit MixtureReport(const DataSource& data) : data_(data), draws_(data.train.shares()) {}

  bool any() const { return !data_.components.empty(); }
  // The shares, and the epochs drawn up to the run's end: "; 70.0% of the rows from a.txt (0.35 epochs), ...".
  std::string text(int64_t last_cursor);
  // The shares of the rows drawn so far, and the epochs, by component: {mix_shares: [..], mix_epochs: [..]}.
  Json drawn(int64_t cursor);
  // A list with {data, weight, rows, share, epochs} for each component; weight: the share that it should have.
  Json table(int64_t cursor);

 private:
  const DataSource& data_;
  Draws draws_;
};

}  // namespace triad
