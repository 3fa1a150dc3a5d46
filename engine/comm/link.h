// Link: moves bytes between the host memory of a run's processes, over MPI or TCP. Every rank must make the same calls
// in the same order; each call returns when this rank's part is done.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/comm/launch_env.h"

namespace triad {

class Link {
 public:
  virtual ~Link() = default;
  virtual std::string name() const = 0;
  // all[r] = rank r's `mine`, for every r; each is `bytes` long.
  virtual void all_gather(const void* mine, void* all, int64_t bytes) = 0;
  // from[r] = part [this rank] of rank r's `to`, for every r; each part is `bytes` long.
  virtual void all_to_all(const void* to, void* from, int64_t bytes) = 0;
  // A link between some of the ranks, which include this one, ascending. Their numbers there are their places in
  // `ranks`. Collective: every rank calls it, for groups that divide the ranks; and all groups make the same calls at
  // the same time. This link must outlive it.
  virtual std::unique_ptr<Link> group(const std::vector<int>& ranks) = 0;
  // Tells the ranks' names for messages; without it they are numbers.
  virtual void name_ranks(const std::vector<std::string>&) {}
  // Ends a successful run; collective. Destroying a link without it leaves the other ranks blocked.
  virtual void finish() = 0;
};

// MPI is loaded on the first call, from libtriad_mpi.so in the program's folder or, where the program is installed, in
// PREFIX/lib/triad. So the program also runs without MPI.
// Throws if that fails, or if MPI's rank or world differs from the launcher's.
std::unique_ptr<Link> open_mpi_link(const LaunchEnv&);
std::string why_no_mpi();  // empty if MPI can be loaded

// Connects every rank to rank 0 (engine/comm/rendezvous.h), which forwards all bytes. Sufficient for control messages;
// used for tensors only where there is neither MPI nor NCCL.
std::unique_ptr<Link> open_tcp_link(const LaunchEnv&, double timeout_s);

}  // namespace triad
