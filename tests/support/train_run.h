// Helpers for tests that train configs/tiny.json with the built program, and read the files that a run writes.
#pragma once
#include <string>
#include <vector>

#include "io/json_config.h"
#include "tests/support/program.h"

namespace triad::test {

inline const std::string kTiny = TRIAD_SOURCE_DIR "/configs/tiny.json";

// `triad` arguments that train configs/tiny.json on a device ("cpu", "cuda") into the folder `out`.
std::string train_on(const std::string& out, const std::string& device, const std::string& more = "");

std::vector<std::string> lines(const std::string& path);
Json json_of(const std::string& path);
// Waits until training.csv has this many rows, for three minutes at most.
void wait_for_rows(const std::string& folder, size_t rows);

}  // namespace triad::test
