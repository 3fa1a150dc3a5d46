// What a verb writes: folders that appear under their name completely or not at all, and a check of a file's path.
#pragma once
#include <functional>
#include <string>

namespace triad {

// Returns --out as an absolute path; if it is a link, the path of the folder to which it leads. Throws an Error if it
// is `source`, the folder that the verb reads, or if it exists and is not an empty folder; a UsageError if it is "".
std::string check_output_folder(const std::string& out, const std::string& source);

// Fills a temporary folder next to `out` by write(folder) and renames it to `out`, a result of check_output_folder. If
// write throws, the temporary folder is removed. What a killed process has left of the same `out`, which has a mark in
// it, is removed first.
void write_output_folder(const std::string& out, const std::function<void(const std::string& folder)>& write);

// Throws, before a verb works for hours, if a file cannot be written at a path, the value of this option: a UsageError
// if it is a folder, else an Error. Leaves nothing there.
void check_output_file(const std::string& option, const std::string& path);

}  // namespace triad
