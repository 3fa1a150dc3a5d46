#include "engine/backend_cpu.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include "engine/check.h"
#include "engine/memory.h"

namespace triad::backend::cpu {

namespace {

// Bytes that this process can still allocate: free memory and reclaimable caches, within the ulimit and the cgroup's
// limit.
int64_t available_memory(int64_t total) {
  int64_t available = total;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key, unit; meminfo >> key;) {
    int64_t kib = 0;
    if (!(meminfo >> kib)) break;
    std::getline(meminfo, unit);
    if (key == "MemAvailable:") available = kib * 1024;
  }
  int64_t limit = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit) available = std::min(available, limit);
  rlimit addresses{};
  int64_t pages = 0;
  if (getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY &&
      std::ifstream("/proc/self/statm") >> pages)  // limit set by ulimit -v
    available = std::min(available, static_cast<int64_t>(addresses.rlim_cur) - pages * sysconf(_SC_PAGESIZE));
  return std::max<int64_t>(available, 0);
}

}  // namespace

DeviceInfo info() {
  DeviceInfo d;
  d.name = "CPU";
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);)
    if (line.rfind("model name", 0) == 0) {
      d.name = line.substr(std::min(line.size(), line.find(':') + 2));
      break;
    }
  d.memory_bytes = sysconf(_SC_PAGESIZE) * int64_t{sysconf(_SC_PHYS_PAGES)};
  d.free_bytes = available_memory(d.memory_bytes);
  return d;
}

int64_t bytes_in_use() {
  int64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

std::byte* allocate(int64_t bytes) {
  void* p = std::aligned_alloc(kMemAlign, static_cast<size_t>(std::max(align_up(bytes), kMemAlign)));
  if (p == nullptr) {
    const int64_t free = info().free_bytes;
    throw OutOfMemory(fmt::format("out of host memory: {} bytes asked for, {} free", bytes, free), bytes, free);
  }
  return static_cast<std::byte*>(p);
}

void deallocate(std::byte* p) noexcept { std::free(p); }

}  // namespace triad::backend::cpu
