// Signs that a run goes wrong although it goes on: rules over its numbers, step by step. Pure: what they are told is
// all they know. Each reports once, and again only after it was well in between.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "train/config.h"

namespace triad {

struct Anomaly {
  std::string type;  // throughput_flat, loss_plateau, host_memory_creep, device_memory_creep, gate_dead, ...
  std::string text;
  bool of_one_rank = false;  // every rank judges its own; others come from numbers that all ranks share
};

// A layer's gates (kernels/nsa/stats.h); where all are dead, the others are NaN.
struct GateHealth {
  int64_t layer = 0;
  double entropy_mean = 0, max_mean = 0, collapse_frac = 0, dead_frac = 0;
};

// What a step left; what is not known is absent.
struct StepHealth {
  int64_t step = 0, updates = 0;  // steps done; updates made before this one, in this run and those it goes on from
  double loss = 0, grad_norm = 0;
  double tokens = 0, seconds = 0;                        // of all ranks; that the step took
  std::optional<double> host_mib = {}, device_mib = {};  // used now
  std::span<const GateHealth> gates = {};
  std::span<const std::string> zero_grads = {};  // parameters whose gradient has come and is 0 everywhere
};

// Whether the gradient of this parameter is 0 by construction: gate.fc1 before fc2 has moved from 0, gates that are
// given or get no gradient, branches that are forced off or see nothing.
bool zero_by_construction(const std::string& param, const Config&, int64_t updates);

class AnomalyRules {
 public:
  explicit AnomalyRules(const Config&);
  std::vector<Anomaly> step(const StepHealth&);

 private:
  // The smallest value in each of the last windows of steps: what is given back between its peaks does not count.
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
  std::map<std::string, bool> is_on_;  // by type: told, and not well again since
  int64_t rate_steps_ = 0;             // of the current window of throughput
  double rate_tokens_ = 0, rate_seconds_ = 0;
  std::vector<double> window_rates_;  // means of the windows before, the last ones
  std::deque<double> losses_;         // of the last two windows of log.plateau_steps
  int64_t until_plateau_look_ = 0;
  std::optional<std::string> plateau_text_, throughput_text_;
  Creep host_, device_;
  std::map<int64_t, int> collapsed_in_row_, dead_in_row_;  // by layer
};

}  // namespace triad
