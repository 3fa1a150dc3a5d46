#include "model/decode_session.h"

#include <algorithm>

#include "engine/check.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

// Bytes that activations need for a forward pass over n tokens.
int64_t activation_bytes(const ModelConfig& config, Device device, DType dtype, int64_t n) {
  Arena arena = Arena::planned(device);
  Activations(arena, config, 1, n, dtype, /*keep=*/false);
  return arena.used_bytes();
}

}  // namespace

DecodeSession::DecodeSession(const ModelConfig& config, const Options& options)
    : config_(config), options_(options), step_{Graph(options.device)}, greedy_{Graph(options.device)} {
  int64_t arena_bytes = 0, scratch_bytes = 0;
  {
    Runtime planned({.device = options.device, .planning = true, .kernels = options.kernels});
    build(planned);
    arena_bytes = planned.arena().used_bytes();
    for (const int64_t n : options.prefills) {
      Arena arena = Arena::planned(options.device);
      Activations act(arena, config, 1, n, options.dtype, /*keep=*/false);
      decoder_->prefill(planned.ctx(), act, 0, n);
    }
    decoder_->step(planned.ctx());
    decoder_->choose_greedy(planned.ctx());
    scratch_bytes = planned.scratch().peak_bytes();
    arena_bytes += align_up(scratch_bytes);
  }
  runtime_ = std::make_unique<Runtime>(Runtime::Options{.device = options.device,
                                                        .arena_bytes = arena_bytes,
                                                        .scratch_bytes = scratch_bytes,
                                                        .kernels = options.kernels});
  build(*runtime_);
}

void DecodeSession::build(Runtime& runtime) {
  model_ = std::make_unique<Model>(
      runtime.ctx(), runtime.arena(), config_,
      Model::Options{.dtype = options_.dtype, .training = false, .max_seq_len = options_.context});
  decoder_ = std::make_unique<Decoder>(runtime.ctx(), runtime.arena(), *model_, options_.batch, options_.context);
}

void DecodeSession::prefill(int64_t b, std::span<const int32_t> text) {
  const int64_t n = static_cast<int64_t>(text.size());
  TRIAD_CHECK(std::find(options_.prefills.begin(), options_.prefills.end(), n) != options_.prefills.end(),
              "a prefill of {} tokens, which was not planned", n);
  for (const int32_t token : text)
    TRIAD_CHECK(token >= 0 && token < config_.vocab_size, "token {} is outside of the vocabulary of {}", token,
                config_.vocab_size);
  Arena arena(options_.device, activation_bytes(config_, options_.device, options_.dtype, n));
  Activations act(arena, config_, 1, n, options_.dtype, /*keep=*/false);
  write(ctx(), act.tokens, text.data());
  const std::vector<int32_t> no_targets(text.size(), -1);
  write(ctx(), act.targets, no_targets.data());
  decoder_->prefill(ctx(), act, b, n);
  ctx().stream.synchronize();  // the work on the stream must be done before the function frees `arena`
}

// On a GPU, the first call runs the work directly, which loads kernels and chooses algorithms; the second call records
// it as a graph, and every later call launches the graph. On a CPU every call runs the work.
template <class Work>
void DecodeSession::replay(Recorded& recorded, Work&& work) {
  if (!options_.device.is_cuda() || recorded.runs++ == 0) {
    work();
  } else {
    if (!recorded.graph.recorded()) recorded.graph.record(ctx(), work);
    recorded.graph.launch(ctx().stream);
  }
}

std::vector<int32_t> DecodeSession::chosen() {
  std::vector<int32_t> tokens(static_cast<size_t>(batch()));
  read(ctx(), tokens.data(), decoder_->tokens);
  return tokens;
}

std::vector<int32_t> DecodeSession::choose_greedy() {
  decoder_->choose_greedy(ctx());
  return chosen();
}

std::vector<int32_t> DecodeSession::step_greedy() {
  replay(greedy_, [&] {
    decoder_->queue(ctx());
    decoder_->choose_greedy(ctx());
  });
  decoder_->stepped();
  return chosen();
}

void DecodeSession::step(std::span<const int32_t> tokens) {
  TRIAD_CHECK(static_cast<int64_t>(tokens.size()) == batch(), "{} tokens for {} sequences", tokens.size(), batch());
  for (const int32_t token : tokens)
    TRIAD_CHECK(token >= 0 && token < config_.vocab_size, "token {} is outside of the vocabulary of {}", token,
                config_.vocab_size);
  write(ctx(), decoder_->tokens, tokens.data());
  replay(step_, [&] { decoder_->queue(ctx()); });
  decoder_->stepped();
}

std::vector<float> DecodeSession::logits(int64_t b) {
  const Tensor row = decoder_->logits[b].slice(0, 0, config_.vocab_size);
  std::vector<std::byte> raw(static_cast<size_t>(row.bytes()));
  read(ctx(), raw.data(), row);
  std::vector<float> logits(static_cast<size_t>(row.numel()));
  dispatch_float(row.dtype, [&]<class T>() {
    for (size_t i = 0; i < logits.size(); ++i)
      logits[i] = static_cast<float>(reinterpret_cast<const T*>(raw.data())[i]);
  });
  return logits;
}

}  // namespace triad
