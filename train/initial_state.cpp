#include "train/initial_state.h"

#include <fmt/ranges.h>
#include <zlib.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "io/checkpoint.h"
#include "kernels/common/integer.h"
#include "kernels/ops/cast.h"
#include "train/run_folder.h"
#include "train/startup.h"

namespace triad {

namespace {

constexpr const char* kSameFiles = "do they see the same files?";

// CRC-32 of the parameters that all ranks together have, as fp32.
int64_t checksum_of(Context& ctx, Optimizer& optimizer) {
  constexpr int64_t kAtATime = 1 << 24;
  std::vector<float> host;
  uLong crc = 0;
  optimizer.gather(ctx, Optimizer::State::parameter, [&](const ElementRange&, const Tensor& values) {
    for (int64_t begin = 0; begin < values.numel(); begin += kAtATime) {
      const int64_t n = std::min(kAtATime, values.numel() - begin);
      host.resize(static_cast<size_t>(n));
      read_floats(ctx, host.data(), values.slice(0, begin, begin + n));
      crc = crc32_z(crc, reinterpret_cast<const Bytef*>(host.data()), static_cast<size_t>(n) * sizeof(float));
    }
  });
  return static_cast<int64_t>(crc);
}

// Loads the weights of train.init_from. Those of a dense model can begin an NSA model (model/from_dense.h).
void load_init(Context& ctx, const Params& params, Optimizer& optimizer, const Config& config, const ModelSource& from,
               Comm* shards) {
  if (config.model.has_nsa() && !from.config.model.has_nsa())
    read_dense_weights(ctx, params, optimizer, from.weights, static_cast<uint64_t>(config.train.seed), shards);
  else
    read_weights(ctx, params, optimizer, from.weights, shards);
}

// CRC-32 of a source's tokens: of all of them, or if there are more than `most`, of pieces from its beginning to its
// end.
uint32_t checksum_of(const TokenSource& source, int64_t most) {
  constexpr int64_t kPiece = 4096;
  const int64_t size = source.size(), all = ceil_div(size, kPiece), pieces = std::min(all, ceil_div(most, kPiece));
  std::vector<int32_t> tokens;
  uLong crc = 0;
  for (int64_t i = 0; i < pieces; ++i) {
    // The first and the last piece are always among them.
    const int64_t piece = pieces == 1 ? 0 : static_cast<int64_t>(static_cast<__int128>(i) * (all - 1) / (pieces - 1));
    const int64_t begin = piece * kPiece;
    tokens.resize(static_cast<size_t>(std::min(kPiece, size - begin)));
    source.read(begin, tokens);
    crc = crc32_z(crc, reinterpret_cast<const Bytef*>(tokens.data()), tokens.size() * sizeof(int32_t));
  }
  return static_cast<uint32_t>(crc);
}

// What of a split the ranks must agree on, because each rank computes the order of the rows and counts the targets of
// a step (Batch::step_targets) for all ranks from its own files. use: train or evaluate.
void add_facts(std::vector<RankFact>& facts, const Config& config, const TokenSource& source, const char* use) {
  const auto add = [&](const char* what, const auto& value) {
    facts.push_back({fmt::format(fmt::runtime(what), use), fmt::format("{}", value)});
  };
  const MaskView mask = source.mask();
  const DocumentIndex* const index = source.documents();
  add("the tokens to {} on are", source.size());
  add("the learned tokens to {} on are", mask.count(0, source.size()));
  add("the checksum of the loss mask to {} with is", mask.empty() ? 0 : mask.mask->checksum());
  add("the separator (-1: unknown) of the documents to {} on is token", index == nullptr ? -1 : index->eot);
  add("the place of the separator (0: first, 1: last) in the documents to {} on is",
      index == nullptr ? -1 : static_cast<int64_t>(index->separator));
  add("the documents to {} on are", index == nullptr ? -1 : index->count());
  add("the beginnings of the documents to {} on have checksum", index == nullptr ? 0 : index->checksum());
  // Generated tokens follow from the config. Of shards, which may be larger than memory, a sample.
  constexpr int64_t kMostOfShards = int64_t{1} << 24;
  if (config.data.kind == DataKind::text || config.data.kind == DataKind::shards)
    add("the checksum of the tokens to {} on is",
        fmt::format("{:08x}", checksum_of(source, config.data.kind == DataKind::text ? source.size() : kMostOfShards)));
}

std::string describe(const Tokenizer& tokenizer) {
  std::vector<std::string> files;
  for (const auto& [name, content] : tokenizer.files())
    files.push_back(fmt::format("{} of {} bytes with checksum {:08x}", name, content.size(),
                                crc32_z(0, reinterpret_cast<const Bytef*>(content.data()), content.size())));
  return files.empty() ? tokenizer.name() : fmt::format("{}", fmt::join(files, ", "));
}

// Throws an Error on every rank if the ranks differ in the step or the weights. read_weights: whether the weights were
// read from files.
void compare_ranks(Context& ctx, Comm& comm, Optimizer& optimizer, const RunState& state, bool read_weights) {
  std::vector<RankFact> facts = {{"the step to go on from is", fmt::format("{}", state.step)}};
  if (read_weights)
    facts.push_back({"the weights to begin with have checksum", fmt::format("{:08x}", checksum_of(ctx, optimizer))});
  require_alike(comm, facts, kSameFiles);
}

// RunState::data of a run on this data: the numbers of tokens, learned tokens and documents (null: unknown) of each
// split. Null for generated data, which its config determines.
Json count_data(const Config& config, const DataSource& data) {
  if (config.data.kind != DataKind::text && config.data.kind != DataKind::shards) return {};
  const auto counts = [](const TokenSource& source) {
    const DocumentIndex* const index = source.documents();
    return Json{{"tokens", source.size()},
                {"learned", source.mask().count(0, source.size())},
                {"documents", index == nullptr ? Json() : Json(index->count())}};
  };
  return {{"train", counts(*data.train)}, {"val", counts(*data.val)}};
}

// Throws an Error if a checkpoint's counts of its data differ from those of now. Documents that were unknown then or
// are now are not compared: the rows of such a run do not depend on them.
void check_counts(const Json& before, const Json& now, const std::string& resume_from, const DataSource& data) {
  if (before.is_null() || now.is_null()) return;
  for (const char* split : {"train", "val"})
    for (const char* key : {"tokens", "learned", "documents"}) {
      const Json then = before.value(split, Json::object()).value(key, Json()), value = now[split][key];
      if (then.is_null() || value.is_null() || then == value) continue;
      const TokenSource& source = split == std::string("train") ? *data.train : *data.val;
      fail("{}/{}: its data.{}.{} is {}, but {} has {} now: a resume needs the data that the run had", resume_from,
           kStateFile, split, key, brief(then), source.name(), brief(value));
    }
}

}  // namespace

std::optional<ModelSource> find_init(const Config& config, const std::string& resume_from) {
  if (config.train.init_from.empty() || !resume_from.empty()) return {};
  const ModelSource source = [&] {
    try {
      return find_model(config.train.init_from);
    } catch (const UsageError& e) { fail_usage("train.init_from: {}", e.what()); } catch (const Error& e) {
      fail("train.init_from: {}", e.what());
    }
  }();
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

void compare_data(Comm& comm, const Config& config, const Tokenizer& tokenizer, const DataSource& data) {
  if (comm.world() == 1) return;
  // The tokenizer first, because another one makes other tokens of the same text.
  std::vector<RankFact> facts = {{"the tokenizer is", describe(tokenizer)}};
  add_facts(facts, config, *data.train, "train");
  add_facts(facts, config, *data.val, "evaluate");
  require_alike(comm, facts, kSameFiles);
}

RunState begin_run(Context& ctx, TrainStep& step, Comm& comm, const Config& config, const DataSource& data,
                   const std::string& resume_from, const std::optional<ModelSource>& init_from) {
  Params& params = step.model().params();
  RunState state;
  if (!resume_from.empty()) {
    state = load_checkpoint(ctx, resume_from, params, step.optimizer(), config, step.shards());
    if (state.step > config.train.steps)
      fail_usage("train.steps is {}, but {} is at step {} already", config.train.steps, resume_from, state.step);
  } else {
    if (init_from) {
      load_init(ctx, params, step.optimizer(), config, *init_from, step.shards());
      state.origin = init_from->origin;
    } else {
      step.optimizer().init(ctx, static_cast<uint64_t>(config.train.seed));
      ctx.stream.synchronize();  // so that the start's times count the drawing as their phase "weights"
    }
  }
  if (comm.world() > 1) compare_ranks(ctx, comm, step.optimizer(), state, !resume_from.empty() || init_from);
  Json counts = count_data(config, data);
  check_counts(state.data, counts, resume_from, data);
  state.data = std::move(counts);
  return state;
}

}  // namespace triad
