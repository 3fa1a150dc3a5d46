// Compares two runs: their configs and environments key by key, and their losses step by step.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "tools/report/run.h"
#include "tools/report/series.h"

namespace triad {

namespace {

// Collects nested objects' values under joined keys ("group.key"). A list of plain values stays one value.
void flatten(const Json& value, const std::string& key, std::map<std::string, Json>& out) {
  if (key.empty() && value.empty()) return;
  const bool plain = std::none_of(value.begin(), value.end(), [](const Json& part) { return part.is_structured(); });
  if (!value.is_structured() || value.empty() || (value.is_array() && plain)) {
    out[key] = value;
    return;
  }
  size_t index = 0;
  for (const auto& [name, part] : value.items()) {
    const std::string own = value.is_array() ? std::to_string(index++) : name;
    flatten(part, key.empty() ? own : key + "." + own, out);
  }
}

Points difference_over(const Points& a, const Points& b) {
  Points out;
  for (const auto& [x, own] : a)
    if (!b.empty() && x >= b.front().first && x <= b.back().first) out.emplace_back(x, value_at(b, x) - own);
  return out;
}

}  // namespace

std::vector<Difference> differences_of(const Json& a, const Json& b) {
  std::map<std::string, Json> left, right;
  flatten(a, "", left);
  flatten(b, "", right);
  std::set<std::string> keys;
  for (const auto& [key, value] : left) keys.insert(key);
  for (const auto& [key, value] : right) keys.insert(key);
  std::vector<Difference> out;
  for (const std::string& key : keys) {
    const auto l = left.find(key), r = right.find(key);
    if (l == left.end() || r == right.end() || l->second != r->second)
      out.push_back({key, l == left.end() ? Json() : l->second, r == right.end() ? Json() : r->second});
  }
  return out;
}

std::vector<DifferingKey> differing_keys(const std::vector<ReportRun>& runs) {
  std::vector<std::map<std::string, Json>> configs(runs.size());
  std::vector<std::string> keys;  // order of the configs' groups
  std::set<std::string> seen = {"log.out_dir"};
  for (size_t i = 0; i < runs.size(); ++i) {
    flatten(runs[i].config, "", configs[i]);
    for (const auto& [group, fields] : runs[i].config.items())
      for (const auto& [key, value] : configs[i])
        if (key.starts_with(group + ".") && seen.insert(key).second) keys.push_back(key);
  }
  std::vector<DifferingKey> out;
  for (const std::string& key : keys) {
    DifferingKey differing{key, {}};
    for (const auto& config : configs) {
      const auto found = config.find(key);
      differing.values.push_back(found == config.end() ? Json() : found->second);
    }
    const auto differs = [&](const Json& value) { return value != differing.values.front(); };
    if (std::any_of(differing.values.begin(), differing.values.end(), differs)) out.push_back(std::move(differing));
  }
  return out;
}

FirstDifference first_difference_of(const ReportRun& a, const ReportRun& b) {
  FirstDifference first_difference;
  // If one run's losses are known only with training.csv's digits, the other run's are rounded to the same digits.
  const bool rounded = a.losses_rounded || b.losses_rounded;
  const auto as_known = [&](double x) { return rounded ? std::stod(fmt::format("{:.6f}", x)) : x; };
  auto other = b.losses.begin();
  for (const auto& [at, own] : a.losses) {
    const auto step = static_cast<int64_t>(at);
    while (other != b.losses.end() && other->first < at) ++other;
    if (other == b.losses.end()) break;
    if (other->first != at) continue;
    ++first_difference.common;
    const double loss = as_known(own), its = as_known(other->second);
    if (loss == its || (std::isnan(loss) && std::isnan(its))) continue;
    if (!first_difference.first) first_difference.first = step;
    constexpr double kPercent = 0.01;
    const bool near = std::isfinite(loss) && std::isfinite(its) && std::abs(loss - its) <= kPercent * std::abs(loss);
    if (!first_difference.by_one_percent && !near) first_difference.by_one_percent = step;
  }
  return first_difference;
}

Json loss_difference(const ReportRun& a, const ReportRun& b) {
  const auto of = [&](const Points& left, const Points& right) {
    Json out = Json::object();
    const auto put = [&](const char* axis, auto&& place) {
      const auto on_axis = [&](const Points& points, const ReportRun& run) {
        Points moved;
        for (const auto& [step, value] : points)
          if (std::isfinite(value)) moved.emplace_back(place(run, step), value);
        return moved;
      };
      const Points line = difference_over(on_axis(left, a), on_axis(right, b));
      if (!line.empty()) out[axis] = thinned(line);
    };
    put("steps", [](const ReportRun&, double step) { return step; });
    if (a.data["tokens_per_step"].is_number() && b.data["tokens_per_step"].is_number())
      put("tokens", [](const ReportRun& run, double step) { return step * run.data["tokens_per_step"].get<double>(); });
    if (!a.clock.empty() && !b.clock.empty())
      put("time", [](const ReportRun& run, double step) { return value_at(run.clock, step); });
    return out;
  };
  return {{"loss", of(a.losses, b.losses)}, {"validation", of(a.validation, b.validation)}};
}

}  // namespace triad
