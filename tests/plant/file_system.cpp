// File systems with a fault, loaded in front of the program: TRIAD_NO_LOCKS makes of every one one without flock(2),
// with TRIAD_SLOW_SYNC=S each fsync(2) takes S seconds more, and while FILE.bad exists, TRIAD_BAD_DISK=FILE makes
// each pread(2) of FILE fail.
#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

extern "C" int flock(int fd, int operation) {
  static const auto real = reinterpret_cast<int (*)(int, int)>(dlsym(RTLD_NEXT, "flock"));
  if (std::getenv("TRIAD_NO_LOCKS") == nullptr) return real(fd, operation);
  errno = ENOLCK;
  return -1;
}

extern "C" int fsync(int fd) {
  static const auto real = reinterpret_cast<int (*)(int)>(dlsym(RTLD_NEXT, "fsync"));
  if (const char* slow_s = std::getenv("TRIAD_SLOW_SYNC"))
    std::this_thread::sleep_for(std::chrono::duration<double>(std::atof(slow_s)));
  return real(fd);
}

namespace {

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
