// FolderLock: one process at a time writes in a folder. flock(2) on the folder itself leaves nothing in it, stays when
// the folder is emptied, and goes with the process, however that ends. Other hosts see it where their file system says
// so: NFS does not.
#pragma once
#include <string>

#include "io/file.h"

namespace triad {

class FolderLock {
 public:
  // True: it is ours, now or already. False: another process has it. Where the file system knows no locks a warning is
  // all that comes of it.
  bool take(const std::string& folder);
  // The same, but asks again for up to so long, and says once on stderr what is waited for.
  bool take_within(double seconds, const std::string& folder);
  bool held() const { return file_.get() >= 0; }

 private:
  FileHandle file_;
};

// " (pid 123)", of the process that has the folder's lock; empty where the system does not say.
std::string lock_holder(const std::string& folder);

}  // namespace triad
