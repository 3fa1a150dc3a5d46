// Folders of checkpoints: parent/step_N, and parent/latest, a symbolic link to the newest. What is in one is the
// caller's, but for state.json: it is written last, so a folder that holds it is whole.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace triad {

inline constexpr const char* kStateFile = "state.json";

// Calls write(folder) to fill a folder that lies beside the final one, syncs it, puts it in place (replacing an older
// one of that name) and points parent/latest at it. Killed at any moment, it leaves the older checkpoints whole and
// `latest` on one of them. If write throws, the folder is removed. What killed saves left in parent goes first. Returns
// parent/name.
std::string write_checkpoint(const std::string& parent, const std::string& name,
                             const std::function<void(const std::string& folder)>& write);

// Its mark of wholeness goes first: a removal that is killed leaves nothing that looks whole.
void remove_checkpoint(const std::string& folder);
bool is_checkpoint(const std::string& folder);  // whole

struct CheckpointFolder {
  int64_t step = 0;
  std::string path;
};
// The whole step_N folders, by step. A parent that is absent has none.
std::vector<CheckpointFolder> list_checkpoints(const std::string& parent);
// The whole one of the highest step, wherever `latest` points; where there is none, what `latest` points at, if whole.
std::optional<std::string> find_newest_checkpoint(const std::string& parent);

// A user's path to a checkpoint: one itself, a run's folder, its checkpoints folder, or `latest` in either. Links are
// followed once, here. Nothing there is an Error that says what was looked for.
std::string resolve_checkpoint(const std::string& path);

// Removes the oldest whole ones until keep_last are left, those apart whose step is a multiple of keep_every (0: none;
// a run's start is no multiple), and never the one that `latest` points at. keep_last 0: removes nothing.
void thin_out_checkpoints(const std::string& parent, int64_t keep_last, int64_t keep_every);

// Moves files and folders to a new folder parent/set_aside_K, K the first free number, in the given order; nothing
// looks for checkpoints in there. Returns its path. A file may come from another file system, a folder may not.
std::string set_aside(const std::string& parent, const std::vector<std::string>& paths);
std::string next_set_aside(const std::string& parent);  // the path that set_aside() would use
// The set_aside_K folders. A parent that is absent has none.
std::vector<std::string> list_set_aside(const std::string& parent);

// Removes what killed saves and removals left in parent. One that was whole but not yet in its place is put there.
void remove_leftovers(const std::string& parent);

}  // namespace triad
