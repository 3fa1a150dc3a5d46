// RunTables: writes a run's CSV tables, training.csv, val.csv and fallback_counters.csv, on the first rank.
#pragma once
#include <vector>

#include "engine/routes.h"
#include "io/csv.h"
#include "train/monitor/step_record.h"
#include "train/run/run_folder.h"

namespace triad {

class RunTables {
 public:
  // resume_step: the step from which the run resumes; later steps' rows are cut. -1: not a resume.
  RunTables(const RunFolder&, int64_t resume_step);

  void step(const StepRecord&);  // writes a training.csv row if StepRecord::row is true
  void evaluation(int64_t step, double loss);
  // Writes the fallbacks that were counted since the last call, by layer, op, kernel and reason.
  void fallbacks(int64_t step, const Routes&);

 private:
  CsvFile training_, validation_, fallbacks_;
  // By entry in Routes::counts(): calls already in fallback_counters.csv.
  std::vector<int64_t> fallbacks_written_;
};

}  // namespace triad
