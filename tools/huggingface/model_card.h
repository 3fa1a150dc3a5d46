// README.md of an exported model: what it is, how to use it, and the figures of its training run.
#pragma once
#include <string>

#include "tools/huggingface/model_files.h"

namespace triad {

// name: of the exported folder. Figures are those of metrics.json of the run's folder if they are of these weights, and
// the step and tokens in state.json. No paths of training data are included.
std::string model_card(const std::string& name, const ModelSource&, const ExportClass&, DType, const Tokenizer&);

}  // namespace triad
