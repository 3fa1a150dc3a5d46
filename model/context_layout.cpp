#include "model/context_layout.h"

#include <algorithm>

#include "engine/check.h"
#include "kernels/nsa/compress.h"

namespace triad {

namespace {

template <class RangeOf>
RowRanges of_each(int64_t ranks, RangeOf&& range_of) {
  RowRanges ranges;
  for (int64_t r = 0; r < ranks; ++r) ranges.push_back(range_of(r));
  return ranges;
}

}  // namespace

RowRange overlap(const RowRange& a, const RowRange& b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

RowRanges ContextLayout::parts() const {
  return of_each(ranks, [&](int64_t r) { return RowRange{r * part, (r + 1) * part}; });
}

RowRanges ContextLayout::prefixes() const {
  return of_each(ranks, [&](int64_t r) { return RowRange{0, (r + 1) * part}; });
}

RowRanges ContextLayout::windows(int64_t w) const {
  return of_each(ranks, [&](int64_t r) { return RowRange{std::max(int64_t{0}, r * part - w + 1), (r + 1) * part}; });
}

RowRanges ContextLayout::blocks(int64_t l, int64_t d) const {
  const int64_t all = compressed_length(tokens(), l, d);
  return of_each(ranks, [&](int64_t r) {
    return RowRange{std::min(all, ceil_div(r * part, d)), std::min(all, ceil_div((r + 1) * part, d))};
  });
}

RowRanges ContextLayout::all_blocks(int64_t l, int64_t d) const {
  return of_each(ranks, [&](int64_t) { return RowRange{0, compressed_length(tokens(), l, d)}; });
}

RowRanges ContextLayout::edges(int64_t l, int64_t d) const {
  const RowRanges its_blocks = blocks(l, d);
  return of_each(ranks, [&](int64_t r) {
    const RowRange& b = its_blocks[static_cast<size_t>(r)];
    const int64_t begin = b.begin * d;
    if (b.size() == 0) return RowRange{begin, begin};
    return RowRange{begin, std::min(tokens(), begin + (b.size() - 1) * d + l + d - 1)};
  });
}

std::vector<int32_t> ContextLayout::cut(std::span<const int32_t> batch, int64_t B, int32_t fill) const {
  const int64_t T = static_cast<int64_t>(batch.size()) / B;
  std::vector<int32_t> mine(static_cast<size_t>(B * part), fill);
  const RowRange own = overlap({first(), first() + part}, {0, T});
  for (int64_t b = 0; b < B; ++b) std::copy_n(batch.begin() + b * T + own.begin, own.size(), mine.begin() + b * part);
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
