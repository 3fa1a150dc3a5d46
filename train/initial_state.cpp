#include "train/initial_state.h"

#include <zlib.h>

#include <algorithm>
#include <vector>

#include "engine/check.h"
#include "train/run_folder.h"

namespace triad {

namespace {

// CRC-32 of the fp32 master weights, which are read in chunks.
int64_t checksum_of(Context& ctx, const Params& params) {
  constexpr int64_t kAtATime = 1 << 24;
  const Tensor master = params.master();
  std::vector<float> host(static_cast<size_t>(std::min(kAtATime, master.numel())));
  uLong crc = 0;
  for (int64_t begin = 0; begin < master.numel(); begin += kAtATime) {
    const int64_t n = std::min(kAtATime, master.numel() - begin);
    read(ctx, host.data(), master.slice(0, begin, begin + n));
    crc = crc32_z(crc, reinterpret_cast<const Bytef*>(host.data()), static_cast<size_t>(n) * sizeof(float));
  }
  return static_cast<int64_t>(crc);
}

// Loads the weights of train.init_from. Those of a dense model can begin an NSA model (model/from_dense.h).
void load_init(Context& ctx, Params& params, const Config& config, const ModelSource& from) {
  if (config.model.has_nsa() && !from.config.model.has_nsa())
    load_dense_weights(ctx, params, from.weights, static_cast<uint64_t>(config.train.seed));
  else
    load_weights(ctx, params, from.weights);
}

}  // namespace

std::optional<ModelSource> find_init(const Config& config, const std::string& resume_from) {
  if (config.train.init_from.empty() || !resume_from.empty()) return {};
  const ModelSource source = find_model(config.train.init_from);
  if (is_inside(source.weights, config.log.out_dir))
    fail_usage("train.init_from is {}, in log.out_dir = {}, which this run begins anew", config.train.init_from,
               config.log.out_dir);
  return source;
}

DataSource open_data_for(const Config& config, const Tokenizer& tokenizer, const std::string& resume_from,
                         const std::optional<ModelSource>& init_from) {
  if (!resume_from.empty()) check_tokenizer(resume_from, tokenizer);
  if (init_from) {
    const std::string& theirs = init_from->config.data.tokenizer;
    const bool known = !theirs.empty() && theirs != kNoTokenizer && !config.data.tokenizer.empty();
    if (known && tokenizer_of_checkpoint(init_from->folder, theirs)->files() != tokenizer.files())
      fail(
          "train.init_from is {}, of data.tokenizer = {}: tokens of data.tokenizer = {} would mean something else to "
          "its weights",
          config.train.init_from, theirs, config.data.tokenizer);
  }
  return open_data(config, &tokenizer);
}

RunState begin_run(Context& ctx, TrainStep& step, Comm& comm, const Config& config, const DataSource& data,
                   const std::string& resume_from, const std::optional<ModelSource>& init_from) {
  Params& params = step.model().params();
  RunState state;
  if (!resume_from.empty()) {
    state = load_checkpoint(ctx, resume_from, params, step.optimizer(), config);
    if (state.step > config.train.steps)
      fail_usage("train.steps is {}, but {} is at step {} already", config.train.steps, resume_from, state.step);
  } else {
    if (init_from) {
      load_init(ctx, params, config, *init_from);
      state.origin = init_from->origin;
    } else {
      params.init(ctx, static_cast<uint64_t>(config.train.seed));
    }
  }
  if (comm.world() == 1) return state;
  const auto same = [&](int64_t own, const char* what) {
    for (const int64_t other : comm.all_gather_host(own, what))
      TRIAD_CHECK(other == own, "{} {} on rank {}, {} on another: do they see the same files?", what, own, comm.rank(),
                  other);
  };
  same(state.step, "the step to go on from is");
  if (!resume_from.empty() || init_from) same(checksum_of(ctx, params), "the weights to begin with have checksum");
  same(data.train->size(), "the tokens to train on are");
  same(data.val->size(), "the tokens to evaluate on are");
  return state;
}

}  // namespace triad
