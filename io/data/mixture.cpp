#include "io/data/mixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/check.h"
#include "engine/random_streams.h"
#include "engine/rng.h"
#include "io/data/best_fit.h"

namespace triad {

namespace {

constexpr int64_t kBlock = 4096;  // rows whose draws are found at once

std::unique_ptr<RowSource> rows_of_one(std::shared_ptr<const TokenSource> source, const RowOptions& options) {
  if (options.packing == Packing::best_fit) return best_fit_rows(std::move(source), options);
  return stream_rows(std::move(source), options);
}

uint64_t component_seed(uint64_t seed, size_t component) {
  return component == 0 ? seed : Philox(seed, random_stream(RandomUse::component_seed, component)).bits(0);
}

class MixedRows final : public RowSource {
 public:
  MixedRows(const Mixture& data, const RowOptions& options)
      : draws_(data.shares()), per_block_(options.block > 0 ? options.block / options.seq_len : 1) {
    for (size_t i = 0; i < data.count(); ++i) {
      RowOptions component_options = options;
      component_options.seed = component_seed(options.seed, i);
      component_options.known.clear();
      if (options.known.size() == data.count()) component_options.known.push_back(options.known[i]);
      components_.push_back(rows_of_one(data.sources()[i], component_options));
    }
  }
  void read(int64_t number, Row& row) override {
    const Draws::Draw draw = find(number);
    components_[draw.component]->read(draw.number, row);
  }
  int64_t count_targets(int64_t number) override {
    const Draws::Draw draw = find(number);
    return components_[draw.component]->count_targets(draw.number);
  }
  int64_t count_padding(int64_t number) override {
    const Draws::Draw draw = find(number);
    return components_[draw.component]->count_padding(draw.number);
  }
  RowGroups groups_of(int64_t number) override {
    RowGroups groups;
    const std::vector<int64_t> drawn = draws_.counts(number / per_block_);
    for (size_t i = 0; i < components_.size(); ++i)
      for (const RowGroup& group : components_[i]->groups_of(drawn[i] * per_block_)) groups.push_back(group);
    return groups;
  }
  int64_t groups_packed() const override {
    int64_t packed = 0;
    for (const auto& component : components_) packed += component->groups_packed();
    return packed;
  }

 private:
  Draws::Draw find(int64_t number) {
    Draws::Draw draw = draws_(number / per_block_);
    draw.number = draw.number * per_block_ + number % per_block_;
    return draw;
  }

  Draws draws_;
  int64_t per_block_;  // rows that are drawn together
  std::vector<std::unique_ptr<RowSource>> components_;
};

}  // namespace

std::vector<int64_t> shares_of(std::span<const double> weights) {
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> shares;
  std::vector<double> rests;
  for (const double weight : weights) {
    const double share = weight / all * static_cast<double>(kAllShares);
    shares.push_back(static_cast<int64_t>(std::floor(share)));
    rests.push_back(share - std::floor(share));
  }
  // What rounding down leaves goes to the largest rests.
  std::vector<size_t> order(weights.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return rests[a] > rests[b]; });
  int64_t left = kAllShares - std::accumulate(shares.begin(), shares.end(), int64_t{0});
  for (size_t i = 0; left > 0; i = (i + 1) % order.size(), --left) ++shares[order[i]];
  return shares;
}

Mixture::Mixture(std::vector<std::shared_ptr<const TokenSource>> sources, std::vector<int64_t> shares)
    : sources_(std::move(sources)), shares_(std::move(shares)) {
  const bool above_0 = std::all_of(shares_.begin(), shares_.end(), [](int64_t share) { return share > 0; });
  TRIAD_CHECK(sources_.size() == shares_.size() && above_0 &&
                  std::accumulate(shares_.begin(), shares_.end(), int64_t{0}) == kAllShares,
              "a mixture of {} sources with {} shares", sources_.size(), shares_.size());
}

int64_t Mixture::size() const {
  int64_t tokens = 0;
  for (const auto& source : sources_) tokens += source->size();
  return tokens;
}

