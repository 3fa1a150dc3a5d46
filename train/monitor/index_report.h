// IndexReport: reports how a taught index learns (log.stats): each layer's loss, how much of dense attention its lists
// hold, and the largest logit. It writes index.csv, index_recall.csv and TensorBoard; heartbeats receive a summary.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "io/csv.h"
#include "io/json_config.h"
#include "model/index_sample.h"
#include "train/config/config.h"
#include "train/monitor/tensorboard_writer.h"
#include "train/run/run_folder.h"

namespace triad {

class IndexReport {
 public:
  // first: true on the first rank, which writes the files. resume_step: step from which the run resumes; -1: not a
  // resume.
  IndexReport(const Config&, const RunFolder&, bool first, int64_t resume_step);

  // losses: a step's index losses by layer; empty without an index or without log.stats.
  void step(int64_t step, std::span<const double> losses, TensorBoardWriter*);
  // layers: the sample of an evaluation after that step, which may be empty. Returns the fields for a heartbeat, none
  // for an empty sample.
  Json evaluation(int64_t step, std::span<const IndexRecall> layers, TensorBoardWriter*);

 private:
  void rows(int64_t step, std::span<const IndexRecall> layers);

  const Config& config_;
  const int64_t resume_step_;
  std::unique_ptr<CsvFile> layers_csv_, distances_csv_;
  int64_t step_ = -1;  // the last step, and its losses by layer
  std::vector<double> losses_;
};

}  // namespace triad
