// What a run tells of its gates and selection (log.stats): gates.csv and k_stats.csv, a row for each layer on each step
// that has one in training.csv, of that step's micro-steps and all ranks; TensorBoard; and each step's heartbeat, there
// over all layers.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "io/csv.h"
#include "io/json_config.h"
#include "kernels/nsa/stats.h"
#include "train/config.h"
#include "train/monitor/anomaly.h"
#include "train/monitor/tensorboard_writer.h"
#include "train/run_folder.h"

namespace triad {

class StatsReport {
 public:
  // Files are the first rank's. resume_step as Telemetry's.
  StatsReport(const Config&, const RunFolder&, bool first, int64_t resume_step);

  // Of a step whose result is there, by layer: none where nothing was summed. Returns what belongs into the heartbeat.
  Json step(int64_t step, std::span<const NsaStats> layers, TensorBoardWriter*);
  std::span<const GateHealth> gates() const { return gates_; }  // of that step

 private:
  void rows(int64_t step, std::span<const NsaStats> layers, TensorBoardWriter*);

  const Config& config_;
  std::unique_ptr<CsvFile> gates_csv_, lists_csv_;
  std::vector<GateHealth> gates_;
};

}  // namespace triad
