#include "model/recompute.h"

#include <algorithm>
#include <optional>

#include "engine/check.h"
#include "model/layer_ranges.h"

namespace triad {

namespace {

std::optional<Recompute> find_word(std::string_view text) {
  for (const auto& [word, recompute] : EnumWords<Recompute>::words)
    if (word == text) return recompute;
  return std::nullopt;
}

}  // namespace

RecomputePlan RecomputePlan::parse(std::string_view text, int64_t n_layers, std::string_view key) {
  RecomputePlan plan;
  if (const std::optional<Recompute> all = find_word(text)) {
    plan.set(0, n_layers, *all);
    return plan;
  }
  const std::string allowed = all_words<Recompute>() + ", or ranges of layers such as 0:6=block,6:12=mlp";
  for (const LayerRange& range : parse_layer_ranges(text, n_layers, key, allowed)) {
    const std::optional<Recompute> word = find_word(range.word);
    if (!word) fail_usage("{} is \"{}\": {} is allowed", key, text, allowed);
    plan.set(range.begin, range.end, *word);
  }
  return plan;
}

bool RecomputePlan::replays(int64_t layer, LayerPart part) const {
  const auto recomputes = [part](Recompute recompute) { return covers(recompute, part); };
  return recomputes(of(layer)) && std::any_of(layers_.begin() + layer + 1, layers_.end(), recomputes);
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
