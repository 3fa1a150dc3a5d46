// A run's data as a mixture of token sources, its components, and which one each row is drawn from.
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/data/dataset.h"
#include "io/data/rows.h"

namespace triad {

// Shares of the rows are whole numbers with this sum, so that draws are the same on every machine.
inline constexpr int64_t kAllShares = int64_t{1} << 24;

// The shares for weights, each above 0. A share is 0 if its weight is too small for one.
std::vector<int64_t> shares_of(std::span<const double> weights);

class Mixture {
 public:
  Mixture() = default;
  // All rows come from one source. Implicit, because most data are one source.
  template <class Source>
  requires std::convertible_to<std::shared_ptr<Source>, std::shared_ptr<const TokenSource>> Mixture(
      std::shared_ptr<Source> only)
      : sources_{std::move(only)}, shares_{kAllShares} {}
  // shares: as shares_of() returns them, all above 0.
  Mixture(std::vector<std::shared_ptr<const TokenSource>> sources, std::vector<int64_t> shares);

  const std::vector<std::shared_ptr<const TokenSource>>& sources() const { return sources_; }
  const std::vector<int64_t>& shares() const { return shares_; }
  size_t count() const { return sources_.size(); }
  double share(size_t component) const { return static_cast<double>(shares_[component]) / kAllShares; }

  int64_t size() const;                 // tokens in all components
  int64_t learned() const;              // learned tokens in all components
  int64_t documents() const;            // documents in all components; -1: not known in one of them
  bool masked() const;                  // whether any component has a mask
  std::string name() const;             // name for messages
  std::vector<DataFile> files() const;  // all components' files; none for generated tokens

 private:
  std::vector<std::shared_ptr<const TokenSource>> sources_;
  std::vector<int64_t> shares_;
};

// Which component each row, or each block of rows, is drawn from. Row k goes to the component whose next row is due
// first, among those whose share of k + 1 rows exceeds the rows it has: so after any number of rows each component has
// its share of them, rounded up or down. (Rows are tasks that a processor runs by earliest deadline.) The draws repeat
// every kAllShares rows, and their state need not be saved. Not thread-safe.
class Draws {
 public:
  explicit Draws(std::vector<int64_t> shares);

  struct Draw {
    size_t component = 0;
    int64_t number = 0;  // row's number among the component's rows
  };
  Draw operator()(int64_t row);
  // How many of the first `rows` rows each component has.
  std::vector<int64_t> counts(int64_t rows);

 private:
  size_t next(const std::vector<int64_t>& drawn, int64_t row) const;
  void find_block(int64_t row);

  std::vector<int64_t> shares_;
  std::vector<std::vector<int64_t>> begins_;  // what each component has before each block of kBlock rows
  int64_t block_ = -1;                        // block whose rows' draws `draws_` has
  std::vector<Draw> draws_;
};

// A mixture's rows, by options.packing. Each component has rows as if it were alone, with a seed of its own; the first
// one has the run's. With RowOptions::block, blocks are drawn.
std::unique_ptr<RowSource> make_rows(const Mixture&, const RowOptions&);

// How many rows can be drawn, each component's in order, until one has no further row with T+1 tokens; at most `most`.
int64_t count_rows(const Mixture&, int64_t seq_len, int64_t most);

}  // namespace triad
