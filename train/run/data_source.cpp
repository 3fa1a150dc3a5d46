#include "train/run/data_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>
#include <system_error>
#include <utility>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/text.h"
#include "io/chat/chat_format.h"
#include "io/checkpoint.h"
#include "io/data/shard_manifest.h"
#include "io/tokenizer/tokenizer.h"
#include "kernels/common/integer.h"
#include "train/checkpoint/state.h"
#include "train/config/load_config.h"
#include "train/monitor/banner.h"
#include "train/run/row_documents.h"
#include "train/run/startup.h"

namespace triad {

NeedleTask needle_task(const Config& c) {
  return {.kind = c.data.needle_task,
          .vocab = c.model.vocab_size,
          .seq_len = c.train.seq_len,
          .pairs = c.data.needle_pairs,
          .questions = c.data.needle_questions,
          .value_tokens = c.data.needle_value_tokens,
          .hops = c.data.needle_hops,
          .occurrences = c.data.needle_occurrences,
          .depth = c.data.needle_depth,
          .seed = static_cast<uint64_t>(c.data.seed)};
}

namespace {

// Whether it is known where documents begin in both splits.
bool knows_documents(const DataConfig& data) {
  if (data.kind != DataKind::shards) return data.kind == DataKind::text;
  const auto known = [](const std::vector<std::string>& patterns, ShardSplit split) {
    return patterns.empty() || find_manifests(expand_shards(patterns, split)).has_separator();
  };
  std::vector<std::string> val_paths = data.val_paths;
  for (const DataComponent& component : data.components)
    val_paths.insert(val_paths.end(), component.val_paths.begin(), component.val_paths.end());
  return known(data.paths(), ShardSplit::train) && known(val_paths, ShardSplit::val);
}

}  // namespace

bool attends_within(const DataConfig& data) {
  if (data.documents == DocumentScope::unset) return knows_documents(data);
  return data.documents == DocumentScope::attend_within;
}

namespace {

// Describes what share of the tokens a mask leaves; empty without a mask. Throws an Error if it leaves none to train
// on, or none in all rows of an evaluation.
std::string describe_mask(const Config& c, const Mixture& train, const Mixture& val) {
  std::string share;
  if (train.masked()) {
    int64_t learned = 0;
    for (const auto& source : train.sources()) {
      const int64_t source_learned = source->mask().count(1, source->size());
      if (source_learned == 0) fail("{}: its loss mask leaves no token that is learned", source->name());
      learned += source_learned;
    }
    share = fmt::format(", {} of them learned", percent(ratio(learned, train.size())));
  }
  if (!val.masked() || c.train.eval_every == 0) return share;
  const bool within = attends_within(c.data);
  for (const TrainStage& stage : stages_of(c.train)) {
    const int64_t T = stage.seq_len, rows = count_rows(val, T, c.train.eval_batches * stage.micro_batch_size);
    Draws draws(val.shares());
    bool any = false;
    for (int64_t row = 0; row < rows && !any; ++row) {
      const Draws::Draw draw = draws(row);
      any = count_stream_targets(*val.sources()[draw.component], draw.number * T, T, within) > 0;
    }
    if (!any)
      fail(
          "{}: its loss mask leaves no token that is learned in the first {} rows of {} tokens, which an evaluation "
          "reads",
          val.name(), rows, T);
  }
  return share;
}

// Checks the config against a manifest; sets data.tokenizer from it if the config names none.
void agree_with(Config& c, const ShardManifest& manifest) {
  if (manifest.vocab_size > c.model.vocab_size)
    fail_usage("model.vocab_size is {}: the tokenizer {} of the shards has {} tokens ({})", c.model.vocab_size,
               manifest.tokenizer, manifest.vocab_size, manifest.path);
  if (c.data.tokenizer.empty() || c.data.tokenizer == kNoTokenizer)
    c.data.tokenizer = manifest.checked_tokenizer();
  else if (!manifest.is_of(*open_tokenizer(c.data)))
    fail_usage("data.tokenizer is {}, but the shards hold tokens of {} ({})", c.data.tokenizer, manifest.tokenizer,
               manifest.path);
  if (!c.data.separator.empty() && !manifest.is_of(*open_tokenizer(c.data)))
    fail_usage("data.separator is \"{}\", but another token separates the documents of the shards in {}",
               shortened(c.data.separator), manifest.folder());
}

}  // namespace

namespace {

bool is_there(const std::string& file) { return std::filesystem::exists(file); }

// The folders of the manifests' validation shards. None if one of these shards is trained on (resolved paths): the
// split is by position instead. Training shards that were copied without their validation shards are not an error.
std::vector<std::string> listed_val_paths(const ShardOrigin& origin, const std::set<std::string>& trained_on) {
  const auto is_trained_on = [&](const std::string& file) {
    return is_there(file) && trained_on.contains(std::filesystem::canonical(file).string());
  };
  std::vector<std::string> folders;
  for (const ShardManifest& manifest : origin.manifests) {
    if (std::any_of(manifest.val.begin(), manifest.val.end(), is_trained_on)) return {};
    if (std::any_of(manifest.val.begin(), manifest.val.end(), is_there)) folders.push_back(manifest.folder());
  }
  return folders;
}

// Fills in val_paths from the manifests of the shards in `paths`, or if it is set, checks what it names.
void resolve_val_paths(Config& c, const std::vector<std::string>& paths, std::vector<std::string>& val_paths,
                       const std::set<std::string>& trained_on) {
  if (val_paths.empty()) {
    val_paths = listed_val_paths(find_manifests(expand_shards(paths, ShardSplit::train)), trained_on);
    return;
  }
  for (const ShardManifest& manifest : find_manifests(expand_shards(val_paths, ShardSplit::val)).manifests)
    agree_with(c, manifest);
}

}  // namespace

void resolve_shards(Config& c) {
  DataConfig& data = c.data;
  if (data.kind != DataKind::shards || data.components.empty()) return;
  const std::vector<std::string> train = expand_shards(data.paths(), ShardSplit::train);
  for (const ShardManifest& manifest : find_manifests(train).manifests) agree_with(c, manifest);
  std::set<std::string> trained_on;  // resolved paths
  for (const std::string& file : train) trained_on.insert(std::filesystem::canonical(file).string());
  if (data.components.size() == 1 || !data.val_paths.empty())
    return resolve_val_paths(c, data.paths(), data.val_paths, trained_on);
  for (DataComponent& component : data.components)
    resolve_val_paths(c, component.path, component.val_paths, trained_on);
}

void resolve_moved_shards(Config& c) {
  if (c.data.kind != DataKind::shards) return;
  const auto is_gone = [](const std::string& path) {
    try {
      return expand_shards({&path, 1}, ShardSplit::val).empty();
    } catch (const Error&) { return true; }
  };
  // Clears paths that are all gone, and returns whether there are none for that reason.
  const auto forget_gone = [&](std::vector<std::string>& val_paths) {
    const bool gone = !val_paths.empty() && std::all_of(val_paths.begin(), val_paths.end(), is_gone);
    if (gone) val_paths.clear();
    return gone;
  };
  const std::string tokenizer = c.data.tokenizer_or_bytes();
  const bool no_tokenizer = tokenizer != "byte" && tokenizer != kNoTokenizer && !is_there(tokenizer);
  if (no_tokenizer) c.data.tokenizer.clear();
  bool no_val = forget_gone(c.data.val_paths);
  // A --set of data.paths sets the components anew, with or without their val_paths.
  const bool mixed = c.data.components.size() > 1 && c.data.val_paths.empty();
  for (DataComponent& component : c.data.components)
    no_val = forget_gone(component.val_paths) || (mixed && component.val_paths.empty()) || no_val;
  if (no_tokenizer || no_val) resolve_shards(c);
}

Packing packing_of(const Config& c) {
  if (c.data.packing != Packing::unset) return c.data.packing;
  const auto is_shorter = [&](const TrainStage& stage) { return stage.seq_len != c.train.seq_len; };
  const std::vector<TrainStage> stages = stages_of(c.train);
  if (std::any_of(stages.begin(), stages.end(), is_shorter)) return Packing::stream;
  bool chats = false;
  try {
    if (c.data.kind == DataKind::text) chats = begins_with_conversation(c.data.paths(), c.data.format);
    if (c.data.kind == DataKind::shards && knows_documents(c.data))
      for (const ShardManifest& manifest : find_manifests(expand_shards(c.data.paths(), ShardSplit::train)).manifests)
        chats = chats || !manifest.chat.is_null();
  } catch (const Error&) {}  // ignored here: the run reports it when all ranks have joined, who then learn of it
  return chats ? Packing::best_fit : Packing::stream;
}

void resolve_documents(Config& c, const std::string& resume) {
  DataConfig& data = c.data;
  if (!resume.empty() && (data.documents == DocumentScope::unset || data.packing == Packing::unset)) {
    try {
      const std::string folder = resolve_checkpoint(means_out_dir(resume) ? c.log.out_dir : resume);
      const DataConfig before = config_from_json(config_of_checkpoint(folder)).data;
      if (data.documents == DocumentScope::unset) data.documents = before.documents;
      if (data.packing == Packing::unset) {
        data.packing = before.packing;
        if (data.max_documents == 0) data.max_documents = before.max_documents;
      }
    } catch (const Error&) {}  // ignored here: find_resume() reports it
  }
  data.documents = attends_within(data) ? DocumentScope::attend_within : DocumentScope::attend_across;
  if (data.packing != Packing::unset) return;
  data.packing = packing_of(c);
  if (data.packing == Packing::best_fit && data.max_documents == 0) data.max_documents = kFollowsData;
}

namespace {

// How the texts' conversations are written.
ChatOptions chat_options(const Config& c, const Tokenizer& tokenizer) {
  std::string init_from;
  try {
    if (!c.train.init_from.empty()) init_from = resolve_checkpoint(c.train.init_from);
  } catch (const Error&) {}  // ignored here: the run reports it, or does not need it, because it is resumed
  const std::vector<std::string> folders = {init_from, folder_of_tokenizer(c.data.tokenizer)};
  return {.format = std::make_shared<const ChatFormat>(choose_chat_format(c.data.chat_template, tokenizer, folders)),
          .learn = c.data.learn};
}

// The one format of all conversations in a run's data; null if there are none.
std::shared_ptr<const ChatFormat> common_chat(const Mixture& train, const Mixture& val) {
  std::shared_ptr<const ChatFormat> chat;
  for (const Mixture* split : {&train, &val})
    for (const auto& source : split->sources()) {
      if (source->chat() == nullptr) continue;
      if (chat != nullptr && !same_chat(chat->to_json(), source->chat()->to_json()))
        fail("{}: its conversations are in the chat template of {}, those before in that of {}: one is needed",
             source->name(), source->chat()->source(), chat->source());
      if (chat == nullptr) chat = source->chat();
    }
  return chat;
}

// The splits of a mixture's components, as far as they differ from each other's files.
std::vector<DataSplit> open_components(const Config& c, const Tokenizer* tokenizer, bool accept_changed) {
  const DataConfig& data = c.data;
  const uint64_t seed = static_cast<uint64_t>(data.seed);
  if (data.kind == DataKind::synthetic) return {synthetic_data(c.model.vocab_size, seed, data.val_fraction)};
  if (data.kind == DataKind::needle) return {needle_data(needle_task(c), data.val_fraction)};
  if (data.components.empty()) fail_usage("data.paths is empty: files or globs are needed");
  std::unique_ptr<Tokenizer> own;
  if (data.kind == DataKind::text && tokenizer == nullptr) tokenizer = (own = open_tokenizer(data)).get();
  if (data.kind == DataKind::shards && (!data.chat_template.empty() || data.learn != ChatLearn::assistant))
    fail_usage("data.{}: token shards have their own, from triad data --{}",
               data.chat_template.empty() ? "learn" : "chat_template",
               data.chat_template.empty() ? "learn" : "chat-template");
  const ChatOptions chat = data.kind == DataKind::text ? chat_options(c, *tokenizer) : ChatOptions();
  std::vector<DataSplit> splits;
  for (const DataComponent& component : data.components) {
    // Of data.val_paths, which belong to no component, the first one opens the source.
    const bool others_val = !splits.empty() && !data.val_paths.empty();
    const SplitOptions split{.paths = component.path,
                             .val_paths = others_val               ? std::vector<std::string>()
                                          : data.val_paths.empty() ? component.val_paths
                                                                   : data.val_paths,
                             .val_fraction = others_val ? 0 : data.val_fraction,
                             .seed = seed,
                             .format = data.format,
                             .accept_changed = accept_changed,
                             .chat = chat};
    splits.push_back(data.kind == DataKind::text ? text_data(split, *tokenizer)
                                                 : shard_data(split, c.model.vocab_size));
  }
  for (size_t i = 0; i < splits.size(); ++i)
    for (size_t j = 0; j < splits.size(); ++j)
      if (i != j && splits[j].val->files() != nullptr)
        check_no_overlap(*splits[i].train->files(), *splits[j].val->files());
  return splits;
}

// The shares of the components' rows.
std::vector<int64_t> component_shares(const DataConfig& data, const std::vector<DataSplit>& splits) {
  std::vector<double> weights;
  for (size_t i = 0; i < splits.size(); ++i) {
    const double weight = splits.size() > 1 ? data.components[i].weight : 1;
    weights.push_back(weight > 0 ? weight : static_cast<double>(splits[i].train->size()));
  }
  std::vector<int64_t> shares = shares_of(weights);
  for (size_t i = 0; i < shares.size(); ++i)
    if (shares[i] == 0)
      fail_usage("data.paths: the share of {} is {:.3g} (weight {:.6g}): at least {:.3g} of the rows are needed",
                 data.components[i].name(), weights[i] / std::accumulate(weights.begin(), weights.end(), 0.0),
                 weights[i], 1.0 / kAllShares);
  return shares;
}

void open_splits(const Config& c, const Tokenizer* tokenizer, bool accept_changed, DataSource& data) {
  const std::vector<DataSplit> splits = open_components(c, tokenizer, accept_changed);
  const std::vector<int64_t> shares = component_shares(c.data, splits);
  std::vector<std::shared_ptr<const TokenSource>> train, val;
  for (const DataSplit& split : splits) {
    train.push_back(split.train);
    val.push_back(split.val);
  }
  const bool no_val = std::all_of(val.begin(), val.end(), [](const auto& source) { return source->size() == 0; });
  data.train = Mixture(std::move(train), shares);
  data.val = no_val || !c.data.val_paths.empty() ? Mixture(val.front()) : Mixture(std::move(val), shares);
  data.chat = common_chat(data.train, data.val);
  if (splits.size() == 1) return;
  for (const DataComponent& component : c.data.components) data.components.push_back(component.name());
}

// What an epoch of each component has, a line for the log.
std::string describe_components(const Config& c, const DataSource& data) {
  std::string text;
  for (size_t i = 0; i < data.components.size(); ++i)
    text += fmt::format(
        "; {:.2f}% of the rows from {}: {}, {} an epoch{}", 100 * data.train.share(i), data.train.sources()[i]->name(),
        counted(data.train.sources()[i]->size(), "token"), counted(data.epoch_rows[i], "row"),
        c.data.components[i].epochs > 0 ? fmt::format(", at most {}", counted(c.data.components[i].epochs, "epoch"))
                                        : "");
  return text;
}

}  // namespace

DataSource open_data(const Config& c, const Tokenizer* tokenizer, bool accept_changed) {
  check_max_documents(c);
  DataSource data;
  open_splits(c, tokenizer, accept_changed, data);
  // Throws now, not at the first step or evaluation, if a component is too small in either split.
  int64_t sequences = 0;
  for (const auto& source : data.train.sources()) sequences += count_sequences(*source, c.train.longest_seq_len());
  if (c.train.eval_every > 0) count_rows(data.val, c.train.longest_seq_len(), 1);
  data.description = data.summary = data.train.name();
  if (c.data.kind == DataKind::text || c.data.kind == DataKind::shards) {
    const std::string learned = describe_mask(c, data.train, data.val);
    data.description += fmt::format(": {}{}, {} an epoch; {}: {}", counted(data.train.size(), "token"), learned,
                                    counted(sequences, "sequence"), data.val.name(), counted(data.val.size(), "token"));
    data.summary = fmt::format("{}: {} tokens to train on{}, {} to evaluate on", word_of(c.data.kind),
                               grouped(data.train.size()), learned, grouped(data.val.size()));
  }
  if (c.data.kind == DataKind::shards && c.data.tokenizer.empty())
    data.warning = fmt::format(
        "the tokenizer of the shards in {} is not known (no manifest.json lists them, and data.tokenizer is not set): "
        "where text is needed, as by triad generate, tokens are read as bytes",
        c.data.paths().front());
  std::set<std::string> more;
  for (const Mixture* split : {&data.train, &data.val})
    for (const auto& source : split->sources()) more.insert(source->warning());
  for (const std::string& text : more)
    if (!text.empty()) data.warning += (data.warning.empty() ? "" : "; ") + text;
  describe_documents(c, data);
  if (data.chat != nullptr) data.description += fmt::format("; chat template: {}", data.chat->source());
  data.description += describe_components(c, data);
  return data;
}

int64_t last_cursor(const Config& c, int64_t world, int64_t step, int64_t cursor) {
  for (const TrainStage& stage : stages_of(c.train))
    if (step < stage.end)
      cursor = round_up(cursor, stage.seq_len) +
               (stage.end - std::max(step, stage.begin)) * in_stage(c, stage).tokens_per_step(world);
  return cursor;
}

void check_epochs(const Config& c, const DataSource& data, int64_t world, int64_t step, int64_t cursor) {
  const int64_t T = data.rows.seq_len, rows = ceil_div(last_cursor(c, world, step, cursor), T);
  const std::vector<int64_t> needed = Draws(data.train.shares()).counts(rows);
  for (size_t i = 0; i < c.data.components.size() && i < needed.size(); ++i) {
    const int64_t epochs = c.data.components[i].epochs, epoch_rows = data.epoch_rows[i];
    if (epochs == 0 || needed[i] <= epochs * epoch_rows) continue;
    fail_usage(
        "data.paths: {} runs out: its {} of {} have {} of {} tokens, and train.steps {} needs {}. Allow more epochs, "
        "or set a smaller weight or fewer steps",
        c.data.components[i].name(), counted(epochs, "epoch"), counted(data.train.sources()[i]->size(), "token"),
        counted(epochs * epoch_rows, "row"), T, c.train.steps, needed[i]);
  }
}

LoaderOptions loader_options(const Config& c, const DataSource& data, int64_t rank, int64_t world) {
  return {.seq_len = c.train.seq_len,
          .micro_batch = c.train.micro_batch_size,
          .micro_steps = c.train.accumulate_grad_batches,
          .block = data.rows.seq_len,
          .packing = data.rows.packing,
          .max_documents = data.rows.max_documents,
          .seed = data.rows.seed,
          .within = data.within(),
          .rank = rank / c.dist.context,
          .world = world / c.dist.context,
          .stall_s = c.data.stall_s};
}

PlannedDocuments planned_documents(const Config& c) {
  try {
    check_max_documents(c);
    const std::vector<DocumentMix> whole_rows(stages_of(c.train).size());
    if (!attends_within(c.data)) return {.attended = whole_rows};
    const auto is_stream = [&] {  // a plan goes without the data where it can
      try {
        return packing_of(c) == Packing::stream;
      } catch (const Error&) { return true; }
    };
    if (c.data.max_documents > 0 && is_stream())
      return {.most = c.data.max_documents, .attended = whole_rows, .known = false};
    const DataSource data = open_data(c);
    PlannedDocuments planned{.most = data.most_documents, .attended = {}};
    for (const TrainStage& stage : stages_of(c.train)) planned.attended.push_back(attended_in(data, stage));
    return planned;
  } catch (const UsageError&) { throw; } catch (const Error& e) {
    if (c.data.documents != DocumentScope::unset) throw;
    fail("{} (the plan depends on the most documents in a row of this data, unless data.documents=attend_across)",
         e.what());
  }
}

}  // namespace triad
