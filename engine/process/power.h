// Computes the energy of a run, a training step for example, and a card's mean power and clock from readings during
// some runs. Power and energy are the whole card's, with all processes and all MIG instances on it.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/process/nvml.h"

namespace triad {

// The shortest time, in seconds, over which summarize_power() gives energy and power.
constexpr double kLeastMeteredSeconds = 1;

struct TimedEnergy {
  double seconds;  // when the card was read, by any clock
  GpuEnergy card;
};

// Values that the card does not report are absent.
struct PowerUse {
  std::optional<double> joules;                    // energy per run, J; absent like watts
  std::optional<double> watts;                     // mean power, W; absent below kLeastMeteredSeconds
  std::optional<double> limit_w;                   // the power that the driver lets the card use, W
  std::optional<double> clock_mhz, max_clock_mhz;  // mean SM clock, and the highest possible, MHz
  // The share of readings in which the driver lowered the clock because of limit_w.
  std::optional<double> capped_share;
};

// Summarizes readings of a card that did `runs` equal runs of some work in `seconds`. The driver renews the energy
// counter only at intervals, so the mean power is that between the first and the last reading with a renewed counter.
// Clock and capped_share leave out the first and the last reading, when the card may be idle.
PowerUse summarize_power(const std::vector<TimedEnergy>& readings, int64_t runs, double seconds);

// Returns, for example, "691 of 700 W; the power limit lowers the clock 100% of the time; SM clock 1672 of 1980 MHz;
// 45.9 J a step". `run` is what a run is called. Absent values are left out. limit_w is printed only beside watts, and
// max_clock_mhz only beside clock_mhz.
std::string describe(const PowerUse&, const char* run = "step");

}  // namespace triad
