#include "io/data/best_fit.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "engine/check.h"
#include "engine/random_streams.h"
#include "io/data/permutation.h"

namespace triad {

namespace {

// A group has as many documents as fill this many rows, so that padding in the last row is a small share.
constexpr int64_t kRowsOfGroup = 256;
constexpr int64_t kLeastDocuments = 1000;

// The tokens that cuts separate from the piece's document (RowDocuments::cut).
int64_t cut_tokens(const DocumentIndex& index, const Piece& piece) {
  return piece.dropped + (index.begins_at(piece.begin) ? 0 : piece.length);
}

// The documents in all of a run's groups, and where they lie.
class Groups {
 public:
  Groups(const DocumentIndex& index, const RowOptions& options)
      : index_(index), options_(options), per_epoch_(groups_per_epoch()) {}
  int64_t per_epoch() const { return per_epoch_; }

  // Packs the run's group number `group`: an epoch's groups follow those of the epoch before.
  Packed pack(int64_t group) const {
    const int64_t epoch = group / per_epoch_, in_epoch = group % per_epoch_, n = index_.count(), T = options_.seq_len;
    const Permutation order(n, options_.seed, random_stream(RandomUse::packed_documents, static_cast<uint64_t>(epoch)));
    std::vector<Piece> pieces;
    for (int64_t i = first_of(in_epoch); i < first_of(in_epoch + 1); ++i) {
      const int64_t document = order(i);
      int64_t begin = index_.begins[document];
      const int64_t end = index_.end(document);
      for (; end - begin > T; begin += T) pieces.push_back({begin, T});
      pieces.push_back({begin, end - begin});
    }
    return pack_best_fit(pieces, {.seq_len = T, .max_documents = options_.max_documents});
  }
  // The row in the group that is number `i` in training order.
  int64_t shuffled(int64_t group, int64_t rows, int64_t i) const {
    return Permutation(rows, options_.seed, random_stream(RandomUse::packed_rows, static_cast<uint64_t>(group)))(i);
  }

 private:
  int64_t groups_per_epoch() const {
    const int64_t n = index_.count(), mean = std::max<int64_t>(1, index_.size / n);
    return std::max<int64_t>(1, n / std::max(kLeastDocuments, kRowsOfGroup * options_.seq_len / mean));
  }
  // A group's first document, as its number in the epoch's order.
  int64_t first_of(int64_t in_epoch) const {
    const int64_t n = index_.count();
    return in_epoch * (n / per_epoch_) + std::min(in_epoch, n % per_epoch_);
  }

  const DocumentIndex& index_;
  RowOptions options_;
  int64_t per_epoch_;
};

// Calls f(begin, end) for each padding document after `pieces` documents that fill a row's first `at` tokens. Padding
// is as many documents as the row may still have, because short documents attend to few tokens.
template <class F>
void for_each_padding(const RowOptions& options, int64_t pieces, int64_t at, F&& f) {
  const int64_t padding = options.seq_len - at, n = std::min(padding, options.max_documents + 1 - pieces);
  for (int64_t i = 0; i < n; ++i) f(at + padding * i / n, at + padding * (i + 1) / n);
}

class BestFitRows final : public RowSource {
 public:
  BestFitRows(std::shared_ptr<const TokenSource> source, const RowOptions& options)
      : source_(std::move(source)),
        index_(require_documents(*source_)),
        mask_(source_->mask()),
        options_(options),
        groups_(index_, options) {}

  RowGroups groups_of(int64_t number) override {
    const int64_t group = find_group(number);
    return {{group, first_row(group)}};
  }
  int64_t groups_packed() const override { return groups_packed_.load(std::memory_order_relaxed); }

  void read(int64_t number, Row& row) override {
    const std::vector<Piece>& pieces = find(number);
    row.begins.clear();
    row.documents = {.documents = static_cast<int64_t>(pieces.size())};
    int64_t at = 0;  // tokens filled in the row
    for (const Piece& piece : pieces) {
      row.documents.cut += cut_tokens(index_, piece);
      if (options_.within) row.begins.push_back(static_cast<int32_t>(at));
      const auto part = [&](std::span<int32_t> of) {
        return of.subspan(static_cast<size_t>(at), static_cast<size_t>(piece.length));
      };
      read_piece(piece, part(row.tokens), part(row.targets));
      at += piece.length;
    }
    row.documents.padded = options_.seq_len - at;
    if (at == options_.seq_len) return;
    if (options_.within)
      for_each_padding(options_, row.documents.documents, at,
                       [&](int64_t begin, int64_t) { row.begins.push_back(static_cast<int32_t>(begin)); });
    std::fill(row.tokens.begin() + at, row.tokens.end(), index_.eot);
    std::fill(row.targets.begin() + at, row.targets.end(), -1);
  }

  int64_t count_targets(int64_t number) override {
    int64_t targets = 0;
    for (const Piece& piece : find(number))
      targets += mask_.count(piece.begin + 1, piece.begin + piece.length) + last_has_target(piece);
    return targets;
  }

  int64_t count_padding(int64_t number) override {
    int64_t padding = options_.seq_len;
    for (const Piece& piece : find(number)) padding -= piece.length;
    return padding;
  }