int64_t Mixture::learned() const {
  int64_t tokens = 0;
  for (const auto& source : sources_) tokens += source->mask().count(0, source->size());
  return tokens;
}

int64_t Mixture::documents() const {
  int64_t documents = 0;
  for (const auto& source : sources_) {
    if (source->documents() == nullptr) return -1;
    documents += source->documents()->count();
  }
  return documents;
}

bool Mixture::masked() const {
  return std::any_of(sources_.begin(), sources_.end(), [](const auto& source) { return !source->mask().empty(); });
}

std::string Mixture::name() const {
  if (sources_.size() == 1) return sources_.front()->name();
  return fmt::format("the mixture of {} and {} more", sources_.front()->name(), sources_.size() - 1);
}

std::vector<DataFile> Mixture::files() const {
  std::vector<DataFile> files;
  for (const auto& source : sources_)
    if (source->files() != nullptr) files.insert(files.end(), source->files()->begin(), source->files()->end());
  return files;
}

Draws::Draws(std::vector<int64_t> shares) : shares_(std::move(shares)), begins_{std::vector<int64_t>(shares_.size())} {}

size_t Draws::next(const std::vector<int64_t>& drawn, int64_t row) const {
  size_t first = shares_.size();
  for (size_t i = 0; i < shares_.size(); ++i) {
    if (drawn[i] * kAllShares >= shares_[i] * (row + 1)) continue;
    // The component's next row is due by row (drawn + 1) / share.
    if (first == shares_.size() || (drawn[i] + 1) * shares_[first] < (drawn[first] + 1) * shares_[i]) first = i;
  }
  return first;
}

void Draws::find_block(int64_t row) {
  const int64_t block = row % kAllShares / kBlock;
  if (block == block_) return;
  for (int64_t at = std::min(block, static_cast<int64_t>(begins_.size()) - 1); at <= block; ++at) {
    std::vector<int64_t> drawn = begins_[static_cast<size_t>(at)];
    draws_.clear();
    for (int64_t i = 0; i < kBlock; ++i) {
      const size_t component = next(drawn, at * kBlock + i);
      draws_.push_back({component, drawn[component]++});
    }
    if (static_cast<int64_t>(begins_.size()) == at + 1) begins_.push_back(std::move(drawn));
  }
  block_ = block;
}

Draws::Draw Draws::operator()(int64_t row) {
  if (shares_.size() == 1) return {0, row};
  find_block(row);
  Draw draw = draws_[static_cast<size_t>(row % kBlock)];
  draw.number += row / kAllShares * shares_[draw.component];
  return draw;
}

std::vector<int64_t> Draws::counts(int64_t rows) {
  if (shares_.size() == 1) return {rows};
  find_block(rows);
  std::vector<int64_t> counts = begins_[static_cast<size_t>(block_)];
  for (int64_t i = 0; i < rows % kBlock; ++i) ++counts[draws_[static_cast<size_t>(i)].component];
  for (size_t i = 0; i < counts.size(); ++i) counts[i] += rows / kAllShares * shares_[i];
  return counts;
}

std::unique_ptr<RowSource> make_rows(const Mixture& data, const RowOptions& options) {
  if (data.count() == 1) return rows_of_one(data.sources().front(), options);
  return std::make_unique<MixedRows>(data, options);
}

int64_t count_rows(const Mixture& data, int64_t seq_len, int64_t most) {
  std::vector<int64_t> available;
  for (const auto& source : data.sources()) available.push_back(count_sequences(*source, seq_len));
  Draws draws(data.shares());
  const auto enough = [&](int64_t rows) {
    const std::vector<int64_t> drawn = draws.counts(rows);
    for (size_t i = 0; i < drawn.size(); ++i)
      if (drawn[i] > available[i]) return false;
    return true;
  };
  most = std::min(most, std::accumulate(available.begin(), available.end(), int64_t{0}));
  if (enough(most)) return most;
  int64_t rows = 0;  // enough for these, not for `most`
  while (most - rows > 1) {
    const int64_t middle = rows + (most - rows) / 2;
    (enough(middle) ? rows : most) = middle;
  }
  return rows;
}

}  // namespace triad
