// Reads what a run with a taught index records of it (train/monitor/index_report.h) for the report's charts.
#pragma once
#include <filesystem>

#include "io/json_config.h"

namespace triad {

// From index.csv and index_recall.csv in a run's folder: {index_loss, recall, max_logit: heat maps, or null without
// values; distances: the last evaluation, as {step, layers, distances: each class's smallest, mass, recall:
// [layer][class], null where a layer has none}, or null}. Null without index.csv.
Json index_tables(const std::filesystem::path& folder);

}  // namespace triad
