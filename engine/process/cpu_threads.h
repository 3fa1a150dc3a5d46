// The thread count for CPU loops: OMP_NUM_THREADS if set, else one for each core that this process may use. A core's
// hardware threads count once, a cgroup's CPU time quota is an upper limit, and a host's ranks divide the cores among
// them.
#pragma once
#include <string>

namespace triad {

// What limits this process's thread count.
struct CpuShare {
  int cores = 1;                // physical cores in this process's affinity mask
  int machine_cores = 1;        // physical cores with online CPUs
  double quota = 0;             // CPU time that the cgroup allows, in CPUs; 0: no limit
  int local_ranks = 1;          // this run's processes on this host
  bool launcher_binds = false;  // whether the launcher by default binds each rank to its own cores
};
int choose_threads(const CpuShare&);

// The smallest quota among the cgroups that contain this process, in CPUs; 0: no limit. root: replaces / in tests.
double cpu_quota(const std::string& root = "");

// OMP_NUM_THREADS if set, else choose_threads() for this process; computed once.
int cpu_threads();

}  // namespace triad
