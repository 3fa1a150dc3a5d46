#include "model/sampling.h"

#include <algorithm>
#include <cmath>
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
  std::sort(order.begin(), order.end(), likelier);

  std::vector<double> weight(order.size());
  double total = 0;
  for (size_t i = 0; i < order.size(); ++i)
    total += weight[i] = std::exp((static_cast<double>(logits[order[i]]) - logits[order[0]]) / options.temperature);
  double kept = 0;
  size_t count = 0;
  while (count < order.size() && (count == 0 || kept < options.top_p * total)) kept += weight[count++];

  double left = uniform * kept;
  for (size_t i = 0; i < count; ++i) {
    left -= weight[i];
    if (left < 0) return order[i];
  }
  return order[count - 1];
}

}  // namespace triad
