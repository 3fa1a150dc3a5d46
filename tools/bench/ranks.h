// What multi-rank benches (mpirun -np N triad bench ...) share: errors, and the rate of links between ranks.
#pragma once
#include <exception>

#include "engine/comm/comm.h"
#include "engine/context.h"

namespace triad {

// Calls work(). With several ranks an error ends this process, and so the others: unwinding would free memory that
// pending collectives use (Comm::abandon). What pending work uses must therefore be declared outside work().
template <class Work>
void run_on_ranks(Comm& comm, Work&& work) {
  constexpr int kFailure = 1, kUsage = 2;
  if (comm.world() == 1) return work();
  try {
    work();
  } catch (const UsageError& e) {
    comm.abandon(e.what(), kUsage, [] {});
  } catch (const std::exception& e) {
    comm.abandon(e.what(), kFailure, [] {});
  }
}

// The rate at which a group's ranks exchange large tensors, all with all: bytes/s that each sends (and receives), for
// the slowest rank. Collective; allocates memory and frees it.
double measure_links(Device, Comm& group);

}  // namespace triad
