// The number of threads for CPU loops: OMP_NUM_THREADS if set, else one for each core that this process may use.
// Hardware threads of one core count once, a cgroup's quota of CPU time is an upper limit, and the ranks of one host
// divide the cores among them.
#pragma once
#include <string>

namespace triad {

// What limits the number of threads of this process.
struct CpuShare {
  int cores = 1;                // physical cores in this process's affinity mask
  int machine_cores = 1;        // physical cores of all online CPUs
  double quota = 0;             // CPU time that the cgroup allows, in CPUs; 0: no limit
  int local_ranks = 1;          // processes of this run on this host
  bool launcher_binds = false;  // the launcher by default binds each rank to cores of its own
};
int choose_threads(const CpuShare&);

// The smallest quota among the cgroups that contain this process, in CPUs; 0: no limit. root: replaces / in tests.
double cpu_quota(const std::string& root = "");

// OMP_NUM_THREADS if set, else choose_threads() for this process; computed once.
int cpu_threads();

}  // namespace triad
