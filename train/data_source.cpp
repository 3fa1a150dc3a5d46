#include "train/data_source.h"

#include <fmt/format.h>

#include "engine/check.h"
#include "io/loader.h"

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
      data = text_data(split, tokenizer != nullptr ? *tokenizer : *make_tokenizer(c.data.tokenizer));
      break;
    case DataKind::shards:
      data = shard_data(split, c.model.vocab_size);
      break;
    case DataKind::needle:
      data = needle_data(needle_task(c), c.data.val_fraction);
      break;
  }
  // Too little of either is an error now, not at the first step or evaluation.
  const int64_t sequences = count_sequences(*data.train, c.train.seq_len);
  if (c.train.eval_every > 0) count_sequences(*data.val, c.train.seq_len);
  std::string text = data.train->name();
  if (c.data.kind == DataKind::text || c.data.kind == DataKind::shards)
    text += fmt::format(": {} tokens, {} sequences an epoch; {}: {} tokens", data.train->size(), sequences,
                        data.val->name(), data.val->size());
  return {data.train, data.val, text};
}

}  // namespace triad
