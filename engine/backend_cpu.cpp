#include "engine/backend_cpu.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include "engine/check.h"
#include "engine/memory.h"

namespace triad::backend::cpu {

DeviceInfo info() {
  DeviceInfo d;
  d.name = "CPU";
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);)
    if (line.rfind("model name", 0) == 0) {
      d.name = line.substr(std::min(line.size(), line.find(':') + 2));
      break;
    }
  const int64_t page = sysconf(_SC_PAGESIZE);
  d.memory_bytes = page * sysconf(_SC_PHYS_PAGES);
  d.free_bytes = page * sysconf(_SC_AVPHYS_PAGES);
  return d;
}

std::byte* allocate(int64_t bytes) {
  void* p = std::aligned_alloc(kMemAlign, static_cast<size_t>(std::max(align_up(bytes), kMemAlign)));
  TRIAD_CHECK(p != nullptr, "out of host memory: {} bytes asked for, {} free", bytes, info().free_bytes);
  return static_cast<std::byte*>(p);
}

void deallocate(std::byte* p) noexcept { std::free(p); }

}  // namespace triad::backend::cpu
