#include "engine/backend_cpu.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include "engine/check.h"
#include "engine/memory.h"

namespace triad::backend::cpu {

namespace {

// What a new program may take: free memory and the caches that give way to it, within the limit of this process's
// group.
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
  return available;
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

std::byte* allocate(int64_t bytes) {
  void* p = std::aligned_alloc(kMemAlign, static_cast<size_t>(std::max(align_up(bytes), kMemAlign)));
  TRIAD_CHECK(p != nullptr, "out of host memory: {} bytes asked for, {} free", bytes, info().free_bytes);
  return static_cast<std::byte*>(p);
}

void deallocate(std::byte* p) noexcept { std::free(p); }

}  // namespace triad::backend::cpu
