// README.md of an exported model: what it is, how to use it, and the figures of its training run.
#pragma once
#include <string>

#include "tools/huggingface/model_files.h"

namespace triad {

// The figures of the weights in a folder: step and tokens of state.json, and the keys of metrics.json of the run's
// folder if it is of the same step. Those of a run's folder without either are its newest checkpoint's. An empty object
// if nothing is known.
Json figures_of(const std::string& folder);

// name: of the exported folder. The source's origin is a result of origin_for_tokens(). No paths of training data are
// included.
std::string model_card(const std::string& name, const ModelSource&, const ExportClass&, DType, const Tokenizer&);

}  // namespace triad
