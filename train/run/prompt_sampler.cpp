#include "train/run/prompt_sampler.h"

#include <algorithm>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/text.h"

namespace triad {

PromptSampler::PromptSampler(Runtime& training, Model& model, const Tokenizer& tokenizer, const Config& config)
    : training_(training), tokenizer_(tokenizer), log_(config.log) {
  if (!tokenizer.available()) fail_usage("log.samples: prompts need a tokenizer, and data.tokenizer is none");
  const int64_t vocab = config.model.vocab_size;
  int64_t longest = 0;
  std::vector<int64_t> lengths;
  for (const std::string& prompt : log_.samples) {
    std::vector<int32_t> tokens = {tokenizer.eot()};
    tokenizer.append(prompt, tokens);
    for (const int32_t token : tokens)
      if (token >= vocab)
        fail_usage("log.samples: token {} of \"{}\" is outside of the vocabulary, model.vocab_size {}", token,
                   shortened(prompt), vocab);
    lengths.push_back(static_cast<int64_t>(tokens.size()));
    longest = std::max(longest, lengths.back());
    if (lengths.back() + log_.sample_tokens > model.max_seq_len())
      fail_usage("log.samples: \"{}\" has {}, and log.sample_tokens is {}: together at most train.seq_len {} fit",
                 shortened(prompt), counted(lengths.back(), "token"), log_.sample_tokens, model.max_seq_len());
    prompts_.push_back(std::move(tokens));
  }
  session_ = std::make_unique<DecodeSession>(model.config(),
                                             DecodeSession::Options{.device = training.ctx().device,
                                                                    .dtype = model.dtype(),
                                                                    .batch = static_cast<int64_t>(prompts_.size()),
                                                                    .context = longest + log_.sample_tokens,
                                                                    .prefills = lengths,
                                                                    .kernels = config.runtime.kernels,
                                                                    .model = &model});
  session_->ctx().listeners = training.ctx().listeners;  // so that the watchdog sees the progress
}

std::vector<PromptSample> PromptSampler::generate() {
  training_.stream().synchronize();  // the weights are those of the last step
  std::vector<std::vector<int32_t>> texts(prompts_.size());
  std::vector<PromptSample> samples(prompts_.size());
  std::vector<bool> ended(prompts_.size(), false);
  for (size_t b = 0; b < prompts_.size(); ++b) session_->prefill(static_cast<int64_t>(b), prompts_[b]);
  std::vector<int32_t> next = session_->choose_greedy();
  for (int64_t n = 0; n < log_.sample_tokens; ++n) {
    if (n > 0) next = session_->step_greedy();
    if (std::ranges::any_of(next, [](int32_t token) { return token < 0; })) break;  // no finite logits to go on from
    for (size_t b = 0; b < prompts_.size(); ++b) {
      if (ended[b]) continue;
      samples[b].stopped = next[b] == tokenizer_.eot();
      ended[b] = samples[b].stopped;
      if (!ended[b]) texts[b].push_back(next[b]);
    }
    if (std::ranges::all_of(ended, [](bool done) { return done; })) break;
  }
  for (size_t b = 0; b < prompts_.size(); ++b) {
    samples[b].prompt = log_.samples[b];
    samples[b].tokens = static_cast<int64_t>(texts[b].size());
    for (const int32_t token : texts[b])  // ?: an id that pads the vocabulary
      samples[b].text += tokenizer_.has(token) ? tokenizer_.decode({&token, 1}) : "?";
  }
  return samples;
}

std::unique_ptr<PromptSampler> make_prompt_sampler(Runtime& runtime, Model& model, const Tokenizer& tokenizer,
                                                   const Config& config, const Comm& comm) {
  if (config.log.samples.empty() || !comm.first()) return nullptr;
  return std::make_unique<PromptSampler>(runtime, model, tokenizer, config);
}

}  // namespace triad
