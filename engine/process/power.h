// Computes a step's energy and a card's mean power and clock from readings before, during and after some steps. Power
// and energy are the whole card's, with all processes and all MIG instances on it.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/process/nvml.h"

namespace triad {

// The shortest time, in seconds, for which summarize_power() gives energy and power. The driver updates the energy
// counter only at intervals, so shorter measurements would be too inaccurate.
constexpr double kLeastMeteredSeconds = 1;

// Values that the card does not report are absent.
struct PowerUse {
  std::optional<double> joules;                    // energy per step, J; absent below kLeastMeteredSeconds
  std::optional<double> watts;                     // mean power, W; absent like joules
  std::optional<double> limit_w;                   // the power that the driver lets the card use, W
  std::optional<double> clock_mhz, max_clock_mhz;  // mean SM clock, and the highest possible, MHz
  // The share of readings in which the driver lowered the clock because of limit_w.
  std::optional<double> capped_share;
};

// Summarizes the readings over `steps` steps. The parameters:
//   before, after  one reading before the first step, and one after the last. They give the energy; `after` also gives
//                  the power limit and the highest clock.
//   during         readings while the steps ran. They give the mean clock and capped_share.
//   seconds        the time between `before` and `after`
PowerUse summarize_power(const GpuEnergy& before, const std::vector<GpuEnergy>& during, const GpuEnergy& after,
                         int64_t steps, double seconds);

// Returns, for example, "691 of 700 W; the power limit lowers the clock 100% of the time; SM clock 1672 of 1980 MHz;
// 45.9 J a step". Absent values are left out. limit_w is printed only beside watts, and max_clock_mhz only beside
// clock_mhz.
std::string describe(const PowerUse&);

}  // namespace triad
