// StepChecks: checks each step's result. If the gradient sums differ between ranks, the run ends. Anomalies are
// reported, and stop the run if log.on_anomaly is stop. Also writes ddp_buckets.txt.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "io/file.h"
#include "train/monitor/anomaly.h"
#include "train/monitor/telemetry.h"
#include "train/monitor/watchdog.h"
#include "train/run/run_folder.h"
#include "train/step/train_step.h"

namespace triad {

class StepChecks {
 public:
  StepChecks(const Config& config, const RunFolder& folder, const Comm& comm, TrainStep& step)
      : config_(config), folder_(folder), comm_(comm), step_(step), anomalies_(config) {}

  // Writes ddp_buckets.txt, the gradient bucket table. With log.diagnostics "buckets" every rank writes its own table,
  // with a row per step and bucket. resumed_at: rows up to this step are kept; nullopt: not a resume.
  void begin_bucket_table(std::optional<int64_t> resumed_at);
  // Appends the checksums of a step's summed gradient buckets to this rank's bucket table. If they differ between
  // ranks, returns a description, the same on all ranks; the run must then end, because the ranks' weights would
  // differ.
  std::optional<std::string> buckets(Telemetry&, int64_t step, const BucketTrace::Step&);

  // Checks a step for anomalies. The caller fills in the StepHealth except for loss, norm and memory, which are added
  // here.
  void anomalies(Telemetry&, StepHealth, const TrainStep::Result&, const Watchdog::Sample&);
  void stage() { anomalies_.stage(); }  // a stage begins (train.stages)
  bool wants_stop() const { return wants_stop_; }

 private:
  std::string param_name(int64_t i) const { return step_.model().params().specs()[static_cast<size_t>(i)].name; }

  const Config& config_;
  const RunFolder& folder_;
  const Comm& comm_;
  TrainStep& step_;
  std::optional<AppendFile> bucket_rows_;
  AnomalyRules anomalies_;
  bool wants_stop_ = false;
};

}  // namespace triad
