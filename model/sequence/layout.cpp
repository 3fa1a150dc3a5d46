#include "model/sequence/layout.h"

#include <algorithm>
#include <numeric>

#include "engine/check.h"
#include "kernels/nsa/compress.h"

namespace triad {

namespace {

// Lists with one range for each chunk of each rank: range_of(chunk).
template <class RangeOf>
RowLists chunk_lists(const SequenceLayout& layout, RangeOf&& range_of) {
  RowLists lists(static_cast<size_t>(layout.ranks));
  for (int64_t r = 0; r < layout.ranks; ++r)
    for (int64_t i = 0; i < layout.chunks(); ++i)
      lists[static_cast<size_t>(r)].push_back(range_of(layout.chunk_of(r, i)));
  return lists;
}

}  // namespace

int64_t row_count(const RowList& list) {
  int64_t rows = 0;
  for (const RowRange& range : list) rows += range.size();
  return rows;
}

SequenceLayout SequenceLayout::of(int64_t T, int64_t ranks, int64_t world_rank, Device device, int64_t unit) {
  SequenceLayout layout{ranks, world_rank % ranks, T};
  if (layout.shared())
    layout.chunk_tokens = round_up(ceil_div(T, 2 * ranks), std::lcm(device.is_cuda() ? kGpuUnit : 1, unit));
  return layout;
}

RowRange SequenceLayout::chunk_of(int64_t owner, int64_t i) const {
  const int64_t number = i == 0 ? owner : 2 * ranks - 1 - owner;
  return {number * chunk_tokens, (number + 1) * chunk_tokens};
}

RowPart SequenceLayout::row_part() const {
  if (!shared()) return {};
  return {chunk(0).begin, 0, tokens(), /*split=*/chunk_tokens, chunk(1).begin};
}

RowLists SequenceLayout::tokens_by_rank() const {
  return chunk_lists(*this, [](const RowRange& chunk) { return chunk; });
}

RowLists SequenceLayout::prefixes() const {
  RowLists lists;
  for (int64_t r = 0; r < ranks; ++r) lists.push_back({{0, chunk_of(r, chunks() - 1).end}});
  return lists;
}

RowLists SequenceLayout::windows(int64_t w) const {
  return chunk_lists(*this, [&](const RowRange& chunk) {
    return RowRange{std::max(int64_t{0}, chunk.begin - w + 1), chunk.end};
  });
}

RowLists SequenceLayout::blocks(int64_t l, int64_t d) const {
  const int64_t all = compressed_length(tokens(), l, d);
  return chunk_lists(*this, [&](const RowRange& chunk) {
    return RowRange{std::min(all, ceil_div(chunk.begin, d)), std::min(all, ceil_div(chunk.end, d))};
  });
}

RowLists SequenceLayout::all_blocks(int64_t l, int64_t d) const {
  return RowLists(static_cast<size_t>(ranks), {{0, compressed_length(tokens(), l, d)}});
}

RowLists SequenceLayout::block_tokens(int64_t l, int64_t d) const {
  RowLists lists = blocks(l, d);
  for (RowList& list : lists)
    for (RowRange& range : list) {
      const int64_t begin = range.begin * d, count = range.size();
      range = {begin, count == 0 ? begin : std::min(tokens(), begin + (count - 1) * d + l + d - 1)};
    }
  return lists;
}

std::vector<int32_t> SequenceLayout::cut(std::span<const int32_t> batch, int64_t B, int32_t fill) const {
  const int64_t T = static_cast<int64_t>(batch.size()) / B;
  std::vector<int32_t> local(static_cast<size_t>(B * local_tokens()), fill);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t i = 0; i < chunks(); ++i) {
      const RowRange own = chunk(i);
      std::copy(batch.begin() + b * T + std::min(own.begin, T), batch.begin() + b * T + std::min(own.end, T),
                local.begin() + b * local_tokens() + i * chunk_tokens);
    }
  return local;
}

std::vector<int32_t> SequenceLayout::extend(std::span<const int32_t> bounds, int64_t B) const {
  TRIAD_CHECK(!bounds.empty() && bounds.back() % B == 0, "{} bounds of documents in {} sequences", bounds.size(), B);
  const int64_t T = bounds.back() / B;
  std::vector<int32_t> extended;
  for (const int32_t bound : bounds) extended.push_back(static_cast<int32_t>(bound / T * tokens() + bound % T));
  return extended;
}

}  // namespace triad
