// The data of a run, opened as its config says, with a line that describes it.
#pragma once
#include <memory>
#include <string>

#include "io/needle.h"
#include "train/config.h"

namespace triad {

struct DataSource {
  std::shared_ptr<const TokenSource> train, val;
  std::string description;
};
// tokenizer: that of the config, where it has been read.
DataSource open_data(const Config&, const Tokenizer* tokenizer = nullptr);

// What data.needle_* ask for.
NeedleTask needle_task(const Config&);

}  // namespace triad
