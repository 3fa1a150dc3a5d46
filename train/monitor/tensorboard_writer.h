// A run's numbers for TensorBoard, in tb/ of its folder: train/, val/, perf/ and memory/ as training.csv and val.csv
// have them, the distribution of loss and gradient norm over the steps since the last row, the config as text and as
// hparams. TensorBoard's horizontal axis is the step; tb/by_tokens is a run of its own whose steps are tokens.
#pragma once
#include <string>
#include <vector>

#include "engine/memory.h"
#include "io/tensorboard.h"
#include "train/config.h"

namespace triad {

class TensorBoardWriter {
 public:
  // resume_step >= 0: what earlier event files of this folder hold of later steps, and of more tokens, no longer
  // counts.
  TensorBoardWriter(const std::string& folder, const Arena& arena, const Config&, int64_t resume_step,
                    int64_t resume_tokens);
  // That alone, for a run that writes no events.
  static void rewind(const std::string& folder, int64_t resume_step, int64_t resume_tokens);

  void step(double loss, double grad_norm);
  struct Row {
    double loss, lr, tokens_per_s, grad_norm, step_ms, mfu;  // mfu: 0 where it is not known
    double comm_ms;                                          // likewise in a world of one
  };
  void row(int64_t step, int64_t tokens, const Row&);  // tokens: trained on so far
  void evaluation(int64_t step, int64_t tokens, double loss);
  void done();                         // the run has trained all that it was to
  EventFile& file() { return file_; }  // for numbers of others

 private:
  const Arena& arena_;
  EventFile file_, by_tokens_;
  std::vector<double> losses_, grad_norms_;  // since the last row
};

}  // namespace triad
