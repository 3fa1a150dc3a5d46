// Distinguishes, by name and content, what Triad has made from the user's files and other programs'.
// Only the former may be removed or replaced.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace triad {

// Whether a path is a symbolic link or a mount point. Triad makes no such folders, and removes nothing through them.
bool is_link_or_mount(const std::string& path);
// A regular file's first 4 KiB, no link; "" if it cannot be read.
std::string head_of(const std::string& path);
bool is_empty_file(const std::string& path);  // a regular file without bytes, which holds nothing to lose

bool is_tokenizer_file_name(std::string_view name);
// Whether Triad has written a tensor file, which has checksums in its header, or an index of such files.
bool is_own_tensor_file(const std::string& path);
bool is_own_state_file(const std::string& path);

// What a step_N folder, whole or not, holds that is no checkpoint file, as paths. The folder itself if it is a link, a
// mount point or no folder, or if it cannot be listed. Empty if Triad has made all of it.
std::vector<std::string> foreign_in_checkpoint(const std::string& folder);

// Up to ten paths, and how many more there are, for a message.
std::string listed(const std::vector<std::string>& paths);

}  // namespace triad
