// The energy of a step, the mean power and the mean clock of a card, from readings before, during and after a number of
// steps. They are those of the whole card: other processes on it, and other MIG instances of it, are included.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/process/nvml.h"

namespace triad {

// In less time the energy is not known well enough: the driver renews its counter only from time to time.
constexpr double kLeastMeteredSeconds = 1;

// Values that the card does not report are absent.
struct PowerUse {
  std::optional<double> joules;                     // energy of a step, J; absent below kLeastMeteredSeconds
  std::optional<double> watts;                      // mean power, W; absent like joules
  std::optional<double> limit_w;                    // the power that the driver lets the card use, W
  std::optional<double> clock_mhz, most_clock_mhz;  // mean clock of the SMs, and the highest that they can have, MHz
  std::optional<double> capped;  // the share of the readings in which the driver lowered the clock because of the limit
};

// before, during and after: readings before the first of `steps` steps, while they ran, and after the last one.
// seconds: the time between the first and the last reading. Clocks are those of `during`.
PowerUse summarize_power(const GpuPower& before, const std::vector<GpuPower>& during, const GpuPower& after,
                         int64_t steps, double seconds);

// "691 of 700 W; the power limit lowers the clock 100% of the time; SM clock 1672 of 1980 MHz; 45.9 J a step". Absent
// values are left out; "" if all are absent.
std::string describe(const PowerUse&);

}  // namespace triad
