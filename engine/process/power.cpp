#include "engine/process/power.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace triad {

PowerUse summarize_power(const std::vector<TimedEnergy>& readings, int64_t runs, double seconds) {
  PowerUse use;
  if (readings.empty()) return use;
  use.limit_w = readings.back().card.limit_w, use.max_clock_mhz = readings.back().card.max_clock_mhz;
  const TimedEnergy *first = nullptr, *last = nullptr;
  for (size_t i = 1; i < readings.size(); ++i) {
    const std::optional<double>&now = readings[i].card.energy_j, &before = readings[i - 1].card.energy_j;
    if (!now || !before || *now == *before) continue;
    if (first == nullptr) first = &readings[i];
    last = &readings[i];
  }
  if (first != nullptr && last->seconds - first->seconds >= kLeastMeteredSeconds) {
    use.watts = (*last->card.energy_j - *first->card.energy_j) / (last->seconds - first->seconds);
    use.joules = *use.watts * seconds / static_cast<double>(runs);
  }
  double clocks = 0, capped = 0, with_clock = 0, with_cap = 0;
  for (size_t i = 1; i + 1 < readings.size(); ++i) {
    const GpuEnergy& reading = readings[i].card;
    if (reading.clock_mhz) clocks += *reading.clock_mhz, ++with_clock;
    if (reading.capped) capped += *reading.capped ? 1 : 0, ++with_cap;
  }
  if (with_clock > 0) use.clock_mhz = clocks / with_clock;
  if (with_cap > 0) use.capped_share = capped / with_cap;
  return use;
}

std::string describe(const PowerUse& use, const char* run) {
  std::vector<std::string> parts;
  const auto of = [](const std::optional<double>& most) { return most ? fmt::format(" of {:.0f}", *most) : ""; };
  if (use.watts) parts.push_back(fmt::format("{:.0f}{} W", *use.watts, of(use.limit_w)));
  if (use.capped_share)
    parts.push_back(fmt::format("the power limit lowers the clock {:.0f}% of the time", 100 * *use.capped_share));
  if (use.clock_mhz) parts.push_back(fmt::format("SM clock {:.0f}{} MHz", *use.clock_mhz, of(use.max_clock_mhz)));
  if (use.joules) parts.push_back(fmt::format("{:.4g} J a {}", *use.joules, run));
  return fmt::format("{}", fmt::join(parts, "; "));
}

}  // namespace triad
