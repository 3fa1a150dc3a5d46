// A transmission error that tests inject with LD_PRELOAD. TRIAD_FLIP="RANK COUNT": in the COUNT-th all-gather with at
// least 1,000 bytes on rank RANK, flips a bit midway in the bytes received from rank 0. Assumes that MPI's handles are
// pointers, as in Open MPI. And a host's name: TRIAD_HOST=NAME, for ranks that count as those of several hosts.
#include <dlfcn.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct Flip {
  int rank = 0, count = 0, seen = 0;
  unsigned char* received = nullptr;  // receive buffer in the gather to corrupt, while it is in progress
  size_t bytes = 0;
  Flip() {
    const char* text = std::getenv("TRIAD_FLIP");
    const char* own = std::getenv("OMPI_COMM_WORLD_RANK");
    if (text == nullptr || own == nullptr || std::sscanf(text, "%d %d", &rank, &count) != 2 || rank != std::atoi(own))
      count = 0;
  }
};
Flip& flip() {
  static Flip plan;
  return plan;
}

template <class F>
F next(F, const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" int MPI_Iallgather(const void* mine, int n, void* type, void* all, int each, void* all_type, void* comm,
                              void** request) {
  static const auto real = next(&MPI_Iallgather, "MPI_Iallgather");
  Flip& f = flip();
  constexpr int kLarge = 1000;
  if (f.count > 0 && n >= kLarge && ++f.seen == f.count)
    f.received = static_cast<unsigned char*>(all), f.bytes = static_cast<size_t>(each);
  return real(mine, n, type, all, each, all_type, comm, request);
}

extern "C" int MPI_Test(void** request, int* done, void* status) {
  static const auto real = next(&MPI_Test, "MPI_Test");
  const int result = real(request, done, status);
  Flip& f = flip();
  if (*done != 0 && f.received != nullptr) {
    f.received[f.bytes / 2] ^= 1;
    f.received = nullptr;
  }
  return result;
}

extern "C" int gethostname(char* name, size_t size) noexcept {
  static const auto real = next(&gethostname, "gethostname");
  const char* const other = std::getenv("TRIAD_HOST");
  if (other == nullptr) return real(name, size);
  std::strncpy(name, other, size);
  return 0;
}
