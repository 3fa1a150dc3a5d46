// RunTables: the CSV tables of a run on its first rank: training.csv, val.csv and fallback_counters.csv.
#pragma once
#include <vector>

#include "engine/routes.h"
#include "io/csv.h"
#include "train/monitor/step_record.h"
#include "train/run_folder.h"

namespace triad {

class RunTables {
 public:
  // resume_step: rows of later steps are cut; -1: not a resume.
  RunTables(const RunFolder&, int64_t resume_step);

  void step(const StepRecord&);  // writes a row if the record has one
  void evaluation(int64_t step, double loss);
  // Writes the fallbacks counted since the last call, by layer, op, kernel and reason.
  void fallbacks(int64_t step, const Routes&);

 private:
  CsvFile training_, validation_, fallbacks_;
  std::vector<int64_t> fallbacks_written_;  // by entry of Routes::counts(): calls that are in fallback_counters.csv
};

}  // namespace triad
