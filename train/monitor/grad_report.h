// What a run tells of its gradients: lines in the log, grad_ledger.csv, all_missing_params.txt, traces.log.
#pragma once
#include <memory>

#include "io/csv.h"
#include "io/file.h"
#include "train/monitor/telemetry.h"
#include "train/train_step.h"

namespace triad {

// Which gradients are zero and need not be.
std::vector<std::string> unexpected_zeros(const Params&, const Config&, int64_t step, const GradFacts&);
// Norms of the gradients of each layer, 0 to n_layers - 1.
std::vector<double> layer_norms(const Params&, const ModelConfig&, const GradFacts&);

class GradReport {
 public:
  // Files are the first rank's. resume_step as Telemetry's.
  GradReport(const Config&, const RunFolder&, const Params&, bool first, int64_t resume_step);

  // Whether a step is to be measured and traced. step: optimizer steps done, this one included.
  bool measures(int64_t step) const;
  bool traces(int64_t step) const;
  // Of a step whose result is there; what of it belongs into the heartbeat. updates: that moved weights, before it.
  Json step(int64_t step, int64_t updates, const TrainStep::Result&, Telemetry&);
  // Names them in all_missing_params.txt; to be called on the way of the exception.
  void missing(int64_t step, const MissingGradients&) const;

 private:
  bool ledger() const { return config_.log.diagnoses("ledger"); }
  void write_missing(int64_t step, const std::vector<std::string>& names, int64_t of) const;

  const Config& config_;
  const RunFolder& folder_;
  const Params& params_;
  bool first_;
  bool missing_written_ = false;
  std::unique_ptr<CsvFile> csv_;
  std::unique_ptr<AppendFile> traces_;
};

}  // namespace triad
