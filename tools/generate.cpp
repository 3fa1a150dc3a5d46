// triad generate: sample text from a checkpoint. A full forward pass a token; past the model's length, of the last T
// tokens.
#include <CLI/CLI.hpp>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>

#include "engine/check.h"
#include "engine/rng.h"
#include "io/tokenizer.h"
#include "model/sampling.h"
#include "tools/options.h"
#include "tools/verbs.h"
#include "train/inference.h"
#include "train/load_config.h"

namespace triad {

namespace {

struct Options {
  std::string checkpoint, prompt, device = "auto", dtype = "f32";
  int64_t tokens = 200, context = 0;
  uint64_t seed = 1337;
  SamplingOptions sampling;
};

// Logits that are not finite have no order to sample by.
std::vector<float> finite_logits(LoadedModel& loaded, int64_t row, const std::string& checkpoint) {
  std::vector<float> logits;
  for (const double logit : loaded.logits(row, 1)) {
    logits.push_back(static_cast<float>(logit));
    TRIAD_CHECK(std::isfinite(logits.back()), "{}: the logit of token {} is {}: weights that are not finite?",
                checkpoint, logits.size() - 1, logit);
  }
  return logits;
}

void generate(const Options& o) {
  check_environment();
  LoadedModel loaded({.checkpoint = o.checkpoint,
                      .device = parse_device(o.device),
                      .dtype = parse_dtype(o.dtype),
                      .batch = 1,
                      .seq_len = o.context});
  const std::unique_ptr<Tokenizer> tokenizer = loaded.tokenizer();
  // Training put an end-of-text token before each document: a prompt starts one.
  std::vector<int32_t> text = {tokenizer->eot()};
  for (const int32_t token : tokenizer->encode(o.prompt)) text.push_back(token);
  std::fputs(o.prompt.c_str(), stdout);

  const Philox random(o.seed, 0);
  const int64_t T = loaded.activations().T();
  for (int64_t i = 0; i < o.tokens; ++i) {
    // What stands behind the last token cannot reach it, so the padding may be anything.
    const int64_t n = std::min<int64_t>(T, static_cast<int64_t>(text.size()));
    std::vector<int32_t> window(text.end() - n, text.end());
    window.resize(static_cast<size_t>(T), 0);
    loaded.set_tokens(window);
    loaded.model().forward(loaded.ctx(), loaded.activations());
    const std::vector<float> logits = finite_logits(loaded, n - 1, o.checkpoint);
    const int32_t next = sample_token(logits, o.sampling, random.uniform(static_cast<uint64_t>(i)));
    if (next == tokenizer->eot()) break;
    text.push_back(next);
    std::fputs(next < tokenizer->vocab_size() ? tokenizer->decode(std::array{next}).c_str() : "?", stdout);
    TRIAD_CHECK(std::fflush(stdout) == 0, "standard output cannot be written: {}", std::strerror(errno));
  }
  std::fputs("\n", stdout);
}

}  // namespace

void add_generate(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("generate", "sample text from a checkpoint");
  verb->add_option("--checkpoint", o->checkpoint, "a checkpoint, or a run's folder")->required();
  verb->add_option("--prompt", o->prompt, "the text to go on from")->required();
  verb->add_option("--tokens", o->tokens, "tokens to sample at most")
      ->check(within(at_least(0).up_to(kMaxInteger)))
      ->capture_default_str();
  verb->add_option("--context", o->context, "tokens the model looks back; 0: its training length")
      ->check(within(at_least(0).up_to(kMaxSeqLen)))
      ->capture_default_str();
  verb->add_option("--temperature", o->sampling.temperature, "0: greedy")
      ->check(within(at_least(0)))
      ->capture_default_str();
  verb->add_option("--top-k", o->sampling.top_k, "0: all")
      ->check(within(at_least(0).up_to(kMaxInteger)))
      ->capture_default_str();
  verb->add_option("--top-p", o->sampling.top_p, "nucleus")->check(within(at_least(0).up_to(1)))->capture_default_str();
  verb->add_option("--seed", o->seed, "same seed, same text")
      ->check(within(at_least(0).up_to(kMaxInteger)))
      ->capture_default_str();
  verb->add_option("--device", o->device, "auto, cpu or cuda")->capture_default_str();
  verb->add_option("--dtype", o->dtype, "f64, f32 or bf16")->capture_default_str();
  verb->callback([o] { generate(*o); });
}

}  // namespace triad
