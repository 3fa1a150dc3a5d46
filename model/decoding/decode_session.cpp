#include "model/decoding/decode_session.h"

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

// In a pass over several texts each begins at a multiple of this many tokens, which is one of all kernels' tiles.
constexpr int64_t kTextAlign = 128;

// The most texts in a pass over T tokens.
int64_t most_texts(Device device, int64_t T) { return device.is_cuda() ? T / kTextAlign : 1; }

constexpr int64_t kGpuShortest = 2048, kGpuShared = 8192, kGpuGrowth = 4, kCpuShortest = 16;

// The longest text that a pass over T tokens starts. On a GPU the short texts of a batch share a long pass, of
// kGpuShared tokens or more: they keep it busy for longer than the pass takes to queue. The shortest pass is for texts
// of which it holds at least 8, so that one that starts alone waits less. In a batch of one nothing is shared.
int64_t longest_text(Device device, int64_t T, int64_t batch) {
  return device.is_cuda() && batch > 1 && T < kGpuShared ? T / 8 : T;
}

// The tokens of the pass that starts a text of n tokens, in a context that holds at least as many. Few lengths are
// possible, because memory is planned for each. On the CPU, where a text has a pass of its own, it is at most half
// longer.
int64_t pass_tokens(Device device, int64_t n, int64_t context, int64_t batch) {
  if (!device.is_cuda()) {
    int64_t T = kCpuShortest;
    while (T < n) T = T + T / 2 >= n ? T + T / 2 : 2 * T;
    return std::min(T, context);
  }
  int64_t T = kGpuShortest;
  while (longest_text(device, T, batch) < n) T *= kGpuGrowth;
  return std::min(T, std::max(batch > 1 ? kGpuShared : kGpuShortest, align_up(context, kTextAlign)));
}

// The lengths of all passes that start texts of up to `context` tokens, ascending.
std::vector<int64_t> all_passes(Device device, int64_t context, int64_t batch) {
  std::vector<int64_t> passes;
  for (int64_t n = 1; n <= context; n = longest_text(device, passes.back(), batch) + 1)
    passes.push_back(pass_tokens(device, n, context, batch));
  return passes;
}

}  // namespace

DecodeSession::DecodeSession(const ModelConfig& config, const Options& options)
    : config_(config), options_(options), step_{Graph(options.device)}, greedy_{Graph(options.device)} {
  const Sizes sizes = plan();
  runtime_ = std::make_unique<Runtime>(Runtime::Options{.device = options.device,
                                                        .arena_bytes = sizes.arena,
                                                        .scratch_bytes = sizes.scratch,
                                                        .kernels = options.kernels});
  build(*runtime_);
}

DecodeSession::DecodeSession(const ModelConfig& config, const Options& options, PlanOnly)
    : config_(config), options_(options), step_{Graph(options.device)}, greedy_{Graph(options.device)} {}

int64_t DecodeSession::planned_bytes(const ModelConfig& config, const Options& options) {
  return DecodeSession(config, options, PlanOnly()).plan().arena;
}

DecodeSession::Sizes DecodeSession::plan() {
  Runtime planned({.device = options_.device, .planning = true, .kernels = options_.kernels});
  build(planned);
  const int64_t arena = planned.arena().used_bytes();
  const auto prefill = [&](Activations& act, int64_t n) {
    const Decoder::Prompt prompt = {0, 0, n};
    decoder_->prefill(planned.ctx(), act, {&prompt, 1});
  };
  for (const int64_t n : options_.prefills) {
    Arena temporary = Arena::planned(options_.device);
    Activations act(temporary, config_, 1, n, options_.dtype, /*keep=*/false);
    prefill(act, n);
  }
  for (auto& [T, act] : passes_) prefill(act, std::min(T, options_.context));
  decoder_->step(planned.ctx());
  decoder_->choose_greedy(planned.ctx());
  const int64_t scratch = planned.scratch().peak_bytes();
  passes_.clear(), decoder_.reset(), model_.reset();
  return {.arena = arena + align_up(scratch), .scratch = scratch};
}

void DecodeSession::build(Runtime& runtime) {
  int64_t longest = options_.context;
  if (options_.starts)
    longest = std::max(longest, all_passes(options_.device, options_.context, options_.batch).back());
  if (options_.model == nullptr)
    model_ =
        std::make_unique<Model>(runtime.ctx(), runtime.arena(), config_,
                                Model::Options{.dtype = options_.dtype, .training = false, .max_seq_len = longest});
  decoder_ = std::make_unique<Decoder>(runtime.ctx(), runtime.arena(), model(), options_.batch, options_.context);
  if (options_.starts) build_passes(runtime.arena());
}

