#include "model/sequence/layout.h"

#include <algorithm>

#include "engine/check.h"
#include "kernels/nsa/compress.h"

namespace triad {

namespace {

// Lists with one range per rank and run: range_of(run).
template <class RangeOf>
RowLists ranges_by_run(const ContextLayout& layout, RangeOf&& range_of) {
  RowLists lists(static_cast<size_t>(layout.ranks));
  for (int64_t r = 0; r < layout.ranks; ++r)
    for (int64_t i = 0; i < layout.runs(); ++i) lists[static_cast<size_t>(r)].push_back(range_of(layout.run_of(r, i)));
  return lists;
}

}  // namespace

int64_t row_count(const RowList& list) {
  int64_t rows = 0;
  for (const RowRange& range : list) rows += range.size();
  return rows;
}

ContextLayout ContextLayout::of(int64_t T, int64_t ranks, int64_t world_rank, Device device) {
  ContextLayout layout{ranks, world_rank % ranks, T};
  if (layout.shared()) layout.run_tokens = round_up(ceil_div(T, 2 * ranks), device.is_cuda() ? kGpuUnit : 1);
  return layout;
}

RowRange ContextLayout::run_of(int64_t which_rank, int64_t i) const {
  const int64_t number = i == 0 ? which_rank : 2 * ranks - 1 - which_rank;
  return {number * run_tokens, (number + 1) * run_tokens};
}

RowPart ContextLayout::row_part() const {
  if (!shared()) return {};
  return {run(0).begin, 0, tokens(), /*split=*/run_tokens, run(1).begin};
}

RowLists ContextLayout::parts() const {
  return ranges_by_run(*this, [](const RowRange& run) { return run; });
}

RowLists ContextLayout::prefixes() const {
  RowLists lists;
  for (int64_t r = 0; r < ranks; ++r) lists.push_back({{0, run_of(r, runs() - 1).end}});
  return lists;
}

RowLists ContextLayout::windows(int64_t w) const {
  return ranges_by_run(*this, [&](const RowRange& run) {
    return RowRange{std::max(int64_t{0}, run.begin - w + 1), run.end};
  });
}

RowLists ContextLayout::blocks(int64_t l, int64_t d) const {
  const int64_t all = compressed_length(tokens(), l, d);
  return ranges_by_run(*this, [&](const RowRange& run) {
    return RowRange{std::min(all, ceil_div(run.begin, d)), std::min(all, ceil_div(run.end, d))};
  });
}

RowLists ContextLayout::all_blocks(int64_t l, int64_t d) const {
  return RowLists(static_cast<size_t>(ranks), {{0, compressed_length(tokens(), l, d)}});
}

RowLists ContextLayout::edges(int64_t l, int64_t d) const {
  RowLists lists = blocks(l, d);
  for (RowList& list : lists)
    for (RowRange& range : list) {
      const int64_t begin = range.begin * d, count = range.size();
      range = {begin, count == 0 ? begin : std::min(tokens(), begin + (count - 1) * d + l + d - 1)};
    }
  return lists;
}

std::vector<int32_t> ContextLayout::cut(std::span<const int32_t> batch, int64_t B, int32_t fill) const {
  const int64_t T = static_cast<int64_t>(batch.size()) / B;
  std::vector<int32_t> mine(static_cast<size_t>(B * part()), fill);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t i = 0; i < runs(); ++i) {
      const RowRange own = run(i);
      std::copy(batch.begin() + b * T + std::min(own.begin, T), batch.begin() + b * T + std::min(own.end, T),
                mine.begin() + b * part() + i * run_tokens);
    }
  return mine;
}

std::vector<int32_t> ContextLayout::extend(std::span<const int32_t> bounds, int64_t B) const {
  TRIAD_CHECK(!bounds.empty() && bounds.back() % B == 0, "{} bounds of documents in {} sequences", bounds.size(), B);
  const int64_t T = bounds.back() / B;
  std::vector<int32_t> extended;
  for (const int32_t bound : bounds) extended.push_back(static_cast<int32_t>(bound / T * tokens() + bound % T));
  return extended;
}

}  // namespace triad
