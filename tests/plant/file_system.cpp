// File systems with a fault, loaded in front of the program: TRIAD_NO_LOCKS makes of every one one without flock(2),
// with TRIAD_SLOW_SYNC=S each fsync(2) takes S seconds more.
#include <dlfcn.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
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
