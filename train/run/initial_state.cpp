#include "train/run/initial_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <zlib.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "io/chat/chat_format.h"
#include "io/checkpoint.h"
#include "io/data/data_files.h"
#include "kernels/common/integer.h"
#include "kernels/ops/cast.h"
#include "model/from_dense.h"
#include "train/checkpoint/adapted_weights.h"
#include "train/checkpoint/peft_adapter.h"
#include "train/run/run_folder.h"
#include "train/run/startup.h"

namespace triad {

namespace {

constexpr const char* kSameFiles = "do they see the same files?";

// CRC-32 over the parameters that all ranks together have, as fp32.
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

void load_init(Context& ctx, const Params& params, Optimizer& optimizer, const Config& config, const ModelSource& from,
               Comm* shards) {
  const ModelConfig& theirs = from.config.model;
  const NameOf name_of = init_names(config.model, theirs);
  if (config.train.lora) {
    const std::vector<ParamSpec> base = param_specs(theirs);
    const NameOf trained = [&](const ParamSpec& spec) {
      return is_adapter(spec.role) ? std::string() : name_of ? name_of(spec) : spec.name;
    };
    read_other_weights(ctx, params, optimizer, from.weights, trained, base, static_cast<uint64_t>(config.train.seed),
                       shards);
    if (!config.train.lora->init_from.empty()) read_peft_adapter(ctx, params, optimizer, *config.train.lora);
    return;
  }
  if (!name_of) return read_weights(ctx, params, optimizer, from.weights, shards);
  std::vector<ParamSpec> unread;
  if (theirs.has_nsa())
    for (const ParamSpec& spec : param_specs(theirs))
      if (spec.name.find(".attn.") != std::string::npos) unread.push_back(spec);
  read_other_weights(ctx, params, optimizer, from.weights, name_of, unread, static_cast<uint64_t>(config.train.seed),
                     shards);
}

// CRC-32 over a source's tokens: all, or if there are more than `most`, pieces from its beginning to its end.
uint32_t checksum_of(const TokenSource& source, int64_t most) {
  constexpr int64_t kPiece = 4096;
  const int64_t size = source.size(), all = ceil_div(size, kPiece), pieces = std::min(all, ceil_div(most, kPiece));
  std::vector<int32_t> tokens;
  uLong crc = 0;
  for (int64_t i = 0; i < pieces; ++i) {
    // The first and the last piece are always included.
    const int64_t piece = pieces == 1 ? 0 : static_cast<int64_t>(static_cast<__int128>(i) * (all - 1) / (pieces - 1));
    const int64_t begin = piece * kPiece;
    tokens.resize(static_cast<size_t>(std::min(kPiece, size - begin)));
    source.read(begin, tokens);
    crc = crc32_z(crc, reinterpret_cast<const Bytef*>(tokens.data()), tokens.size() * sizeof(int32_t));
  }
  return static_cast<uint32_t>(crc);
}

// What the ranks must agree on in a split, because each rank computes the row order and counts a step's targets
// (Batch::step_targets) for all ranks from its own files. use: train or evaluate. component: "component 2: ", or empty.
void add_facts(std::vector<RankFact>& facts, const Config& config, const TokenSource& source, const char* use,
               const std::string& component) {
  const auto add = [&](const char* what, const auto& value) {
    facts.push_back({component + fmt::format(fmt::runtime(what), use), fmt::format("{}", value)});
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
  // Generated tokens follow from the config. Shards, which may be larger than memory, are sampled.
  constexpr int64_t kMostOfShards = int64_t{1} << 24;
  if (config.data.kind == DataKind::text || config.data.kind == DataKind::shards)
    add("the checksum of the tokens to {} on is",
        fmt::format("{:08x}", checksum_of(source, config.data.kind == DataKind::text ? source.size() : kMostOfShards)));
}

void add_facts(std::vector<RankFact>& facts, const Config& config, const Mixture& data, const char* use) {
  for (size_t i = 0; i < data.count(); ++i)
    add_facts(facts, config, *data.sources()[i], use, data.count() > 1 ? fmt::format("component {}: ", i + 1) : "");
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
  if (!state.base.is_null()) facts.push_back({"the frozen weights' files have the checksums", state.base.dump()});
  if (read_weights)
    facts.push_back({"the weights to begin with have checksum", fmt::format("{:08x}", checksum_of(ctx, optimizer))});
  require_alike(comm, facts, kSameFiles);
}

// RunState::data for a run on this data: each split's tokens, learned tokens and documents (null: unknown), counted,
// and its files. Null for generated data, which its config determines.
Json describe_data(const Config& config, const DataSource& data) {
  if (config.data.kind != DataKind::text && config.data.kind != DataKind::shards) return {};
  const auto describe = [](const Mixture& split) {
    const int64_t documents = split.documents();
    Json json = {{"tokens", split.size()},
                 {"learned", split.learned()},
                 {"documents", documents < 0 ? Json() : Json(documents)}};
    if (split.sources().front()->files() != nullptr) json["files"] = files_to_json(split.files());
    return json;
  };
  const auto are_of_train = [&] {
    if (data.val.count() != data.train.count()) return false;
    for (size_t i = 0; i < data.val.count(); ++i)
      if (data.val.sources()[i]->files() != data.train.sources()[i]->files()) return false;
    return true;
  };
  Json json = {{"train", describe(data.train)}, {"val", describe(data.val)}};
  if (are_of_train()) json["val"].erase("files");
  if (data.chat != nullptr) json["chat"] = data.chat->to_json();
  if (data.components.empty()) return json;
  for (size_t i = 0; i < data.train.count(); ++i) {
    const TokenSource& source = *data.train.sources()[i];
    json["train"]["mixture"].push_back(
        {{"share", data.train.share(i)}, {"tokens", source.size()}, {"files", source.files()->size()}});
  }
  return json;
}

// In what the components of a checkpoint's data differ from today's. They decide which rows are drawn.
std::vector<std::string> changed_components(const Json& before, const Json& now, const DataSource& data) {
  const size_t components = before.is_array() ? before.size() : 1;
  if (components != data.train.count())
    return {fmt::format("its data.paths has {}, and now {}", counted(components, "component"), data.train.count())};
  std::vector<std::string> changed;
  for (size_t i = 0; i < data.components.size(); ++i)
    for (const auto& [key, is] : now[i].items())
      if (const Json was = before[i].is_object() ? before[i].value(key, Json()) : Json(); was != is)
        changed.push_back(fmt::format("its data.train.mixture[{}].{} is {}, but {} has {} now", i, key, brief(was),
                                      data.components[i], brief(is)));
  return changed;
}

// In what a checkpoint's data differ from today's, a line each. Documents that were unknown then or are now are not
// compared: such a run's rows don't depend on them. Nor are files that a checkpoint does not know.
std::vector<std::string> changed_data_since(const Json& before, const Json& now, const std::string& state_path,
                                            const DataSource& data) {
  std::vector<std::string> changed;
  if (before.is_null() || now.is_null()) return changed;
  const bool knows_files = before.value("train", Json::object()).contains("files");
  if (knows_files)
    changed = changed_components(before["train"].value("mixture", Json()), now["train"].value("mixture", Json()), data);
  if (const Json was = before.value("chat", Json()), is = now.value("chat", Json());
      !was.is_null() && !is.is_null() && !same_chat(was, is))
    changed.push_back(fmt::format("its conversations were in the chat template of {}, and now are in another, of {}",
                                  brief(was.value("source", Json())), brief(is.value("source", Json()))));
  for (const char* split : {"train", "val"}) {
    const Json then = before.value(split, Json::object());
    const Mixture& source = split == std::string("train") ? data.train : data.val;
    for (const char* key : {"tokens", "learned", "documents"}) {
      const Json was = then.value(key, Json()), is = now[split][key];
      if (!was.is_null() && !is.is_null() && was != is)
        changed.push_back(
            fmt::format("its data.{}.{} is {}, but {} has {} now", split, key, brief(was), source.name(), brief(is)));
    }
    if (!knows_files) continue;
    const auto files = [&](const Json& of) {
      return files_from_json(of.value("files", Json::array()), fmt::format("{}: data.{}.files", state_path, split));
    };
    if (const std::string text = changed_files(files(then), files(now[split])); !text.empty())
      changed.push_back(fmt::format("files of {}: {}", source.name(), text));
  }
  return changed;
}

}  // namespace

std::optional<ModelSource> find_init(const Config& config, const std::string& resume_from) {
  if (config.train.init_from.empty() || (!resume_from.empty() && !config.train.lora)) return {};
  const ModelSource source = find_base(config);
  if (!resume_from.empty()) return source;
  if (is_inside(source.weights, config.log.out_dir))
    fail_usage("train.init_from is {}, in log.out_dir = {}, which this run begins anew", config.train.init_from,
               config.log.out_dir);
  return source;
}

std::string describe_init(const Config& config, const ModelSource& from) {
  std::vector<ParamSpec> fresh;
  std::string frozen;
  if (const auto& lora = config.train.lora)
    frozen = fmt::format(", which stay as they are; trains {} parameters: adapters of rank {}{}",
                         count_elements(trained_specs(config.model, lora)), lora->rank,
                         config.model.has_nsa() ? ", gates, phi and index" : "");
  if (const NameOf name_of = init_names(config.model, from.config.model))
    for (const ParamSpec& spec : param_specs(config.model))
      if (name_of(spec).empty()) fresh.push_back(spec);
  const std::string text = describe_fresh(fresh);
  return fmt::format("begins with the weights of {}{}{}", from.weights, frozen, text.empty() ? "" : "; " + text);
}

DataSource open_data_for(const TrainRequest& request, const Tokenizer& tokenizer, const std::string& resume_from,
                         const std::optional<ModelSource>& init_from) {
  const Config& config = request.config;
  if (!resume_from.empty()) check_tokenizer(resume_from, tokenizer);
  if (init_from && resume_from.empty()) {
    const std::string& theirs = init_from->config.data.tokenizer;
    const bool known = !theirs.empty() && theirs != kNoTokenizer && !config.data.tokenizer.empty();
    if (known && tokenizer_of_checkpoint(init_from->folder, theirs)->files() != tokenizer.files())
      fail(
          "train.init_from is {}, of data.tokenizer = {}: tokens of data.tokenizer = {} would mean something else to "
          "its weights",
          config.train.init_from, theirs, config.data.tokenizer);
  }
  return open_data(config, &tokenizer, request.accept_changed_data);
}

void compare_data(Comm& comm, const Config& config, const Tokenizer& tokenizer, const DataSource& data) {
  if (comm.world() == 1) return;
  // The tokenizer first, because another one turns the same text into other tokens.
  std::vector<RankFact> facts = {{"the tokenizer is", describe(tokenizer)}};
  add_facts(facts, config, data.train, "train");
  add_facts(facts, config, data.val, "evaluate");
  require_alike(comm, facts, kSameFiles);
}

RunState begin_run(Context& ctx, TrainStep& step, Comm& comm, const TrainRequest& request, const DataSource& data,
                   const std::string& resume_from, const std::optional<ModelSource>& init_from,
                   std::string& changed_data) {
  const Config& config = request.config;
  Params& params = step.model().params();
  RunState state;
  if (!resume_from.empty()) {
    state =
        load_checkpoint(ctx, resume_from, params, step.optimizer(), config, step.shards(), request.accept_changed_data);
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
  if (config.train.lora) {
    if (!resume_from.empty()) check_base(resume_from, state.base, *init_from);
    state.base = base_checksums(*init_from);
    load_base(ctx, *step.model().base(), config.model, *init_from);
  }
  if (comm.world() > 1) compare_ranks(ctx, comm, step.optimizer(), state, !resume_from.empty() || init_from);
  Json now = describe_data(config, data);
  const std::string state_path = resume_from + "/" + kStateFile;
  const std::vector<std::string> changed = changed_data_since(state.data, now, state_path, data);
  if (!changed.empty()) {
    changed_data = fmt::format("{}: {}", state_path, fmt::join(changed, "; "));
    if (!request.accept_changed_data)
      fail("{}: a resume needs the data that the run had (--accept-changed-data goes on all the same)", changed_data);
    state.groups = {};  // other documents have other rows
  }
  if (!resume_from.empty()) check_epochs(config, data, comm.world(), state.step, state.cursor);
  state.data = std::move(now);
  return state;
}

}  // namespace triad
