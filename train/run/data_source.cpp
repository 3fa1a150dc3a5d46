#include "train/run/data_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/text.h"
#include "io/checkpoint.h"
#include "io/data/best_fit.h"
#include "io/data/documents.h"
#include "io/data/shard_manifest.h"
#include "io/tokenizer/tokenizer.h"
#include "train/checkpoint/state.h"
#include "train/config/load_config.h"
#include "train/monitor/banner.h"

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
  return known(data.paths, ShardSplit::train) && known(data.val_paths, ShardSplit::val);
}

}  // namespace

bool attends_within(const DataConfig& data) {
  if (data.documents == DocumentScope::unset) return knows_documents(data);
  return data.documents == DocumentScope::attend_within;
}

namespace {

// Throws a UsageError if a split's documents are not known.
const DocumentIndex& known_documents(const Config& c, const TokenSource& source) {
  if (source.documents() != nullptr) return *source.documents();
  const bool within = c.data.documents == DocumentScope::attend_within;
  const char* const key = within ? "data.documents is attend_within" : "data.packing is best_fit";
  const char* const remedy = within ? "data.documents=attend_across" : "data.packing=stream";
  if (c.data.kind != DataKind::shards)
    fail_usage("{}, but data of kind {} ({}) has no documents. Set {}", key, word_of(c.data.kind), source.name(),
               remedy);
  fail_usage(
      "{}, but where the documents of {} begin is not known: no manifest.json lists all of its shards and names their "
      "separator as `eot`. Write the shards with triad data, or write that file (io/data/README.md). Or set {}",
      key, source.name(), remedy);
}

// The most documents in a row of T consecutive source tokens. limit: throws a UsageError that names the row if there
// are more; 0: none.
RowDivision divide_stream(const Config& c, const TokenSource& source, int64_t T, int64_t limit) {
  const RowDivision division = divide_rows(known_documents(c, source), (source.size() - 1) / T, T);
  if (limit > 0 && division.most > limit)
    fail_usage("{}: row {} (tokens {} to {}) has {} documents, data.max_documents allows {}", source.name(),
               division.fullest, division.fullest * T, (division.fullest + 1) * T, division.most, limit);
  return division;
}

std::string percent(int64_t part, int64_t whole) {
  return fmt::format("{:.2f}%", whole > 0 ? 100 * static_cast<double>(part) / static_cast<double>(whole) : 0);
}

double ratio(int64_t a, int64_t b) { return b > 0 ? static_cast<double>(a) / static_cast<double>(b) : 0; }

// The documents in `rows` rows, from their numbers by length.
DocumentMix mix_of(int64_t rows, const std::vector<int64_t>& by_length) {
  DocumentMix mix{.rows = rows, .documents = {}};
  for (size_t length = 0; length < by_length.size(); ++length)
    if (by_length[length] > 0) mix.add(static_cast<int64_t>(length), by_length[length]);
  return mix;
}

void describe_best_fit(const Config& c, DataSource& data, const DocumentIndex& index) {
  const int64_t T = c.train.longest_seq_len();
  const PackingStats s = measure_best_fit(*data.train, data.rows);
  data.parts = mix_of(s.rows, s.parts);
  if (data.rows.within) {
    data.attended = data.parts;
    for (const auto& [length, number] : mix_of(s.rows, s.paddings).documents) data.attended.add(length, number);
  }
  data.document_stats = {{"documents", index.count()},
                         {"mean_length", ratio(index.size, index.count())},
                         {"documents_per_row", ratio(s.pieces, s.rows)},
                         {"documents_cut_share", ratio(s.cut, index.count())},
                         {"cut_share", ratio(s.cut_tokens, index.size)},
                         {"dropped_share", ratio(s.dropped, index.size)},
                         {"padded_share", ratio(s.padded, s.rows * T)}};
  data.documents += fmt::format(
      "best_fit: {:.1f} a row, {} cut to fill a row, which drops {} of the tokens; {} of the tokens are cut from their "
      "document's beginning or dropped, {} of the rows' tokens are padding",
      ratio(s.pieces, s.rows), percent(s.cut, index.count()), percent(s.dropped, index.size),
      percent(s.cut_tokens, index.size), percent(s.padded, s.rows * T));
}

void describe_stream(const Config& c, DataSource& data, const DocumentIndex& index, const RowDivision& division) {
  const int64_t T = c.train.longest_seq_len(), rows = (index.size - 1) / T;
  data.attended = data.parts = mix_of(rows, division.parts);
  data.document_stats = {{"documents", index.count()},
                         {"mean_length", ratio(index.size, index.count())},
                         {"documents_per_row", ratio(division.documents, rows)},
                         {"documents_cut_share", ratio(division.cut, index.count())},
                         {"cut_share", ratio(division.cut_tokens, rows * T)},
                         {"dropped_share", 0.0},
                         {"padded_share", 0.0}};
  data.documents += fmt::format(
      "stream: {:.1f} a row, at most {}; rows' ends cut {} of them, and so {} of the tokens from their document's "
      "beginning",
      ratio(division.documents, rows), division.most, percent(division.cut, index.count()),
      percent(division.cut_tokens, rows * T));
}

// Throws a UsageError if data.max_documents would limit nothing.
void check_max_documents(const Config& c) {
  if (c.data.max_documents > 0 && c.data.packing == Packing::stream && !attends_within(c.data))
    fail_usage(
        "data.max_documents is {}, but with data.packing stream it limits only rows whose attention stays within "
        "documents, and here it crosses them (data.documents attend_across). Set data.max_documents=0, "
        "data.documents=attend_within or data.packing=best_fit",
        c.data.max_documents);
}

// Fills in what a run knows about its documents; nothing if its rows do not depend on them.
void describe_documents(const Config& c, DataSource& data) {
  data.rows = {.seq_len = c.train.longest_seq_len(),
               .packing = c.data.packing,
               .max_documents = c.data.max_documents,
               .seed = static_cast<uint64_t>(c.data.seed),
               .within = attends_within(c.data)};
  const bool packs = c.data.packing == Packing::best_fit, within = data.rows.within;
  if (!within && !packs) return;
  const DocumentIndex& index = known_documents(c, *data.train);
  data.documents = fmt::format("{} of {:.0f} tokens on average; attention {} them; ", grouped(index.count()),
                               ratio(index.size, index.count()), within ? "stays within" : "crosses");
  if (packs && data.rows.max_documents == 0) data.rows.max_documents = default_max_documents(c.train.longest_seq_len());
  // Validation rows are consecutive tokens for either packing, and have their stage's length. Short rows lie within the
  // long ones except those after the last long one.
  const int64_t limit = packs ? 0 : c.data.max_documents;
  int64_t val = 0;
  if (within && data.val->size() > 0) {
    std::set<int64_t> lengths;
    for (const TrainStage& stage : stages_of(c.train)) lengths.insert(stage.seq_len);
    for (const int64_t T : lengths) val = std::max(val, divide_stream(c, *data.val, T, limit).most);
  }
  if (packs) {
    describe_best_fit(c, data, index);
    if (within) data.most_documents = std::max(data.rows.max_documents + 1, val);
    return;
  }
  const RowDivision division = divide_stream(c, *data.train, data.rows.seq_len, limit);
  data.most_documents = limit > 0 ? limit : std::max(division.most, val);
  describe_stream(c, data, index, division);
}

// Describes what share of the tokens a mask leaves; empty without a mask. Throws an Error if it leaves none to train
// on, or none in all rows of an evaluation.
std::string describe_mask(const Config& c, const TokenSource& train, const TokenSource& val) {
  const auto learned = [](const TokenSource& source) { return source.mask().count(1, source.size()); };
  if (!train.mask().empty() && learned(train) == 0)
    fail("{}: its loss mask leaves no token that is learned", train.name());
  if (!val.mask().empty() && c.train.eval_every > 0) {
    const bool within = attends_within(c.data);
    for (const TrainStage& stage : stages_of(c.train)) {
      const int64_t T = stage.seq_len,
                    rows = std::min(c.train.eval_batches * stage.micro_batch_size, count_sequences(val, T));
      bool any = false;
      for (int64_t row = 0; row < rows && !any; ++row) any = count_stream_targets(val, row * T, T, within) > 0;
      if (!any)
        fail(
            "{}: its loss mask leaves no token that is learned in the first {} rows of {} tokens, which an evaluation "
            "reads",
            val.name(), rows, T);
    }
  }
  return train.mask().empty() ? "" : fmt::format(", {} of them learned", percent(learned(train), train.size()));
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

void resolve_shards(Config& c) {
  if (c.data.kind != DataKind::shards || c.data.paths.empty()) return;
  const std::vector<std::string> train = expand_shards(c.data.paths, ShardSplit::train);
  const ShardOrigin origin = find_manifests(train);
  for (const ShardManifest& manifest : origin.manifests) agree_with(c, manifest);
  if (!c.data.val_paths.empty()) {
    for (const ShardManifest& manifest : find_manifests(expand_shards(c.data.val_paths, ShardSplit::val)).manifests)
      agree_with(c, manifest);
    return;
  }
  std::set<std::string> trained_on;  // resolved paths
  for (const std::string& file : train) trained_on.insert(std::filesystem::canonical(file).string());
  const auto is_there = [](const std::string& file) { return std::filesystem::exists(file); };
  for (const ShardManifest& manifest : origin.manifests) {
    // If data.paths include validation shards, the split is by position instead. Training shards that were copied
    // without their validation shards are not an error.
    const auto is_trained_on = [&](const std::string& file) {
      return is_there(file) && trained_on.contains(std::filesystem::canonical(file).string());
    };
    if (std::any_of(manifest.val.begin(), manifest.val.end(), is_trained_on)) return c.data.val_paths.clear();
    if (std::any_of(manifest.val.begin(), manifest.val.end(), is_there)) c.data.val_paths.push_back(manifest.folder());
  }
}

void resolve_moved_shards(Config& c) {
  if (c.data.kind != DataKind::shards) return;
  const auto is_gone = [](const std::string& path) {
    try {
      return expand_shards({&path, 1}, ShardSplit::val).empty();
    } catch (const Error&) { return true; }
  };
  const std::string tokenizer = c.data.tokenizer_or_bytes();
  const bool no_tokenizer = tokenizer != "byte" && tokenizer != kNoTokenizer && !std::filesystem::exists(tokenizer);
  const bool no_val =
      !c.data.val_paths.empty() && std::all_of(c.data.val_paths.begin(), c.data.val_paths.end(), is_gone);
  if (no_tokenizer) c.data.tokenizer.clear();
  if (no_val) c.data.val_paths.clear();
  if (no_tokenizer || no_val) resolve_shards(c);
}

void resolve_documents(Config& c, const std::string& resume) {
  if (c.data.documents == DocumentScope::unset && !resume.empty()) {
    try {
      const std::string folder = resolve_checkpoint(resume == "latest" ? c.log.out_dir : resume);
      c.data.documents = config_from_json(config_of_checkpoint(folder)).data.documents;
    } catch (const Error&) {}  // ignored here: find_resume() reports it
  }
  c.data.documents = attends_within(c.data) ? DocumentScope::attend_within : DocumentScope::attend_across;
}

DataSource open_data(const Config& c, const Tokenizer* tokenizer, bool accept_changed) {
  check_max_documents(c);
  const uint64_t seed = static_cast<uint64_t>(c.data.seed);
  const SplitOptions split{.paths = c.data.paths,
                           .val_paths = c.data.val_paths,
                           .val_fraction = c.data.val_fraction,
                           .seed = seed,
                           .format = c.data.format,
                           .accept_changed = accept_changed};
  DataSplit data;
  switch (c.data.kind) {
    case DataKind::synthetic:
      data = synthetic_data(c.model.vocab_size, seed, c.data.val_fraction);
      break;
    case DataKind::text:
      data = text_data(split, tokenizer != nullptr ? *tokenizer : *open_tokenizer(c.data));
      break;
    case DataKind::shards:
      data = shard_data(split, c.model.vocab_size);
      break;
    case DataKind::needle:
      data = needle_data(needle_task(c), c.data.val_fraction);
      break;
  }
  // Throws now, not at the first step or evaluation, if either split is too small.
  const int64_t sequences = count_sequences(*data.train, c.train.longest_seq_len());
  if (c.train.eval_every > 0) count_sequences(*data.val, c.train.longest_seq_len());
  std::string text = data.train->name(), summary = text;
  if (c.data.kind == DataKind::text || c.data.kind == DataKind::shards) {
    const std::string learned = describe_mask(c, *data.train, *data.val);
    text += fmt::format(": {}{}, {} an epoch; {}: {}", counted(data.train->size(), "token"), learned,
                        counted(sequences, "sequence"), data.val->name(), counted(data.val->size(), "token"));
    summary = fmt::format("{}: {} tokens to train on{}, {} to evaluate on", word_of(c.data.kind),
                          grouped(data.train->size()), learned, grouped(data.val->size()));
  }
  std::string warning;
  if (c.data.kind == DataKind::shards && c.data.tokenizer.empty())
    warning = fmt::format(
        "the tokenizer of the shards in {} is not known (no manifest.json lists them, and data.tokenizer is not set): "
        "where text is needed, as by triad generate, tokens are read as bytes",
        c.data.paths.front());
  for (const std::string& more : std::set{data.train->warning(), data.val->warning()})
    if (!more.empty()) warning += (warning.empty() ? "" : "; ") + more;
  DataSource source;
  source.train = data.train;
  source.val = data.val;
  source.description = text;
  source.summary = summary;
  source.warning = warning;
  describe_documents(c, source);
  return source;
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

DocumentMix attended_in(const DataSource& data, const TrainStage& stage) {
  const int64_t T = stage.seq_len;
  if (!data.within() || T == data.rows.seq_len) return data.attended;
  const int64_t rows = (data.train->size() - 1) / T;
  return mix_of(rows, divide_rows(*data.train->documents(), rows, T).parts);
}

PlannedDocuments planned_documents(const Config& c) {
  try {
    check_max_documents(c);
    const std::vector<DocumentMix> whole_rows(stages_of(c.train).size());
    if (!attends_within(c.data)) return {.attended = whole_rows};
    if (c.data.max_documents > 0 && c.data.packing == Packing::stream)
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
