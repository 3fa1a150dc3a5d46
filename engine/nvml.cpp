#include "engine/nvml.h"

#include <dlfcn.h>

namespace triad {

namespace {

constexpr int kSuccess = 0;
constexpr double kMiB = 1024.0 * 1024.0, kMilli = 1e-3;

// As nvml.h has them, which need not be there: the library's interface is stable.
struct Memory {
  unsigned long long total, free, used;
};
struct Utilization {
  unsigned gpu, memory;
};

}  // namespace

struct Nvml::Library {
  void* handle = nullptr;
  void* gpu = nullptr;
  int (*shutdown)() = nullptr;
  int (*memory)(void*, Memory*) = nullptr;
  int (*utilization)(void*, Utilization*) = nullptr;
  int (*power)(void*, unsigned*) = nullptr;

  template <class F>
  F find(F&, const char* name) const {
    return reinterpret_cast<F>(dlsym(handle, name));
  }
  ~Library() {
    if (shutdown != nullptr) shutdown();
    if (handle != nullptr) dlclose(handle);
  }
};

Nvml::Nvml(const std::string& pci) {
  if (pci.empty()) return;
  auto library = std::make_unique<Library>();
  library->handle = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library->handle == nullptr) return;
  int (*init)() = nullptr;
  int (*by_address)(const char*, void**) = nullptr;
  init = library->find(init, "nvmlInit_v2");
  by_address = library->find(by_address, "nvmlDeviceGetHandleByPciBusId_v2");
  if (init == nullptr || by_address == nullptr || init() != kSuccess) return;
  library->shutdown = library->find(library->shutdown, "nvmlShutdown");
  if (by_address(pci.c_str(), &library->gpu) != kSuccess) return;
  library->memory = library->find(library->memory, "nvmlDeviceGetMemoryInfo");
  library->utilization = library->find(library->utilization, "nvmlDeviceGetUtilizationRates");
  library->power = library->find(library->power, "nvmlDeviceGetPowerUsage");
  library_ = std::move(library);
}
Nvml::~Nvml() = default;

GpuUse Nvml::sample() const {
  GpuUse use;
  if (!library_) return use;
  const Library& l = *library_;
  Memory memory{};
  Utilization utilization{};
  unsigned milliwatts = 0;
  if (l.memory != nullptr && l.memory(l.gpu, &memory) == kSuccess)
    use.used_mib = static_cast<double>(memory.used) / kMiB;
  if (l.utilization != nullptr && l.utilization(l.gpu, &utilization) == kSuccess) use.util_pct = utilization.gpu;
  if (l.power != nullptr && l.power(l.gpu, &milliwatts) == kSuccess) use.power_w = milliwatts * kMilli;
  return use;
}

}  // namespace triad
