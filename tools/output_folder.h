// What a verb writes: folders that appear under their name completely or not at all, and a file path check.
#pragma once
#include <functional>
#include <string>

namespace triad {

// Returns --out as an absolute path; if it is a link, the path to which it leads. Throws an Error if it is `source`,
// the folder that the verb reads, or if it exists and is not an empty folder; a UsageError if it is "".
std::string check_output_folder(const std::string& out, const std::string& source);

// Fills a temporary folder next to `out` by write(folder) and renames it to `out`, as check_output_folder returned it.
// If write throws, the temporary folder is removed. What a killed process left for the same `out` (it has a mark in it)
// is removed first.
void write_output_folder(const std::string& out, const std::function<void(const std::string& folder)>& write);

// Throws, before a verb works for hours, if write_output_folder() could make nothing at `out`. Leaves nothing there.
void check_output_place(const std::string& out);

// Throws, before a verb works for hours, if no file can be written at this option's path: a UsageError if it is a
// folder, else an Error. Leaves nothing there.
void check_output_file(const std::string& option, const std::string& path);

}  // namespace triad
