// AnomalyRules: detects from each step's numbers that a run is failing although it still advances. Pure: no clock and
// no files. A rule reports once, and again only after its condition has ended in between.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "train/config/config.h"

namespace triad {

struct Anomaly {
  // the rule's name: throughput_flat, loss_plateau, host_memory_creep, device_memory_creep, gate_dead, ...
  std::string type;
  std::string text;
  // true: found in this rank's own time or memory; false: in numbers that are equal on all ranks
  bool single_rank = false;
};

// A layer's gate statistics (kernels/nsa/stats.h defines them). If all rows are dead, all values but dead_frac are NaN.
struct GateHealth {
  int64_t layer = 0;
  double entropy_mean = 0, max_mean = 0, collapse_frac = 0, dead_frac = 0;
};

// One step's numbers that the rules read; unknown numbers are absent.
struct StepHealth {
  int64_t step = 0;  // steps done, this one included
  double loss = 0, grad_norm = 0;
  double tokens = 0, seconds = 0;                        // the step's tokens on all ranks, and duration
  std::optional<double> host_mib = {}, device_mib = {};  // memory in use on the host and on the device, MiB
  std::span<const GateHealth> gates = {};
  std::span<const std::string> zero_grads = {};  // unexpected_zeros() (grad_report.h) in the newest measured step
};

class AnomalyRules {
 public:
  explicit AnomalyRules(const Config& config) : config_(config) {}
  std::vector<Anomaly> step(const StepHealth&);
  // Drops earlier losses and rates, with which a new stage's (train.stages) don't compare.
  void stage();

 private:
  // Detects memory growth: keeps the minimum in each of the last spans of steps, so memory that is freed between peaks
  // doesn't count as growth.
  struct Creep {
    std::deque<double> least;
    double least_now = 0;
    int64_t steps = 0;
  };
  std::optional<std::string> flat_throughput(double tokens, double seconds);
  std::optional<std::string> plateau(double loss);
  std::optional<std::string> creep(Creep&, const std::optional<double>& mib) const;
  std::optional<std::string> collapsed(std::span<const GateHealth>);
  std::optional<std::string> dead(std::span<const GateHealth>);
  std::optional<std::string> zero_gradients(const StepHealth&) const;

  const Config& config_;
  std::map<std::string, bool> is_on_;  // rule name: whether its condition held in the previous step
  int64_t rate_steps_ = 0;             // steps in the current throughput span
  double rate_tokens_ = 0, rate_seconds_ = 0;
  std::vector<double> span_rates_;  // tokens/s in each earlier throughput span
  std::deque<double> losses_;       // losses in the last 2 * log.plateau_steps steps
  int64_t until_plateau_look_ = 0;
  std::optional<std::string> plateau_text_, throughput_text_;
  Creep host_, device_;
  // layer -> consecutive steps in which its gates exceeded the bound
  std::map<int64_t, int> collapsed_in_row_, dead_in_row_;
};

}  // namespace triad
