#include "model/layer_ranges.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <system_error>

#include "engine/check.h"

namespace triad {

namespace {

// `text` as a number; nullopt if it isn't one.
std::optional<int64_t> find_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

}  // namespace

std::vector<LayerRange> parse_layer_ranges(std::string_view text, int64_t n_layers, std::string_view key,
                                           std::string_view allowed) {
  std::vector<LayerRange> ranges;
  std::vector<bool> named(static_cast<size_t>(n_layers));
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string_view range = text.substr(at, comma - at);
    at = comma + 1;
    const size_t colon = std::min(range.find(':'), range.size()), equals = std::min(range.find('='), range.size());
    const auto part = [&](size_t begin, size_t end) { return begin < end ? range.substr(begin, end - begin) : ""; };
    const std::optional<int64_t> begin = find_number(part(0, colon)), end = find_number(part(colon + 1, equals));
    const std::string_view word = part(equals + 1, range.size());
    if (!begin || !end || (equals < range.size() && word.empty()))
      fail_usage("{} is \"{}\": {} is allowed", key, text, allowed);
    if (*begin >= *end || *end > n_layers)
      fail_usage("{} is \"{}\": the range {}:{} is not one of the layers 0:{}", key, text, *begin, *end, n_layers);
    for (int64_t i = *begin; i < *end; ++i) {
      if (named[static_cast<size_t>(i)]) fail_usage("{} is \"{}\": layer {} is named twice", key, text, i);
      named[static_cast<size_t>(i)] = true;
    }
    ranges.push_back({*begin, *end, word});
  }
  return ranges;
}

}  // namespace triad