void DecodeSession::build_passes(Arena& arena) {
  const std::vector<int64_t> lengths = all_passes(options_.device, options_.context, options_.batch);
  const auto documents = [&](int64_t T) {  // a lone text is the whole row
    const int64_t texts = most_texts(options_.device, T);
    return texts > 1 ? texts : 0;
  };
  ActivationMemory memory([&](MemTag tag, const std::string& name, DType dtype, const Shape& shape, int64_t) {
    return arena.alloc(tag, name, dtype, shape);
  });
  for (const int64_t T : lengths) {
    Arena planned = Arena::planned(options_.device);
    Activations(planned, config_, 1, T, options_.dtype, /*keep=*/false, {}, documents(T));
    memory.reserve(planned);
  }
  const auto take = [&](MemTag tag, const std::string& name, DType dtype, const Shape& shape, int64_t layer) {
    return memory.take(tag, name, dtype, shape, layer);
  };
  for (const int64_t T : lengths)
    passes_.try_emplace(T, take, config_, 1, T, options_.dtype, /*keep=*/false, RecomputePlan(), documents(T),
                        SequenceLayout());
}

void DecodeSession::check_tokens(std::span<const int32_t> tokens) const {
  for (const int32_t token : tokens)
    TRIAD_CHECK(token >= 0 && token < config_.vocab_size, "token {} is outside of the vocabulary of {}", token,
                config_.vocab_size);
}

void DecodeSession::prefill(int64_t b, std::span<const int32_t> text) {
  const int64_t n = static_cast<int64_t>(text.size());
  TRIAD_CHECK(std::find(options_.prefills.begin(), options_.prefills.end(), n) != options_.prefills.end(),
              "a prefill of {} tokens, which was not planned", n);
  Arena arena(options_.device, activation_bytes(config_, options_.device, options_.dtype, n));
  Activations act(arena, config_, 1, n, options_.dtype, /*keep=*/false);
  const Start only = {b, text};
  run_pass(act, {&only, 1});
  ctx().stream.synchronize();  // the work on the stream must be done before the function frees `arena`
}

void DecodeSession::start(std::span<const Start> starts) {
  std::map<int64_t, std::vector<Start>> by_pass;
  for (const Start& s : starts) {
    const int64_t n = static_cast<int64_t>(s.text.size());
    TRIAD_CHECK(n >= 1 && n <= options_.context && !passes_.empty(), "a text of {} tokens starts in a context of {}", n,
                options_.context);
    by_pass[pass_tokens(options_.device, n, options_.context, options_.batch)].push_back(s);
  }
  for (const auto& [T, all] : by_pass) {
    Activations& act = passes_.at(T);
    for (size_t begin = 0; begin < all.size();) {
      size_t end = begin;
      for (int64_t used = 0; end < all.size(); ++end) {
        used += align_up(static_cast<int64_t>(all[end].text.size()), kTextAlign);
        if (end > begin && (used > T || act.bounds.empty())) break;
      }
      run_pass(act, std::span(all).subspan(begin, end - begin));
      begin = end;
    }
  }
}

void DecodeSession::run_pass(Activations& act, std::span<const Start> starts) {
  std::vector<int32_t> tokens(static_cast<size_t>(act.T()), 0), bounds;
  std::vector<Decoder::Prompt> prompts;
  int64_t begin = 0;
  for (const Start& s : starts) {
    check_tokens(s.text);
    std::copy(s.text.begin(), s.text.end(), tokens.begin() + static_cast<std::ptrdiff_t>(begin));
    bounds.push_back(static_cast<int32_t>(begin));
    prompts.push_back({s.b, begin, static_cast<int64_t>(s.text.size())});
    begin += align_up(prompts.back().n, kTextAlign);
  }
  write(ctx(), act.tokens, tokens.data());
  if (!act.bounds.empty()) {  // a document's length decides how it is attended, so the row's rest is one of its own
    bounds.push_back(static_cast<int32_t>(begin));
    bounds.resize(static_cast<size_t>(act.bounds.size(0)), static_cast<int32_t>(act.T()));
    write(ctx(), act.bounds, bounds.data());
  }
  decoder_->prefill(ctx(), act, prompts);
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

std::vector<int32_t> DecodeSession::step_greedy(std::span<const int32_t> tokens, std::span<const int64_t> idle) {
  write_tokens(tokens);
  if (!idle.empty()) decoder_->forget(ctx(), idle);
  return step_greedy();
}

void DecodeSession::write_tokens(std::span<const int32_t> tokens) {
  TRIAD_CHECK(static_cast<int64_t>(tokens.size()) == batch(), "{} tokens for {} sequences", tokens.size(), batch());
  check_tokens(tokens);
  write(ctx(), decoder_->tokens, tokens.data());
}

void DecodeSession::step(std::span<const int32_t> tokens) {
  write_tokens(tokens);
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
