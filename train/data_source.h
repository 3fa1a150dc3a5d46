// The data of a run, opened as its config says, with lines that describe it.
#pragma once
#include <memory>
#include <string>

#include "io/data/needle.h"
#include "train/config.h"

namespace triad {

struct DataSource {
  std::shared_ptr<const TokenSource> train, val;
  std::string description, summary;  // with the files' names and numbers; short enough for a terminal
  std::string warning;               // empty: there is none
};
// What a config of kind shards leaves open comes from the manifest.json beside its shards: data.tokenizer, and the
// validation split. A UsageError where data.tokenizer or model.vocab_size contradicts a manifest.
void settle_shards(Config&);
// tokenizer: that of the config, where it has been read.
DataSource open_data(const Config&, const Tokenizer* tokenizer = nullptr);

// What data.needle_* ask for.
NeedleTask needle_task(const Config&);

}  // namespace triad
