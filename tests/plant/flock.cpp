// One more fault that is loaded in front of the program: TRIAD_NO_LOCKS makes of every file system one without
// flock(2).
#include <dlfcn.h>

#include <cerrno>
#include <cstdlib>

extern "C" int flock(int fd, int operation) {
  static const auto real = reinterpret_cast<int (*)(int, int)>(dlsym(RTLD_NEXT, "flock"));
  if (std::getenv("TRIAD_NO_LOCKS") == nullptr) return real(fd, operation);
  errno = ENOLCK;
  return -1;
}
