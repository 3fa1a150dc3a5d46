// GradReport: reports a run's gradients in the log, grad_ledger.csv, all_missing_params.txt and traces.log, as
// log.diagnostics requests.
#pragma once
#include <memory>

#include "io/csv.h"
#include "io/file.h"
#include "train/monitor/telemetry.h"
#include "train/step/train_step.h"

namespace triad {

// Names of parameters whose gradient is zero although nothing in the config or in document lengths makes it zero. step:
// updates since fresh weights, this one included. longest: tokens in the longest document within which attention stays;
// 0: rows are one sequence. dense: for a dense step, without the parameters that it doesn't use.
std::vector<std::string> unexpected_zeros(const Params&, const Config&, int64_t step, const GradNorms&,
                                          int64_t longest = 0, bool dense = false);
// L2 norm over all gradients in a layer, for each layer [n_layers].
std::vector<double> layer_norms(const Params&, const ModelConfig&, const GradNorms&);

class GradReport {
 public:
  // first: true on the first rank, which writes the files. resume_step: step from which the run resumes; -1: not a
  // resume. longest: as above.
  GradReport(const Config&, const RunFolder&, const Params&, bool first, int64_t resume_step, int64_t longest);

  // Whether this step's gradients are measured, and whether its backward is traced. step: optimizer steps done, this
  // one included.
  bool measures(int64_t step) const;
  bool traces(int64_t step) const;
  // Reports a step's result and returns fields for the step's heartbeat. updates: earlier updates that changed the
  // weights.
  Json step(int64_t step, int64_t updates, const TrainStep::Result&, Telemetry&);
  // unexpected_zeros() in the newest measured step.
  const std::vector<std::string>& zeros() const { return zeros_; }
  // Writes the parameters that the exception names to all_missing_params.txt.
  void missing(int64_t step, const MissingGradients&) const;

 private:
  bool ledger() const { return config_.log.diagnoses("ledger"); }
  void write_missing(int64_t step, const std::vector<std::string>& names, int64_t of) const;

  const Config& config_;
  const RunFolder& folder_;
  const Params& params_;
  bool first_;
  int64_t longest_;
  bool missing_written_ = false;
  std::vector<std::string> zeros_;
  std::unique_ptr<CsvFile> csv_;
  std::unique_ptr<AppendFile> traces_;
};

}  // namespace triad
