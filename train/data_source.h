// The data of a run, opened as its config says, with a line that describes it.
#pragma once
#include <memory>
#include <string>

#include "io/dataset.h"
#include "train/config.h"

namespace triad {

struct DataSource {
  std::shared_ptr<const TokenSource> train, val;
  std::string description;
};
DataSource open_data(const Config&);

}  // namespace triad
