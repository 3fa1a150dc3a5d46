// StatsReport: reports statistics of gates and selection (log.stats), over all micro-steps and ranks of a step: by
// layer in gates.csv, k_stats.csv and TensorBoard on the steps with a row in training.csv, and over all layers in each
// step's heartbeat.
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
  // first: this is the first rank, which writes the files. resume_step: as in Telemetry.
  StatsReport(const Config&, const RunFolder&, bool first, int64_t resume_step);

  // layers: a step's statistics by layer; empty with dense attention or without log.stats. Returns heartbeat fields.
  Json step(int64_t step, std::span<const NsaStats> layers, TensorBoardWriter*);
  std::span<const GateHealth> gates() const { return gates_; }  // of the last step()

 private:
  void rows(int64_t step, std::span<const NsaStats> layers, TensorBoardWriter*);

  const Config& config_;
  std::unique_ptr<CsvFile> gates_csv_, lists_csv_;
  std::vector<GateHealth> gates_;
};

}  // namespace triad
