// What libtriad_mpi.so offers: the few calls of MPI that a run needs, free of any one MPI's types, so that the program
// that loads it was not built against one.
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
