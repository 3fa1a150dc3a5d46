#include "io/folder_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#include "engine/check.h"

namespace triad {

bool FolderLock::take(const std::string& folder) {
  if (held()) return true;
  FileHandle file(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (file.get() < 0) fail("{}: the folder cannot be opened: {}", folder, std::strerror(errno));
  int status;
  do status = ::flock(file.get(), LOCK_EX | LOCK_NB);
  while (status != 0 && errno == EINTR);
  if (status != 0 && errno == EWOULDBLOCK) return false;
  if (status != 0)
    fmt::print(stderr, "triad: {}: cannot be locked ({}), so another process that writes there would not be noticed\n",
               folder, std::strerror(errno));
  exclusive_ = status == 0;
  file_ = std::move(file);
  return true;
}

bool FolderLock::take_within(double seconds, const std::string& folder) {
  using Clock = std::chrono::steady_clock;
  if (take(folder)) return true;
  fmt::print(stderr, "triad: {} is in use by another process{}: waiting up to {:.0f} s for its end\n", folder,
             lock_holder(folder), seconds);
  std::fflush(stderr);
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (take(folder)) return true;
  }
  return false;
}

std::string lock_holder(const std::string& folder) {
  struct stat info {};
  if (::stat(folder.c_str(), &info) != 0) return "";
  // What to find in /proc/locks. A lock's line is "1: FLOCK  ADVISORY  WRITE 8806 fe:00:10952755 0 EOF"; waiting
  // processes' lines look different.
  const std::string wanted = fmt::format("{:02x}:{:02x}:{}", major(info.st_dev), minor(info.st_dev), info.st_ino);
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    std::istringstream fields(line);
    std::string number, kind, mode, access, inode;
    int pid = 0;
    if (fields >> number >> kind >> mode >> access >> pid >> inode && kind == "FLOCK" && inode == wanted && pid > 0)
      return fmt::format(" (pid {})", pid);
  }
  return "";
}

}  // namespace triad
