// RunFolder: the folder of a run. Decides whether a run may start in it, removes the files of an earlier run, and locks
// it.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "io/folder_lock.h"

namespace triad {

// Whether path is inside the folder after resolving links.
bool is_inside(const std::string& path, const std::string& folder);

// Locks the folder against a second run, which would overwrite its files. Waits up to 10 s for another run to end, then
// throws Error. Does nothing if the folder does not exist.
void lock_run_folder(FolderLock&, const std::string& path);

class RunFolder {
 public:
  enum class Start { fresh, overwrite, resume, join };
  // Creates, checks, locks and cleans the folder.
  // fresh: throws if it holds a complete checkpoint or final weights (the message names --resume and --overwrite).
  // fresh and overwrite: remove all files and folders that a run writes; other files stay.
  // resume: removes only temporary files that a killed run has left.
  // join: does nothing: the first rank has prepared and locked the folder.
  // Throws Error before any change if path is not a writable folder, is itself a checkpoint, holds a stale .HALT, or is
  // locked by another run.
  RunFolder(const std::string& path, Start start, FolderLock& lock);
  // Throws those of the constructor's errors that depend on the folder's content; none if it does not exist.
  static void refuse(const std::string& path, Start start);
  // resume_from: a checkpoint in path. Throws Error with the list of newer complete checkpoints if path holds any.
  static void refuse_older(const std::string& path, const std::string& resume_from);

  // The last step of a completed run in path (one with metrics.json and final weights); nullopt if there is none.
  static std::optional<int64_t> complete_at(const std::string& path);

  // Takes the folder back to this step for a resume: removes memory snapshots and table rows of later steps, and moves
  // later checkpoints and final weights of another step to a new folder (set_aside of io/checkpoint.h). Returns the new
  // folder's path; empty: nothing was moved.
  std::string rewind(int64_t step) const;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  std::string checkpoints() const { return file("checkpoints"); }
  bool halt_requested() const;  // whether the file .HALT exists
  void clear_halt() const;

 private:
  std::string path_;
};

}  // namespace triad
