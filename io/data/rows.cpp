#include "io/data/rows.h"

#include <algorithm>
#include <utility>

#include "engine/check.h"
#include "engine/random_streams.h"

namespace triad {

namespace {

class StreamRows final : public RowSource {
 public:
  StreamRows(std::shared_ptr<const TokenSource> source, const RowOptions& options)
      : source_(std::move(source)), options_(options) {
    if (options_.block == 0) options_.block = options_.seq_len;
    TRIAD_CHECK(options_.block % options_.seq_len == 0, "blocks of {} tokens for rows of {}", options_.block,
                options_.seq_len);
    blocks_ = count_sequences(*source_, options_.block);
  }
  void read(int64_t number, Row& row) override { read_stream_row(*source_, begin(number), options_.within, row); }
  int64_t count_targets(int64_t number) override {
    return count_stream_targets(*source_, begin(number), options_.seq_len, options_.within);
  }

 private:
  int64_t begin(int64_t number) const {
    const int64_t rows = options_.block / options_.seq_len;  // rows per block
    return sequence_position(number / rows, blocks_, options_.seed) * options_.block + number % rows * options_.seq_len;
  }

  std::shared_ptr<const TokenSource> source_;
  RowOptions options_;
  int64_t blocks_;  // blocks per epoch
};

}  // namespace

std::unique_ptr<RowSource> stream_rows(std::shared_ptr<const TokenSource> source, const RowOptions& options) {
  return std::make_unique<StreamRows>(std::move(source), options);
}

int64_t count_sequences(const TokenSource& source, int64_t seq_len) {
  TRIAD_CHECK(seq_len >= 1, "a sequence of {} tokens was asked for", seq_len);
  const int64_t n = (source.size() - 1) / seq_len;
  TRIAD_CHECK(source.size() > seq_len, "{} has {} tokens; one sequence of train.seq_len = {} needs {}", source.name(),
              source.size(), seq_len, seq_len + 1);
  return n;
}

int64_t sequence_position(int64_t k, int64_t n_sequences, uint64_t seed) {
  const auto epoch = static_cast<uint64_t>(k / n_sequences);
  return Permutation(n_sequences, seed, random_stream(RandomUse::order, epoch))(k % n_sequences);
}

void read_stream_row(const TokenSource& source, int64_t begin, bool within, Row& row) {
  source.read_sequence(begin, row.tokens, row.targets);
  apply_mask(source.mask(), begin + 1, row.targets);
  row.begins.clear();
  row.documents = {};
  if (!within) return;
  const DocumentIndex& index = require_documents(source);
  const auto T = static_cast<int64_t>(row.tokens.size());
  row.begins.push_back(0);
  for (const int64_t at : index.begins_in(begin + 1, begin + T)) row.begins.push_back(static_cast<int32_t>(at - begin));
  row.documents.documents = static_cast<int64_t>(row.begins.size());
  if (!index.begins_at(begin)) row.documents.cut = row.begins.size() > 1 ? row.begins[1] : T;
  if (index.separator == Separator::last)
    for (const int64_t at : index.begins_in(begin + 1, begin + T + 1)) row.targets[at - begin - 1] = -1;
}

int64_t count_stream_targets(const TokenSource& source, int64_t begin, int64_t seq_len, bool within) {
  const MaskView mask = source.mask();
  const int64_t all = mask.empty() ? source.count_targets(seq_len) : mask.count(begin + 1, begin + seq_len + 1);
  if (!within || require_documents(source).separator == Separator::first) return all;
  const auto begins = require_documents(source).begins_in(begin + 1, begin + seq_len + 1);
  return all - std::count_if(begins.begin(), begins.end(), [&](int64_t at) { return mask.learned(at); });
}

void apply_mask(const MaskView& mask, int64_t first, std::span<int32_t> targets) {
  if (mask.empty()) return;
  for (size_t i = 0; i < targets.size(); ++i)
    if (!mask.learned(first + static_cast<int64_t>(i))) targets[i] = -1;
}

}  // namespace triad
