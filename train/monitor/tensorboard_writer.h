// TensorBoardWriter: writes a run's numbers for TensorBoard to tb/. The tags train/ and val/ hold training.csv's and
// val.csv's numbers; histograms show loss and gradient norm over the steps since the last row; the config is written as
// text and as hparams. TensorBoard sorts cards by tag and opens the first two groups: these are train, whose first tag
// is the loss, and val; all others begin with watch_.
#pragma once
#include <string>
#include <vector>

#include "engine/memory.h"
#include "io/tensorboard.h"
#include "train/config/config.h"

namespace triad {

// Indents each line by four spaces, which Markdown shows as a code block.
std::string as_code(const std::string& text);

class TensorBoardWriter {
 public:
  // resume_step >= 0: discards later steps' events in the folder's earlier event files.
  TensorBoardWriter(const std::string& folder, const Arena& arena, const Config&, int64_t resume_step);

  void step(double loss, double grad_norm);
  struct Row {
    double loss, lr, tokens_per_s, grad_norm, step_ms, mfu;  // mfu: 0 if unknown
    double comm_ms;                                          // time that steps waited for other ranks; 0 with one rank
  };
  void row(int64_t step, int64_t tokens, const Row&);                // tokens: the run's tokens so far
  void evaluation(int64_t step, double loss, double bits_per_byte);  // bits_per_byte: NaN if unknown
  void done();                                                       // marks the run as complete
  EventFile& file() { return file_; }                                // takes further scalars and histograms

 private:
  const Arena& arena_;
  EventFile file_;
  std::vector<double> losses_, grad_norms_;  // loss and gradient norm by step since the last row
};

}  // namespace triad
