#include "model/recompute.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <system_error>

#include "engine/check.h"

namespace triad {

namespace {

std::optional<Recompute> find_word(std::string_view text) {
  for (const auto& [word, recompute] : EnumWords<Recompute>::words)
    if (word == text) return recompute;
  return std::nullopt;
}

// The number that `text` consists of; nullopt if it is not a number.
std::optional<int64_t> find_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

}  // namespace

RecomputePlan RecomputePlan::parse(std::string_view text, int64_t n_layers, std::string_view key) {
  RecomputePlan plan;
  if (const std::optional<Recompute> all = find_word(text)) {
    plan.set(0, n_layers, *all);
    return plan;
  }
  std::vector<bool> named(static_cast<size_t>(n_layers));
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string_view range = text.substr(at, comma - at);
    at = comma + 1;
    const size_t colon = std::min(range.find(':'), range.size()), equals = std::min(range.find('='), range.size());
    const auto part = [&](size_t begin, size_t end) { return begin < end ? range.substr(begin, end - begin) : ""; };
    const std::optional<int64_t> begin = find_number(part(0, colon)), end = find_number(part(colon + 1, equals));
    const std::optional<Recompute> word = find_word(part(equals + 1, range.size()));
    if (!begin || !end || !word)
      fail_usage("{} is \"{}\": {} is allowed, or ranges of layers such as 0:6=block,6:12=mlp", key, text,
                 all_words<Recompute>());
    if (*begin >= *end || *end > n_layers)
      fail_usage("{} is \"{}\": the range {}:{} is not one of the layers 0:{}", key, text, *begin, *end, n_layers);
    for (int64_t i = *begin; i < *end; ++i) {
      if (named[static_cast<size_t>(i)]) fail_usage("{} is \"{}\": layer {} is named twice", key, text, i);
      named[static_cast<size_t>(i)] = true;
    }
    plan.set(*begin, *end, *word);
  }
  return plan;
}

void RecomputePlan::set(int64_t begin, int64_t end, Recompute recompute) {
  if (static_cast<int64_t>(layers_.size()) < end) layers_.resize(static_cast<size_t>(end), Recompute::none);
  std::fill(layers_.begin() + begin, layers_.begin() + end, recompute);
}

std::string RecomputePlan::str() const {
  std::string text;
  for (size_t begin = 0; begin < layers_.size();) {
    size_t end = begin + 1;
    while (end < layers_.size() && layers_[end] == layers_[begin]) ++end;
    if (layers_[begin] != Recompute::none)
      text += fmt::format("{}{}:{}={}", text.empty() ? "" : ",", begin, end, word_of(layers_[begin]));
    begin = end;
  }
  return text.empty() ? std::string(word_of(Recompute::none)) : text;
}

}  // namespace triad
