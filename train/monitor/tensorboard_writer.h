// TensorBoardWriter: writes a run's numbers for TensorBoard to tb/. The tags train/, val/, perf/ and memory/ hold
// training.csv's and val.csv's numbers; histograms show loss and gradient norm over the steps since the last row; the
// config is written as text and as hparams. The horizontal axis is the step; tb/by_tokens is a separate TensorBoard run
// whose axis is tokens.
#pragma once
#include <string>
#include <vector>

#include "engine/memory.h"
#include "io/tensorboard.h"
#include "train/config/config.h"

namespace triad {

class TensorBoardWriter {
 public:
  // resume_step >= 0: discards events in the folder's earlier event files: from steps after resume_step, and in
  // by_tokens/ beyond resume_tokens tokens.
  TensorBoardWriter(const std::string& folder, const Arena& arena, const Config&, int64_t resume_step,
                    int64_t resume_tokens);
  // Only discards events as the constructor does, for a run that writes none.
  static void rewind(const std::string& folder, int64_t resume_step, int64_t resume_tokens);

  void step(double loss, double grad_norm);
  struct Row {
    double loss, lr, tokens_per_s, grad_norm, step_ms, mfu;  // mfu: 0 if unknown
    double comm_ms;                                          // time that steps waited for other ranks; 0 with one rank
  };
  void row(int64_t step, int64_t tokens, const Row&);  // tokens: the run's tokens so far
  void evaluation(int64_t step, int64_t tokens, double loss);
  void done();                         // marks the run as complete
  EventFile& file() { return file_; }  // takes further scalars and histograms

 private:
  const Arena& arena_;
  EventFile file_, by_tokens_;
  std::vector<double> losses_, grad_norms_;  // loss and gradient norm by step since the last row
};

}  // namespace triad
