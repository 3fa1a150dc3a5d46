// StatsReport: reports gate and selection statistics (log.stats), computed over all micro-steps and ranks in a step. In
// steps with a row in training.csv it writes them by layer to gates.csv, k_stats.csv and TensorBoard; each step's
// heartbeat receives them over all layers. With runtime.matmul_dtype fp8 the same for what casts lose, by tensor role:
// fp8.csv.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "io/csv.h"
#include "io/json_config.h"
#include "kernels/nsa/stats.h"
#include "train/config/config.h"
#include "train/monitor/anomaly.h"
#include "train/monitor/tensorboard_writer.h"
#include "train/run/run_folder.h"

namespace triad {

class StatsReport {
 public:
  // first: true on the first rank, which writes the files. resume_step: step from which the run resumes; -1: not a
  // resume.
  StatsReport(const Config&, const RunFolder&, bool first, int64_t resume_step);

  // layers: a step's statistics by layer; empty without selection lists or without log.stats. Layers without lists have
  // no rows and are left out of every report; of layers without gates only the lists are reported. Returns the fields
  // for the step's heartbeat.
  Json step(int64_t step, std::span<const NsaStats> layers, TensorBoardWriter*);
  // counts [Fp8Role::count, E4m3Counts::count]: a step's; empty without fp8 or without log.stats. Returns the fields
  // for the step's heartbeat.
  Json fp8(int64_t step, std::span<const double> counts, TensorBoardWriter*);
  std::span<const GateHealth> gates() const { return gates_; }  // the layers' gates in the last step() call

 private:
  bool has_row(int64_t step) const { return step % config_.log.every == 0 || step == config_.train.steps; }
  void rows(int64_t step, std::span<const NsaStats> layers, TensorBoardWriter*);

  const Config& config_;
  std::unique_ptr<CsvFile> gates_csv_, lists_csv_, fp8_csv_;
  std::vector<GateHealth> gates_;
};

}  // namespace triad
