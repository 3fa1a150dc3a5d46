// PromptSampler: text that a model in training writes at evaluations (log.samples), to be read beside the loss.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/context.h"
#include "io/tokenizer/tokenizer.h"
#include "model/decoding/decode_session.h"
#include "train/config/config.h"

namespace triad {

struct PromptSample {
  std::string prompt, text;  // text: the continuation's, which may end within a UTF-8 character
  int64_t tokens = 0;
  bool stopped = false;  // ended by an end-of-text token
};

// Decodes greedily with the training model's own weights, in memory of its own, so that training's numbers do not
// depend on it.
class PromptSampler {
 public:
  // The runtime and the model, of training, must outlive the sampler. Throws a UsageError for a prompt that the model
  // cannot continue.
  PromptSampler(Runtime& training, Model&, const Tokenizer&, const Config&);

  // Continues each prompt after an end-of-text token, as `triad generate` does. All texts end where logits are not
  // finite.
  std::vector<PromptSample> generate();

 private:
  Runtime& training_;
  const Tokenizer& tokenizer_;
  const LogConfig& log_;
  std::vector<std::vector<int32_t>> prompts_;  // tokens
  std::unique_ptr<DecodeSession> session_;
};

// The sampler of the first rank; null on other ranks and without log.samples.
std::unique_ptr<PromptSampler> make_prompt_sampler(Runtime&, Model&, const Tokenizer&, const Config&, const Comm&);

}  // namespace triad
