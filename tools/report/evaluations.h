// Reads what evaluations leave in a run's folder for the report: samples, and the files of `triad eval`.
#pragma once
#include <filesystem>
#include <string>

#include "io/json_config.h"
#include "tools/report/series.h"

namespace triad {

// positions.csv, which `triad eval --per-position` writes: {to, loss} for each position range; empty if the file does
// not exist.
Points position_losses_of(const std::string& path);

// An SVG for each grid that `triad eval --needle` wrote, one after the other; empty without one.
std::string needle_svgs(const std::filesystem::path& folder, const Json& config);

// samples.jsonl, which a run with log.samples writes: [{step, samples: [{prompt, text, stopped}]}], steps ascending.
Json samples_of(const std::string& path);

// eval.jsonl, which `triad eval` writes, as it is: a list of objects.
Json evaluations_of(const std::string& path);

}  // namespace triad
