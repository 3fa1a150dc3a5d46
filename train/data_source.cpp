#include "train/data_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "engine/check.h"
#include "io/data/loader.h"
#include "io/data/shard_manifest.h"
#include "train/monitor/banner.h"

namespace triad {

NeedleTask needle_task(const Config& c) {
  return {.vocab = c.model.vocab_size,
          .seq_len = c.train.seq_len,
          .pairs = c.data.needle_pairs,
          .questions = c.data.needle_questions,
          .value_tokens = c.data.needle_value_tokens,
          .depth = c.data.needle_depth,
          .seed = static_cast<uint64_t>(c.data.seed)};
}

namespace {

// Checks the config against a manifest; sets data.tokenizer from it if the config names none.
void agree_with(Config& c, const ShardManifest& manifest) {
  if (manifest.vocab_size > c.model.vocab_size)
    fail_usage("model.vocab_size is {}: the tokenizer {} of the shards has {} tokens ({})", c.model.vocab_size,
               manifest.tokenizer, manifest.vocab_size, manifest.path);
  if (c.data.tokenizer.empty())
    c.data.tokenizer = manifest.checked_tokenizer();
  else if (!manifest.is_of(*make_tokenizer(c.data.tokenizer)))
    fail_usage("data.tokenizer is {}, but the shards hold tokens of {} ({})", c.data.tokenizer, manifest.tokenizer,
               manifest.path);
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
  const auto is_there = [](const std::string& file) { return std::filesystem::exists(file); };
  for (const ShardManifest& manifest : origin.manifests) {
    // If data.paths include validation shards, the split is by position instead. Training shards that were copied
    // without their validation shards are not an error.
    const auto is_trained_on = [&](const std::string& file) {
      return std::any_of(train.begin(), train.end(), [&](const std::string& other) {
        std::error_code ignored;
        return std::filesystem::equivalent(file, other, ignored);
      });
    };
    if (std::any_of(manifest.val.begin(), manifest.val.end(), is_trained_on)) return c.data.val_paths.clear();
    if (std::any_of(manifest.val.begin(), manifest.val.end(), is_there)) c.data.val_paths.push_back(manifest.folder());
  }
}

DataSource open_data(const Config& c, const Tokenizer* tokenizer) {
  const uint64_t seed = static_cast<uint64_t>(c.data.seed);
  const SplitOptions split{
      .paths = c.data.paths, .val_paths = c.data.val_paths, .val_fraction = c.data.val_fraction, .seed = seed};
  DataSplit data;
  switch (c.data.kind) {
    case DataKind::synthetic:
      data = synthetic_data(c.model.vocab_size, seed, c.data.val_fraction);
      break;
    case DataKind::text:
      data = text_data(split, tokenizer != nullptr ? *tokenizer : *make_tokenizer(c.data.tokenizer_or_bytes()));
      break;
    case DataKind::shards:
      data = shard_data(split, c.model.vocab_size);
      break;
    case DataKind::needle:
      data = needle_data(needle_task(c), c.data.val_fraction);
      break;
  }
  // Throws now, not at the first step or evaluation, if either split is too small.
  const int64_t sequences = count_sequences(*data.train, c.train.seq_len);
  if (c.train.eval_every > 0) count_sequences(*data.val, c.train.seq_len);
  std::string text = data.train->name(), summary = text;
  if (c.data.kind == DataKind::text || c.data.kind == DataKind::shards) {
    text += fmt::format(": {} tokens, {} sequences an epoch; {}: {} tokens", data.train->size(), sequences,
                        data.val->name(), data.val->size());
    summary = fmt::format("{}: {} tokens to train on, {} to evaluate on", word_of(c.data.kind),
                          grouped(data.train->size()), grouped(data.val->size()));
  }
  std::string warning;
  if (c.data.kind == DataKind::shards && c.data.tokenizer.empty())
    warning = fmt::format(
        "the tokenizer of the shards in {} is not known (no manifest.json lists them, and data.tokenizer is not set): "
        "text is taken for bytes where it is needed, as by generate",
        c.data.paths.front());
  return {data.train, data.val, text, summary, warning};
}

}  // namespace triad
