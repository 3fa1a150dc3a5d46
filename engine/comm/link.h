// Link: how the processes of a run exchange bytes between hosts' memories, over MPI or over TCP. Every rank makes the
// same calls in the same order; each returns when its own part is done.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "engine/comm/launch_env.h"

namespace triad {

class Link {
 public:
  virtual ~Link() = default;
  virtual std::string name() const = 0;
  // all[r] = rank r's mine, `bytes` each.
  virtual void all_gather(const void* mine, void* all, int64_t bytes) = 0;
  // from[r] = what rank r has as to[this rank], `bytes` each.
  virtual void all_to_all(const void* to, void* from, int64_t bytes) = 0;
  // The orderly end, which all ranks reach. A link that is destroyed without it leaves the others to their fate.
  virtual void finish() = 0;
};

// MPI is loaded when it is asked for, from libtriad_mpi.so beside the program: so the program itself runs where there
// is none. Throws if it cannot be, or if it counts other ranks than the launcher.
std::unique_ptr<Link> open_mpi_link(const LaunchEnv&);
std::string why_no_mpi();  // empty: it can be loaded

// Every rank connects to rank 0 (engine/comm/rendezvous.h). For the few bytes of a run's control, and for data where
// nothing else is there.
std::unique_ptr<Link> open_tcp_link(const LaunchEnv&, double timeout_s);

}  // namespace triad
