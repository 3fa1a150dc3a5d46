// libtriad_mpi.so: mpi_functions.h over the MPI with which it was built. MPI handles its errors itself: by default it
// prints them and ends the run, as intended.
#include <mpi.h>

#include <chrono>
#include <thread>

#include "engine/comm/mpi_functions.h"

namespace {

void init(int* rank, int* world) {
  int initialized = 0, provided = 0;
  MPI_Initialized(&initialized);
  if (initialized == 0) MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, rank);
  MPI_Comm_size(MPI_COMM_WORLD, world);
}

const char* version() {
  static char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  for (char* c = text; *c != '\0'; ++c)
    if (*c == ',' || *c == '\n') *c = '\0';  // keeps "Open MPI v4.1.4", drops the packager's name
  return text;
}

// Waits by polling, at first without pauses, then with short sleeps. MPI's own wait always polls without pauses, which
// makes sums very slow if ranks share cores.
void wait(MPI_Request request) {
  constexpr int kSpins = 500;
  constexpr auto kPause = std::chrono::microseconds(50);
  for (int tries = 0, done = 0;; ++tries) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done != 0) return;
    if (tries < kSpins)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(kPause);
  }
}

void all_gather(const void* mine, void* all, int64_t bytes) {
  const int n = static_cast<int>(bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Iallgather(mine, n, MPI_BYTE, all, n, MPI_BYTE, MPI_COMM_WORLD, &request);
  wait(request);
}

void all_to_all(const void* to, void* from, int64_t bytes) {
  const int n = static_cast<int>(bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Ialltoall(to, n, MPI_BYTE, from, n, MPI_BYTE, MPI_COMM_WORLD, &request);
  wait(request);
}

void finalize() { MPI_Finalize(); }

}  // namespace

extern "C" const triad::MpiFunctions triad_mpi_functions = {init, version, all_gather, all_to_all, finalize};
