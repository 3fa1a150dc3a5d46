// RunFolder: the folder of a run. It decides whether a run may start in the folder, removes the files of an earlier
// run, and locks the folder.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "io/folder_lock.h"

namespace triad {

// Whether path is inside the folder once symbolic links are resolved.
bool is_inside(const std::string& path, const std::string& folder);

// Locks the folder, so that a second run cannot overwrite its files. Waits up to 10 s for another run in it to end,
// then throws Error. Does nothing if the folder does not exist.
void lock_run_folder(FolderLock&, const std::string& path);

class RunFolder {
 public:
  enum class Start { fresh, overwrite, resume, join };
  // Creates, checks, locks and cleans the folder. start fresh: throws if the folder holds a complete checkpoint or
  // final weights (the message names --resume and --overwrite). fresh and overwrite: remove all files and folders that
  // a run writes; other files stay. resume: removes only temporary files that a killed run has left. join, for other
  // ranks: does nothing, because the first rank has prepared and locked the folder. Throws Error before any change if
  // path is not a writable folder, is itself a checkpoint, holds a .HALT of an earlier run, or is locked by another
  // run.
  RunFolder(const std::string& path, Start start, FolderLock& lock);
  // Throws the constructor's errors about the content of the folder, without changing it. A folder that does not exist
  // passes.
  static void refuse(const std::string& path, Start start);
  // For a resume from resume_from, a checkpoint of the run in path: throws Error with the list of newer complete
  // checkpoints if there are any.
  static void refuse_older(const std::string& path, const std::string& resume_from);

  // If path is the folder of a completed run (it has metrics.json and final weights), the run's last step; else
  // nullopt.
  static std::optional<int64_t> complete_at(const std::string& path);

  // Returns the folder to its state at this step, from which the run resumes: removes memory snapshots and table rows
  // of later steps, and moves later checkpoints and the final weights of another step to a new folder (set_aside of
  // io/checkpoint.h). Returns the new folder's path; empty if nothing was moved.
  std::string rewind(int64_t step) const;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  std::string checkpoints() const { return file("checkpoints"); }
  bool halt_requested() const;  // whether the file .HALT, which requests a stop, exists
  void clear_halt() const;

 private:
  std::string path_;
};

}  // namespace triad
