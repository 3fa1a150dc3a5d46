#include "engine/process/power.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace triad {

PowerUse summarize_power(const GpuEnergy& before, const std::vector<GpuEnergy>& during, const GpuEnergy& after,
                         int64_t steps, double seconds) {
  PowerUse use;
  use.limit_w = after.limit_w, use.max_clock_mhz = after.max_clock_mhz;
  if (before.energy_j && after.energy_j && seconds >= kLeastMeteredSeconds) {
    const double joules = *after.energy_j - *before.energy_j;
    use.joules = joules / static_cast<double>(steps);
    use.watts = joules / seconds;
  }
  double clocks = 0, capped = 0, with_clock = 0, with_cap = 0;
  for (const GpuEnergy& reading : during) {
    if (reading.clock_mhz) clocks += *reading.clock_mhz, ++with_clock;
    if (reading.capped) capped += *reading.capped ? 1 : 0, ++with_cap;
  }
  if (with_clock > 0) use.clock_mhz = clocks / with_clock;
  if (with_cap > 0) use.capped_share = capped / with_cap;
  return use;
}

std::string describe(const PowerUse& use) {
  std::vector<std::string> parts;
  const auto of = [](const std::optional<double>& most) { return most ? fmt::format(" of {:.0f}", *most) : ""; };
  if (use.watts) parts.push_back(fmt::format("{:.0f}{} W", *use.watts, of(use.limit_w)));
  if (use.capped_share)
    parts.push_back(fmt::format("the power limit lowers the clock {:.0f}% of the time", 100 * *use.capped_share));
  if (use.clock_mhz) parts.push_back(fmt::format("SM clock {:.0f}{} MHz", *use.clock_mhz, of(use.max_clock_mhz)));
  if (use.joules) parts.push_back(fmt::format("{:.4g} J a step", *use.joules));
  return fmt::format("{}", fmt::join(parts, "; "));
}

}  // namespace triad
