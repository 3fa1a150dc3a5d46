// The interface of libtriad_mpi.so: the MPI calls that a run needs, without the types of a particular MPI. So the
// program does not depend on the MPI it was built with.
#pragma once
#include <cstdint>

namespace triad {

struct MpiFunctions {
  void (*init)(int* rank, int* world);
  const char* (*version)();
  // A communicator for the ranks that pass the same color, in their order, for the functions below; 0 has all ranks.
  // Collective.
  int (*split)(int color);
  void (*all_gather)(int communicator, const void* mine, void* all, int64_t bytes);
  void (*all_to_all)(int communicator, const void* to, void* from, int64_t bytes);
  void (*finalize)();
};
inline constexpr const char* kMpiFunctionsSymbol = "triad_mpi_functions";

}  // namespace triad
