// How many threads CPU loops are split over, unless OMP_NUM_THREADS says it: one for each core that this process may
// use. Hardware threads of one core count once, a cgroup's quota of CPU time limits them, and the ranks of one host
// share them.
#pragma once
#include <string>

namespace triad {

struct CpuShare {
  int cores = 1;                // within this process's affinity
  int machine_cores = 1;        // of all CPUs that are online
  double quota = 0;             // CPUs' worth of time that the cgroup grants; 0: no limit
  int local_ranks = 1;          // processes of this run on this host
  bool launcher_binds = false;  // the launcher gives each rank cores of its own, unless it was asked not to
};
int choose_threads(const CpuShare&);

// The least quota of the cgroups that hold this process, in CPUs; 0: none. root: in place of /, for tests.
double cpu_quota(const std::string& root = "");

// OMP_NUM_THREADS if it is set, else the choice for this process; found out once.
int cpu_threads();

}  // namespace triad
