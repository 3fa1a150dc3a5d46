// Finds the runs that `triad report` names.
#pragma once
#include <string>
#include <vector>

namespace triad {

// Whether a folder is a run's, by its config.json. Throws an Error if there is no such folder.
bool is_run(const std::string& folder);

// The runs in a folder and the folders below it, three deep, sorted by path. Runs are known by config.json and one of
// the files that a run writes first. Throws an Error if there are none.
std::vector<std::string> runs_in(const std::string& folder);

}  // namespace triad
