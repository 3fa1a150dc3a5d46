// A run's numbers for TensorBoard, in tb/ of its folder: those of training.csv and val.csv, memory, and over the steps
// since the last row how loss and gradient norm were distributed.
#pragma once
#include <string>
#include <vector>

#include "engine/memory.h"
#include "io/tensorboard.h"

namespace triad {

class Board {
 public:
  // resume_step >= 0: what earlier event files of this folder tell of later steps no longer counts.
  Board(const std::string& folder, const Arena& arena, int64_t resume_step)
      : arena_(arena), file_(folder, resume_step) {}

  void step(double loss, double grad_norm);
  struct Row {
    double loss, lr, tokens_per_s, grad_norm, step_ms, mfu;  // mfu: 0 where it is not known
    double comm_ms;                                          // likewise in a world of one
  };
  void row(int64_t step, const Row&);
  void evaluation(int64_t step, double loss);
  EventFile& file() { return file_; }  // for numbers of others

 private:
  const Arena& arena_;
  EventFile file_;
  std::vector<double> losses_, grad_norms_;  // since the last row
};

}  // namespace triad
