#include "kernels/nsa/document_bounds.h"

#include <algorithm>
#include <string>

#include "engine/check.h"

namespace triad {

void check_bounds(std::span<const int32_t> bounds, int64_t B, int64_t T, int64_t most) {
  const int64_t tokens = B * T, n = static_cast<int64_t>(bounds.size());
  if (n < 2 || bounds.front() != 0)
    fail_usage("documents: row 0: the bounds begin with {}, not with 0 and at least one more",
               n == 0 ? "nothing" : std::to_string(bounds.front()));
  int64_t documents = 0;  // document count in the current row so far
  for (int64_t i = 1; i < n; ++i) {
    const int64_t from = bounds[static_cast<size_t>(i - 1)], to = bounds[static_cast<size_t>(i)];
    const int64_t row = std::min(from / T, B - 1);  // a bound after the end belongs to no row
    if (to <= from)
      fail_usage("documents: row {}: bound {} is {}, and bound {} is {}: bounds have to ascend", row, i - 1, from, i,
                 to);
    if (to > tokens)
      fail_usage("documents: row {}: bound {} is {}, beyond the end of {} rows of {} tokens, {}", row, i, to, B, T,
                 tokens);
    if (to > (row + 1) * T)
      fail_usage("documents: row {}: a document of the tokens {} to {} crosses the row's end at {}", row, from, to,
                 (row + 1) * T);
    documents = from % T == 0 ? 1 : documents + 1;
    if (documents > most)
      fail_usage("documents: row {} holds more than the {} documents that are allowed in a row", row, most);
  }
  if (bounds.back() != tokens)
    fail_usage("documents: row {}: the last bound is {}, not the end of {} rows of {} tokens, {}", bounds.back() / T,
               bounds.back(), B, T, tokens);
}

}  // namespace triad
