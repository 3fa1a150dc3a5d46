#include "model/decoding/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

namespace triad {

int32_t sample_token(std::span<const float> logits, const SamplingOptions& options, double uniform) {
  if (options.temperature <= 0)
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());

  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
  if (options.top_k > 0 && static_cast<size_t>(options.top_k) < order.size()) {
    std::nth_element(order.begin(), order.begin() + options.top_k, order.end(), likelier);
    order.resize(options.top_k);
  }
  // The likeliest tokens are put in order first, and others only if the draw reaches them, because sorting a whole
  // vocabulary takes longer than a decoding step.
  size_t sorted = 0;
  const auto in_order = [&](size_t i) {
    constexpr size_t kFirst = 64, kGrowth = 4;
    if (i >= sorted) {
      const size_t more = std::min(order.size(), std::max(kFirst, kGrowth * sorted));
      std::partial_sort(order.begin() + static_cast<std::ptrdiff_t>(sorted),
                        order.begin() + static_cast<std::ptrdiff_t>(more), order.end(), likelier);
      sorted = more;
    }
    return order[i];
  };
  const double most = logits[in_order(0)];
  const auto weight = [&](int32_t token) {
    return std::exp((static_cast<double>(logits[token]) - most) / options.temperature);
  };
  double total = 0;
  for (const int32_t token : order) total += weight(token);
  size_t count = order.size();
  double kept = total;
  if (options.top_p < 1)
    for (kept = 0, count = 0; count < order.size() && (count == 0 || kept < options.top_p * total); ++count)
      kept += weight(in_order(count));

  double left = uniform * kept;
  for (size_t i = 0; i < count; ++i) {
    left -= weight(in_order(i));
    if (left < 0) return order[i];
  }
  return order[count - 1];
}

}  // namespace triad
