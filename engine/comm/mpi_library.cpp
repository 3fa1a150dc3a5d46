// libtriad_mpi.so implements mpi_functions.h with the MPI it is linked to. MPI's own error handler prints an error and
// ends the run, which is what a failed call should do.
#include <mpi.h>

#include <chrono>
#include <thread>
#include <vector>

#include "engine/comm/mpi_functions.h"

namespace {

std::vector<MPI_Comm> communicators;  // [0]: all ranks

void init(int* rank, int* world) {
  int initialized = 0, provided = 0;
  MPI_Initialized(&initialized);
  if (initialized == 0) MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, rank);
  MPI_Comm_size(MPI_COMM_WORLD, world);
  communicators = {MPI_COMM_WORLD};
}

int split(int color) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm group = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, color, rank, &group);
  communicators.push_back(group);
  return static_cast<int>(communicators.size()) - 1;
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

MPI_Comm at(int communicator) { return communicators[static_cast<size_t>(communicator)]; }

void all_gather(int communicator, const void* mine, void* all, int64_t bytes) {
  const int n = static_cast<int>(bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Iallgather(mine, n, MPI_BYTE, all, n, MPI_BYTE, at(communicator), &request);
  wait(request);
}

void all_to_all(int communicator, const void* to, void* from, int64_t bytes) {
  const int n = static_cast<int>(bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Ialltoall(to, n, MPI_BYTE, from, n, MPI_BYTE, at(communicator), &request);
  wait(request);
}

void finalize() { MPI_Finalize(); }

}  // namespace

extern "C" const triad::MpiFunctions triad_mpi_functions = {init, version, split, all_gather, all_to_all, finalize};
