// RunFolder: a run's folder. It decides whether a run may start in the folder, removes an earlier run's files, and
// locks the folder.
#pragma once
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "engine/check.h"
#include "io/file.h"
#include "io/folder_lock.h"

namespace triad {

// Whether path is inside the folder once symbolic links are resolved, or is the same as something up to two levels
// below it, under another path through a mount.
bool is_inside(const std::string& path, const std::string& folder);

// Locks the folder, so that a second run cannot overwrite its files. Waits up to 10 s for another run in it to end,
// then throws Error. Does nothing if the folder does not exist.
void lock_run_folder(FolderLock&, const std::string& path);

class RunFolder {
 public:
  enum class Start { fresh, overwrite, resume, join };
  // Creates, checks, locks and cleans the folder. start fresh: throws if the folder holds a complete checkpoint or
  // final weights (the message names --resume and --overwrite). fresh and overwrite: remove all files and folders that
  // a run has made; other files stay. resume: removes only temporary files that a killed run has left. join, for other
  // ranks: does nothing, because the first rank has prepared and locked the folder. Throws Error before any change if
  // path is not a writable folder, is itself a checkpoint, holds an earlier run's .HALT, is locked by another run, or
  // holds files in this run's way that Triad has not made (train/checkpoint/run_files.h).
  RunFolder(const std::string& path, Start start, FolderLock& lock);
  // Throws the constructor's errors about the folder's content, without changing it. A folder that does not exist
  // passes.
  static void refuse(const std::string& path, Start start);
  // For a resume from resume_from, a checkpoint of the run in path: throws an Error that lists newer complete
  // checkpoints if there are any.
  static void refuse_older(const std::string& path, const std::string& resume_from);

  // Whether a checkpoint belongs to the run in path, under any path.
  static bool is_checkpoint_of(const std::string& path, const std::string& checkpoint);

  // If path is a completed run's folder (it has metrics.json and final weights), the run's last step; else nullopt.
  static std::optional<int64_t> complete_at(const std::string& path);
  // How many evaluations a completed run's validation loss had not fallen in at its end; 0 if that is not known.
  static int64_t evaluations_since(const std::string& path);

  // Returns the folder to its state at this step, from which the run resumes: removes later steps' memory snapshots and
  // table rows, and moves later checkpoints and another step's final weights to a new folder (set_aside in
  // io/checkpoint.h). Returns the new folder's path; empty if nothing was moved.
  std::string rewind(int64_t step) const;

  // From here on, lost() compares the folder with the one that is at path() now. run_id: what env.json in it holds
  // under kRunId. Each rank holds the folder.
  void hold(const std::string& run_id);
  // Whether path() leads to this run's folder no more: the folder was moved, removed or replaced by another run's. One
  // whose env.json and config.json are gone counts as removed: rm -r leaves it if the run has made a file in the
  // meantime. May be called from any thread.
  bool lost() const;
  // The same after a write in it has failed: env.json alone may be gone so far, or not yet, so this waits a second.
  bool lost_after_failure() const;
  std::string lost_text() const;  // why a lost folder is, for a message
  void require() const;           // throws Error with that text if the folder is lost
  // Makes a new folder next to this one, or where that fails in the current or the temporary folder; for what a run
  // whose folder is lost saves. Returns its path.
  std::string make_rescue_folder() const;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  std::string checkpoints() const { return file("checkpoints"); }
  bool halt_requested() const;  // whether the file .HALT, which requests a stop, exists
  void clear_halt() const;

 private:
  std::string whereabouts() const;  // of a lost folder

  std::string path_;
  FileHandle held_;  // keeps the folder's inode number, by which it is recognised, from being used again
  std::string run_id_;
  bool has_env_ = false;                            // env.json was in the folder, as this rank saw it, when it was held
  mutable std::mutex mutex_;                        // guards known_env_
  mutable std::pair<uint64_t, int64_t> known_env_;  // inode and time of the env.json that was read last
};

inline constexpr const char* kRunId = "run";                                // the key in env.json
inline constexpr const char* kEvaluationsSince = "evaluations_since_best";  // the key in metrics.json

// The run's folder is lost. All ranks throw it together.
class FolderLost : public Error {
 public:
  using Error::Error;
};

}  // namespace triad
