#include "engine/routes.h"

#include <fmt/format.h>

namespace triad {

namespace {

// The entry that agrees with `same`, made where there is none. The lists are a dozen entries a layer.
template <class Same>
Routes::Count& entry(std::vector<Routes::Count>& counts, Same&& same, Routes::Count fresh) {
  for (Routes::Count& c : counts)
    if (same(c)) return c;
  return counts.emplace_back(std::move(fresh));
}

}  // namespace

void Routes::record(std::string_view op, std::string_view kernel, std::string_view reason) {
  const auto same = [&](const Count& c) {
    return c.layer == layer_ && c.op == op && c.kernel == kernel && c.reason == reason;
  };
  ++entry(counts_, same, {layer_, std::string(op), std::string(kernel), std::string(reason), 0}).calls;
}

int64_t Routes::fallbacks() const {
  int64_t calls = 0;
  for (const Count& c : counts_) calls += c.is_fallback() ? c.calls : 0;
  return calls;
}

std::string Routes::summary() const {
  std::vector<Count> merged;
  for (const Count& c : counts_) {
    if (!c.is_fallback()) continue;
    const auto same = [&](const Count& m) { return m.op == c.op && m.kernel == c.kernel && m.reason == c.reason; };
    entry(merged, same, {-1, c.op, c.kernel, c.reason, 0}).calls += c.calls;
  }
  if (merged.empty()) return "no fallbacks";
  std::string text;
  for (const Count& m : merged)
    text += fmt::format("{} {} {} ({}) {} times", text.empty() ? ":" : ",", m.op, m.kernel, m.reason, m.calls);
  return fmt::format("{} fallbacks{}", fallbacks(), text);
}

std::string branch_of(std::string_view op) {
  constexpr std::pair<std::string_view, std::string_view> kBranches[] = {{"nsa_attend_compressed", "cmp"},
                                                                         {"nsa_attend_selected", "sel"},
                                                                         {"nsa_attend_window", "win"},
                                                                         {"nsa_select", "select"}};
  for (const auto& [prefix, branch] : kBranches)
    if (op.starts_with(prefix)) return std::string(branch);
  return std::string(op);
}

}  // namespace triad
