// Checkpoint folders: parent/step_N, and parent/latest, a symbolic link to the newest one. The caller chooses the
// checkpoint's files and the text of state.json, which is written last, once the others are synced to disk: a folder
// that holds it is complete. Where the file system has no symbolic links, `latest` is a file with the folder's name. In
// a copy that has followed links (cp -rL, rsync -L, zip) it is a folder, which counts as a checkpoint for the step in
// its state.json.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace triad {

inline constexpr const char* kStateFile = "state.json";
inline constexpr const char* kLatest = "latest";

// Saves a checkpoint and returns parent/name. Calls write(folder), which fills a temporary folder in parent and returns
// the text of state.json; syncs the folder to disk, adds state.json, renames the folder to parent/name (replacing an
// older folder with that name), and points parent/latest at it, after moving away (set_aside) what is there but is not
// our link or file. Calls remove_leftovers(parent) first. If the process is killed at any moment, or the power fails,
// the older checkpoints stay whole and `latest` points to one of them. If write throws, the temporary folder is
// removed.
std::string write_checkpoint(const std::string& parent, const std::string& name,
                             const std::function<std::string(const std::string& folder)>& write);

// The parts of write_checkpoint(), for files that several processes write: begin_checkpoint() makes the temporary
// folder, and parent, but not the folder around it, and returns its path; finish_checkpoint() adds state.json, puts the
// folder in place and returns parent/name; before it changes anything else in parent, it calls check(), which throws if
// that may not be. drop_checkpoint() removes the temporary folder after an error, and ignores its own.
std::string begin_checkpoint(const std::string& parent, const std::string& name);
std::string finish_checkpoint(
    const std::string& parent, const std::string& name, const std::string& temporary, const std::string& state,
    const std::function<void()>& check = [] {});
void drop_checkpoint(const std::string& temporary);

// Removes a checkpoint. state.json is removed first, and that is synced to disk, so that a removal which a kill or a
// power failure interrupts leaves no folder that looks whole. Throws Error, and removes nothing, if the folder is a
// link or a mount point, or holds files that Triad has not made.
void remove_checkpoint(const std::string& folder);
bool is_checkpoint(const std::string& folder);  // the folder holds state.json

struct CheckpointFolder {
  int64_t step = 0;
  std::string path;
};
// Complete step_N folders in parent, sorted by step; none if parent does not exist.
std::vector<CheckpointFolder> list_checkpoints(const std::string& parent);
// The complete checkpoint with the highest step, even if `latest` points elsewhere; `latest` itself only if it is a
// folder whose step is higher than all others. If there is no step_N folder: the one that `latest` points to, if it is
// complete.
std::optional<std::string> find_newest_checkpoint(const std::string& parent);

// The path that `latest` in parent, a link or a file, points to, whether or not that exists; nullopt if it is neither.
std::optional<std::string> target_of_latest(const std::string& parent);
// The step of `latest` if that is a folder, a checkpoint copy; -1 for a folder without a readable step; nullopt if it
// is no folder.
std::optional<int64_t> step_of_latest_folder(const std::string& parent);

// The checkpoint that a user's path names: its own folder, a run's folder, its checkpoints folder, or `latest` in
// either, which means the newest one. Symbolic links are resolved once, here. If there is no checkpoint, throws an
// Error that says what was looked for.
std::string resolve_checkpoint(const std::string& path);

// Removes the oldest complete checkpoints until keep_last are left. Also kept are checkpoints whose step is a positive
// multiple of keep_every (0: none), that of step `best` (-1: none), and the one that `latest` points to. keep_last 0:
// removes nothing. One that cannot or may not be removed (see remove_checkpoint) is kept with a warning on stderr.
void thin_out_checkpoints(const std::string& parent, int64_t keep_last, int64_t keep_every, int64_t best = -1);

// Moves files and folders, in the given order, to a new folder parent/set_aside_K, where K is the first free number.
// Returns the new folder's path. No function here looks for checkpoints there. A file may come from another file
// system; a folder may not. A link itself is moved. A mount point is an Error before anything is moved.
std::string set_aside(const std::string& parent, const std::vector<std::string>& paths);
std::string next_set_aside(const std::string& parent);  // the path that set_aside() would use
// The set_aside_K folders in parent, sorted by name; none if parent does not exist.
std::vector<std::string> list_set_aside(const std::string& parent);

// Removes the temporary folders and links that killed processes have left in parent. A complete folder under a
// temporary name is renamed to its final name, if that name is free. What cannot be removed is a warning on stderr.
void remove_leftovers(const std::string& parent);

}  // namespace triad
