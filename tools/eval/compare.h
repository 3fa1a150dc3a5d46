// triad eval --against: whether two checkpoints' losses on the same tokens can be compared.
#pragma once
#include <string>

#include "tools/eval/loss.h"

namespace triad {

// Throws an Error unless the model `other`, of the checkpoint `against`, has the tokenizer and the document scope of
// `model`.
void check_against(const LossOptions&, const ModelSource& model, const Tokenizer&, const std::string& against,
                   const ModelSource& other, const TokenSource&);

}  // namespace triad
