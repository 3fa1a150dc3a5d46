// FolderLock: lets at most one process write in a folder. The lock is flock(2) on the folder itself: it creates no
// file, survives removing the folder's files, and ends with the process. Processes on other hosts see the lock only if
// the file system supports that; NFS does not.
#pragma once
#include <string>

#include "io/file.h"

namespace triad {

class FolderLock {
 public:
  // Tries to lock the folder. True if this object holds the lock now; false if another process holds it. On a file
  // system without locks, prints a warning and returns true.
  bool take(const std::string& folder);
  // Tries for up to `seconds`, and prints once on stderr which folder it waits for.
  bool take_within(double seconds, const std::string& folder);
  bool held() const { return file_.get() >= 0; }
  // Whether no other process holds the lock: false of one that is held on a file system without locks.
  bool exclusive() const { return exclusive_; }

 private:
  FileHandle file_;
  bool exclusive_ = false;
};

// The process that holds the folder's lock, as " (pid 123)"; "" if /proc/locks does not list it.
std::string lock_holder(const std::string& folder);

}  // namespace triad