 private:
  bool last_has_target(const Piece& piece) const {
    const int64_t end = piece.begin + piece.length;
    if (end == index_.size) return index_.after_end >= 0;
    if (!mask_.learned(end)) return false;
    return index_.separator == Separator::first || !std::binary_search(index_.begins.begin(), index_.begins.end(), end);
  }
  void read_piece(const Piece& piece, std::span<int32_t> tokens, std::span<int32_t> targets) const {
    source_->read(piece.begin, tokens);
    std::copy(tokens.begin() + 1, tokens.end(), targets.begin());
    apply_mask(mask_, piece.begin + 1, targets.first(targets.size() - 1));
    const int64_t end = piece.begin + piece.length;
    int32_t& last = targets.back();
    if (!last_has_target(piece))
      last = -1;
    else if (end == index_.size)
      last = index_.after_end;
    else
      source_->read(end, {&last, 1});
  }

  // A row's pieces; valid until the next call.
  const std::vector<Piece>& find(int64_t number) {
    const int64_t group = find_group(number);
    const Packed& packed_group = packed(group);
    const auto rows = static_cast<int64_t>(packed_group.rows.size());
    return packed_group.rows[groups_.shuffled(group, rows, number - first_row(group))];
  }
  int64_t find_group(int64_t number) {
    if (number < first_rows_.front()) first_group_ = 0, first_rows_ = {0};
    while (first_rows_.back() <= number) {
      const int64_t group = first_group_ + static_cast<int64_t>(first_rows_.size()) - 1;
      first_rows_.push_back(first_rows_.back() + static_cast<int64_t>(packed(group).rows.size()));
    }
    const auto after = std::upper_bound(first_rows_.begin(), first_rows_.end(), number);
    return first_group_ + std::distance(first_rows_.begin(), after) - 1;
  }
  int64_t first_row(int64_t group) const { return first_rows_[static_cast<size_t>(group - first_group_)]; }
  const Packed& packed(int64_t group) {
    constexpr size_t kKept = 8;  // group count; a step reads few
    const auto found = packed_.find(group);
    if (found != packed_.end()) return found->second;
    if (packed_.size() == kKept) packed_.erase(packed_.begin());
    groups_packed_.fetch_add(1, std::memory_order_relaxed);
    return packed_.emplace(group, groups_.pack(group)).first->second;
  }

  std::shared_ptr<const TokenSource> source_;
  const DocumentIndex& index_;
  MaskView mask_;
  RowOptions options_;
  Groups groups_;
  RowGroup known_ = options_.known.empty() ? RowGroup{} : options_.known.front();
  int64_t first_group_ = known_.group;
  // First rows of the groups packed so far, from first_group_ on, and of the next one.
  std::vector<int64_t> first_rows_ = {known_.first_row};
  std::map<int64_t, Packed> packed_;  // the groups with the highest numbers
  std::atomic<int64_t> groups_packed_ = 0;
};

}  // namespace

Packed pack_best_fit(std::span<const Piece> documents, const PackingLimits& limits) {
  Packed packed;
  using Key = std::pair<int64_t, int64_t>;  // length, minus the number: among equal lengths the earliest is last
  std::set<Key> buffer;
  int64_t next = 0;
  const auto n = static_cast<int64_t>(documents.size());
  const auto refill = [&] {
    for (; next < n && static_cast<int64_t>(buffer.size()) < limits.buffered; ++next)
      buffer.emplace(documents[next].length, -next);
  };
  // The earliest among the longest documents with at most `length` tokens.
  const auto fitting = [&](int64_t length) {
    return buffer.upper_bound({length, std::numeric_limits<int64_t>::max()});
  };
  for (refill(); !buffer.empty();) {
    std::vector<Piece>& row = packed.rows.emplace_back();
    int64_t rest = limits.seq_len;
    while (rest > 0 && !buffer.empty() && static_cast<int64_t>(row.size()) < limits.max_documents) {
      auto chosen = fitting(rest);
      if (chosen == buffer.begin()) chosen = fitting(buffer.begin()->first);
      --chosen;
      Piece piece = documents[-chosen->second];
      if (piece.length > rest) {
        ++packed.cut;
        piece.dropped = piece.length - rest;
        packed.dropped += piece.dropped;
        piece.length = rest;
      }
      rest -= piece.length;
      row.push_back(piece);
      buffer.erase(chosen);
      refill();
    }
    packed.padded += rest;
  }
  return packed;
}

int64_t default_max_documents(int64_t seq_len) {
  constexpr int64_t kFew = 8, kShort = 64;  // document count; document length in tokens, below which rows are closed
                                            // early
  return std::max(kFew, seq_len / kShort);
}

std::unique_ptr<RowSource> best_fit_rows(std::shared_ptr<const TokenSource> source, const RowOptions& options) {
  return std::make_unique<BestFitRows>(std::move(source), options);
}

PackingStats measure_best_fit(const TokenSource& source, const RowOptions& options) {
  const DocumentIndex& index = require_documents(source);
  const Groups groups(index, options);
  PackingStats stats;
  stats.parts.resize(static_cast<size_t>(options.seq_len + 1));
  stats.paddings = stats.parts;
  for (int64_t group = 0; group < groups.per_epoch(); ++group) {
    const Packed packed = groups.pack(group);
    stats.rows += static_cast<int64_t>(packed.rows.size());
    for (const std::vector<Piece>& row : packed.rows) {
      stats.pieces += static_cast<int64_t>(row.size());
      int64_t at = 0;
      for (const Piece& piece : row) {
        ++stats.parts[piece.length];
        stats.cut_tokens += cut_tokens(index, piece);
        at += piece.length;
      }
      for_each_padding(options, static_cast<int64_t>(row.size()), at,
                       [&](int64_t begin, int64_t end) { ++stats.paddings[end - begin]; });
    }
    stats.cut += packed.cut;
    stats.dropped += packed.dropped;
    stats.padded += packed.padded;
  }
  return stats;
}

}  // namespace triad
