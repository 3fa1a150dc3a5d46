// Opens the data of a run as its config says.
#pragma once
#include <memory>
#include <string>

#include "io/data/needle.h"
#include "train/config.h"

namespace triad {

struct DataSource {
  std::shared_ptr<const TokenSource> train, val;
  std::string description, summary;  // with file names and counts, for the log; short, for the terminal
  std::string warning;               // empty: none
};
// Fills in data.tokenizer and data.val_paths of a config of kind shards from the manifest.json in the shards' folder.
// Throws UsageError if data.tokenizer or model.vocab_size contradicts a manifest.
void resolve_shards(Config&);
// tokenizer: the config's tokenizer, if it is loaded already.
DataSource open_data(const Config&, const Tokenizer* tokenizer = nullptr);

// The task that data.needle_* describe.
NeedleTask needle_task(const Config&);

}  // namespace triad
