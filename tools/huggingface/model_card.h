// An exported model's README.md: what it is, how to use it, and its training run's figures.
#pragma once
#include <optional>
#include <string>

#include "io/chat/chat_format.h"
#include "tools/huggingface/model_files.h"

namespace triad {

// Figures for the weights in a folder: step and tokens from state.json, and the keys in the run folder's metrics.json
// if it's for the same step. A run's folder without either has its newest checkpoint's. An empty object if nothing is
// known.
Json figures_of(const std::string& folder);

// name: the exported folder's. The source's origin comes from origin_for_tokens(). No training data paths are included.
// chat: the format of the conversations that were trained on, if there were any.
std::string model_card(const std::string& name, const ModelSource&, const ExportClass&, DType, const Tokenizer&,
                       const std::optional<ChatFormat>& chat);

}  // namespace triad
