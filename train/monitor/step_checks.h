// StepChecks: what a settled step is looked at for, beside its loss: sums that differ between the ranks, which end the
// run, and signs that it goes wrong: they are told, and stop it where log.on_anomaly says so. ddp_buckets.txt is kept
// here.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "io/file.h"
#include "train/monitor/anomaly.h"
#include "train/monitor/telemetry.h"
#include "train/monitor/watchdog.h"
#include "train/run_folder.h"
#include "train/train_step.h"

namespace triad {

class StepChecks {
 public:
  StepChecks(const Config& config, const RunFolder& folder, const Comm& comm, TrainStep& step)
      : config_(config), folder_(folder), comm_(comm), step_(step), anomalies_(config) {}

  // ddp_buckets.txt: how gradients are cut into buckets; with diagnosis "buckets" each rank's own, and a row for each
  // bucket of each step. resumed_at: the steps whose rows stay; absent: a run from its start.
  void begin_bucket_table(std::optional<int64_t> resumed_at);
  // Their rows go to this rank's table. Where sums are not the same on all ranks, what differs, on each of them alike:
  // the run has to end, for weights would part.
  std::optional<std::string> buckets(Telemetry&, int64_t step, const BucketTrace::Step&);

  // Of the step: all that AnomalyRules take but the samples and the zero gradients, which are known here.
  void anomalies(Telemetry&, StepHealth, const TrainStep::Result&, const Watchdog::Sample&);
  bool wants_stop() const { return wants_stop_; }

 private:
  std::string param_name(int64_t i) const { return step_.model().params().specs()[static_cast<size_t>(i)].name; }

  const Config& config_;
  const RunFolder& folder_;
  const Comm& comm_;
  TrainStep& step_;
  std::optional<AppendFile> bucket_rows_;
  AnomalyRules anomalies_;
  std::vector<std::string> zero_grads_;  // parameters
  bool wants_stop_ = false;
};

}  // namespace triad
