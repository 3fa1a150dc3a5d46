// The losses of a checkpoint on all tokens of a source, in all, by position and by document.
#pragma once
#include <optional>
#include <string>

#include "io/data/dataset.h"
#include "io/data/document_losses.h"
#include "io/data/position_losses.h"
#include "train/inference.h"

namespace triad {

// How a checkpoint is evaluated.
struct LossOptions {
  std::string checkpoint, device = "auto", dtype = "f32";
  std::vector<std::string> data;            // files or globs that the source was opened from
  int64_t batch = 8, seq = 0, batches = 0;  // seq 0: the training length; batches 0: all
};

struct Total {
  double loss = 0;
  int64_t positions = 0;  // targets whose loss was added
  int64_t bytes = 0;      // the targets' text length, bytes; an end-of-text token has none
  double seconds = 0;
};

// A model's losses on all the source's tokens, or on the first o.batches batches.
struct Losses {
  Total total;
  int64_t seq_len = 0;  // tokens per row
  bool within = false;  // attention stays within documents
  PositionLosses by_position;
  std::optional<DocumentLosses> by_document;
  double mean() const { return total.loss / static_cast<double>(total.positions); }
};

// begun: as LoadedModel::Options::begun.
Losses evaluate(const LossOptions&, const ModelSource&, const Tokenizer&, const TokenSource&,
                const std::optional<ModelConfig>& begun = {});

// The most documents in a T-token row of the source, the last row's empty rest included; 0 if the run that wrote the
// checkpoint lets attention cross documents. If the checkpoint doesn't say, attention stays within documents if they
// are known.
int64_t most_documents(const LossOptions&, const Config&, const TokenSource&);

}  // namespace triad
