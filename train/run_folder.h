// The folder of a run (SPEC.md section 3): what may be there at the start, and where things go.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "io/folder_lock.h"

namespace triad {

// Whether path lies in the folder, links followed.
bool is_inside(const std::string& path, const std::string& folder);

// Two runs at once would write one another's files. Waits some seconds for a run that is ending, as one that was just
// killed does; an Error if it is still there then. A folder that is not there yet is nobody's.
void lock_run_folder(FolderLock&, const std::string& path);

class RunFolder {
 public:
  enum class Start { fresh, overwrite, resume, join };
  // Prepares path. fresh: a folder that holds a whole checkpoint or final weights is an error that names --resume and
  // --overwrite; otherwise, and with overwrite, the files and folders that SPEC.md names are removed and anything else
  // stays; with resume those alone that a killed run has left unfinished. A path that is no folder, that cannot be
  // written, that is itself a checkpoint, or that holds a stale .HALT is an error that touches nothing, as is one whose
  // lock another run holds. join: the first rank has prepared and locked it.
  RunFolder(const std::string& path, Start start, FolderLock& lock);
  // Of these errors those that depend on what is in the folder; one that is not there has none.
  static void refuse(const std::string& path, Start start);
  // An Error that lists them where path has whole checkpoints newer than this one, which is one of its own.
  static void refuse_older(const std::string& path, const std::string& resume_from);

  // The step that a run in path has ended with, having trained all that it was to; nothing where there is none.
  static std::optional<int64_t> complete_at(const std::string& path);

  // After a resume at this step: snapshots and rows of later steps are gone. Later checkpoints, and final weights that
  // are not this step's, are moved to a folder (io/checkpoint.h: set_aside) whose path is returned; empty: none were
  // there.
  std::string rewind(int64_t step) const;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  std::string checkpoints() const { return file("checkpoints"); }
  bool halt_requested() const;  // a file .HALT has appeared
  void clear_halt() const;

 private:
  std::string path_;
};

}  // namespace triad
