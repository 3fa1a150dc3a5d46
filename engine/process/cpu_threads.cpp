#include "engine/process/cpu_threads.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <set>
#include <vector>

#include "engine/check.h"
#include "engine/comm/launch_env.h"

namespace triad {

namespace {

// The CPUs in this process's affinity mask. The loop grows the set until it is large enough for the machine's CPUs.
std::vector<int> affinity() {
  std::vector<int> cpus;
  for (int most = CPU_SETSIZE; most <= (1 << 20); most *= 4) {
    cpu_set_t* const set = CPU_ALLOC(most);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(most);
    CPU_ZERO_S(bytes, set);
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    for (int cpu = 0; known && cpu < most; ++cpu)
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    CPU_FREE(set);
    if (known) break;
  }
  return cpus;
}

// How many cores these CPUs belong to. A CPU with unknown topology counts as one core.
int count_cores(const std::vector<int>& cpus) {
  std::set<std::string> cores;
  for (const int cpu : cpus) {
    std::string siblings;
    std::ifstream("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list") >> siblings;
    cores.insert(siblings.empty() ? std::to_string(cpu) : siblings);
  }
  return std::max<int>(1, static_cast<int>(cores.size()));
}

std::vector<int> online() {
  std::vector<int> cpus(static_cast<size_t>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN))));
  for (size_t i = 0; i < cpus.size(); ++i) cpus[i] = static_cast<int>(i);
  return cpus;
}

// A cgroup's CPU quota, in CPUs; 0: none. Version 2 has "max 100000" or "150000 100000" in one file, quota and period
// in microseconds; version 1 has a file for each.
double quota_of(const std::string& folder) {
  double quota = 0, period = 0;
  if (std::ifstream(folder + "/cpu.max") >> quota >> period && period > 0) return quota / period;
  if (std::ifstream(folder + "/cpu.cfs_quota_us") >> quota && quota > 0 &&
      std::ifstream(folder + "/cpu.cfs_period_us") >> period && period > 0)
    return quota / period;
  return 0;
}

}  // namespace

double cpu_quota(const std::string& root) {
  double least = 0;
  const auto look_at = [&](const std::string& folder) {
    const double quota = quota_of(folder);
    if (quota > 0) least = least > 0 ? std::min(least, quota) : quota;
  };
  // The file has lines "0::/path" (cgroup version 2) and "4:cpu,cpuacct:/path" (version 1). A container may see its own
  // group as the root.
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(",cpu,") == std::string::npos) continue;
    const std::string mount = root + (unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu");
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      look_at(mount + path);
      if (path.find('/') == std::string::npos) break;
    }
  }
  return least;
}

int choose_threads(const CpuShare& share) {
  const int ranks = std::max(1, share.local_ranks);
  // A bound rank already has its part of the machine; unbound ranks share all cores that they see.
  const bool bound = share.launcher_binds && share.cores < share.machine_cores;
  int threads = bound ? std::min(share.cores, std::max(1, share.machine_cores / ranks)) : share.cores / ranks;
  if (share.quota > 0) threads = std::min(threads, static_cast<int>(std::floor(share.quota / ranks)));
  return std::max(1, threads);
}

int cpu_threads() {
  static const int threads = [] {
    const char* const asked = std::getenv("OMP_NUM_THREADS");
    // The first number in a list such as "8,2". OpenMP's own function would make libtriad_nsa.so need its library.
    if (const int wanted = asked != nullptr ? std::atoi(asked) : 0; wanted > 0) return wanted;
    LaunchEnv launch;
    try {
      launch = read_launch_env();
    } catch (const UsageError&) {}  // the code that needs the ranks reports this error; other verbs work without ranks
    return choose_threads({.cores = count_cores(affinity()),
                           .machine_cores = count_cores(online()),
                           .quota = cpu_quota(),
                           .local_ranks = launch.local_world,
                           .launcher_binds = launch.speaks_mpi || launch.launcher == "Slurm"});
  }();
  return threads;
}

}  // namespace triad
