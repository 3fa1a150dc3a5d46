// Faulty file systems for tests, preloaded with LD_PRELOAD. Environment variables:
//   TRIAD_NO_LOCKS=1               flock(2) fails, as on a file system without locks
//   TRIAD_SLOW_SYNC="S [WORD]"     fsync(2) takes S more seconds; with WORD only for paths that contain it
//   TRIAD_BAD_DISK=FILE            pread(2) of FILE fails while FILE.bad exists
//   TRIAD_FULL_DISK="A B"          pwrite(2) to paths that contain A and B fails as on a full disk
#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <thread>

extern "C" int flock(int fd, int operation) {
  static const auto real = reinterpret_cast<int (*)(int, int)>(dlsym(RTLD_NEXT, "flock"));
  if (std::getenv("TRIAD_NO_LOCKS") == nullptr) return real(fd, operation);
  errno = ENOLCK;
  return -1;
}

extern "C" int fsync(int fd) {
  static const auto real = reinterpret_cast<int (*)(int)>(dlsym(RTLD_NEXT, "fsync"));
  double slow_s = 0;
  char word[100] = "";
  if (const char* slow = std::getenv("TRIAD_SLOW_SYNC");
      slow != nullptr && std::sscanf(slow, "%lf %99s", &slow_s, word) >= 1) {
    std::error_code gone;
    const std::string path = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), gone).string();
    if (path.find(word) != std::string::npos) std::this_thread::sleep_for(std::chrono::duration<double>(slow_s));
  }
  return real(fd);
}

namespace {

std::string path_of(int fd) {
  std::error_code gone;
  return std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), gone).string();
}

bool is_full(int fd) {
  char a[100] = "", b[100] = "";
  const char* full = std::getenv("TRIAD_FULL_DISK");
  if (full == nullptr || std::sscanf(full, "%99s %99s", a, b) != 2) return false;
  const std::string path = path_of(fd);
  return path.find(a) != std::string::npos && path.find(b) != std::string::npos;
}

bool is_bad(int fd) {
  const char* file = std::getenv("TRIAD_BAD_DISK");
  if (file == nullptr || ::access((std::string(file) + ".bad").c_str(), F_OK) != 0) return false;
  char name[4096];
  const ssize_t n = ::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), name, sizeof name);
  return n > 0 && std::string(name, static_cast<size_t>(n)) == file;
}

}  // namespace

extern "C" ssize_t pread(int fd, void* to, size_t bytes, off_t offset) {
  static const auto real = reinterpret_cast<ssize_t (*)(int, void*, size_t, off_t)>(dlsym(RTLD_NEXT, "pread"));
  if (!is_bad(fd)) return real(fd, to, bytes, offset);
  errno = EIO;
  return -1;
}

extern "C" ssize_t pwrite(int fd, const void* from, size_t bytes, off_t offset) {
  static const auto real = reinterpret_cast<ssize_t (*)(int, const void*, size_t, off_t)>(dlsym(RTLD_NEXT, "pwrite"));
  if (!is_full(fd)) return real(fd, from, bytes, offset);
  errno = ENOSPC;
  return -1;
}
