// RunTables: writes the CSV tables of a run, training.csv, val.csv and fallback_counters.csv, on the first rank.
#pragma once
#include <vector>

#include "engine/routes.h"
#include "io/csv.h"
#include "train/monitor/step_record.h"
#include "train/run/run_folder.h"

namespace triad {

class RunTables {
 public:
  // resume_step: the step from which the run resumes; rows of later steps are cut. -1: not a resume.
  RunTables(const RunFolder&, int64_t resume_step);

  void step(const StepRecord&);  // writes a row of training.csv if StepRecord::row is true
  void evaluation(int64_t step, double loss);
  // Writes the fallbacks that were counted since the last call, by layer, op, kernel and reason.
  void fallbacks(int64_t step, const Routes&);

 private:
  CsvFile training_, validation_, fallbacks_;
  // For each entry of Routes::counts(): number of its calls already in fallback_counters.csv.
  std::vector<int64_t> fallbacks_written_;
};

}  // namespace triad
