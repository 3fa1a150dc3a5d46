// The interface of libtriad_mpi.so: the MPI calls that a run needs, without types of a particular MPI. So the program
// does not depend on the MPI with which it was built.
#pragma once
#include <cstdint>

namespace triad {

struct MpiFunctions {
  void (*init)(int* rank, int* world);
  const char* (*version)();
  void (*all_gather)(const void* mine, void* all, int64_t bytes);
  void (*all_to_all)(const void* to, void* from, int64_t bytes);
  void (*finalize)();
};
inline constexpr const char* kMpiFunctionsSymbol = "triad_mpi_functions";

}  // namespace triad
