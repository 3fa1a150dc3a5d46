#include "engine/process/nvml.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <utility>

#include "engine/units.h"

namespace triad {

namespace {

constexpr int kSuccess = 0;
constexpr double kMilli = 1e-3;

// Types and constants of nvml.h, repeated so that the build does not need that header; the library's ABI is stable.
struct Memory {
  unsigned long long total, free, used;
};
struct Utilization {
  unsigned gpu, memory;
};
constexpr int kSmClock = 1;                                   // nvmlClockType_t
constexpr unsigned long long kSoftwarePowerCap = 4;           // nvmlClocksEventReasonSwPowerCap, one bit of the reasons
constexpr int kP2pByNvlink = 2, kP2pOk = 0;                   // nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t
constexpr unsigned kMostLinks = 18, kVersionBytes = 80;       // NVML_NVLINK_MAX_LINKS, .._DRIVER_VERSION_BUFFER_SIZE
constexpr std::pair<int, const char*> kCommonAncestors[] = {  // nvmlGpuTopologyLevel_t
    {0, "one board"},        {10, "one PCIe switch"}, {20, "several PCIe switches"},
    {30, "one host bridge"}, {40, "one NUMA node"},   {50, "the links between processors"}};

}  // namespace

struct Nvml::Library {
  void* handle = nullptr;
  int (*shutdown)() = nullptr;
  int (*by_address)(const char*, void**) = nullptr;

  // Returns null if there is no library or no driver.
  static std::unique_ptr<Library> open() {
    auto library = std::make_unique<Library>();
    library->handle = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library->handle == nullptr) return nullptr;
    int (*init)() = nullptr;
    library->find(init, "nvmlInit_v2");
    library->find(library->by_address, "nvmlDeviceGetHandleByPciBusId_v2");
    if (init == nullptr || library->by_address == nullptr || init() != kSuccess) return nullptr;
    library->find(library->shutdown, "nvmlShutdown");
    return library;
  }
  ~Library() {
    if (shutdown != nullptr) shutdown();
    if (handle != nullptr) dlclose(handle);
  }
  template <class F>
  bool find(F& function, const char* name) const {
    function = reinterpret_cast<F>(dlsym(handle, name));
    return function != nullptr;
  }
  void* gpu(const std::string& pci) const {
    void* found = nullptr;
    return by_address(pci.c_str(), &found) == kSuccess ? found : nullptr;
  }
};

struct Nvml::Gpu {
  void* handle = nullptr;
  int (*memory)(void*, Memory*) = nullptr;
  int (*utilization)(void*, Utilization*) = nullptr;
  int (*power)(void*, unsigned*) = nullptr, (*power_limit)(void*, unsigned*) = nullptr;
  int (*energy)(void*, unsigned long long*) = nullptr, (*clock_reasons)(void*, unsigned long long*) = nullptr;
  int (*clock)(void*, int, unsigned*) = nullptr, (*max_clock)(void*, int, unsigned*) = nullptr;
};

Nvml::Nvml(const std::string& pci) {
  if (pci.empty()) return;
  library_ = Library::open();
  void* handle = library_ ? library_->gpu(pci) : nullptr;
  if (handle == nullptr) return;
  gpu_ = std::make_unique<Gpu>();
  gpu_->handle = handle;
  library_->find(gpu_->memory, "nvmlDeviceGetMemoryInfo");
  library_->find(gpu_->utilization, "nvmlDeviceGetUtilizationRates");
  library_->find(gpu_->power, "nvmlDeviceGetPowerUsage");
  library_->find(gpu_->power_limit, "nvmlDeviceGetEnforcedPowerLimit");
  library_->find(gpu_->energy, "nvmlDeviceGetTotalEnergyConsumption");
  library_->find(gpu_->clock, "nvmlDeviceGetClockInfo");
  library_->find(gpu_->max_clock, "nvmlDeviceGetMaxClockInfo");
  // Drivers from 535 on have the first name, and older ones the second.
  if (!library_->find(gpu_->clock_reasons, "nvmlDeviceGetCurrentClocksEventReasons"))
    library_->find(gpu_->clock_reasons, "nvmlDeviceGetCurrentClocksThrottleReasons");
}
Nvml::~Nvml() = default;

GpuUse Nvml::sample() const {
  GpuUse use;
  if (!gpu_) return use;
  const Gpu& g = *gpu_;
  Memory memory{};
  Utilization utilization{};
  unsigned milliwatts = 0;
  if (g.memory != nullptr && g.memory(g.handle, &memory) == kSuccess)
    use.used_mib = static_cast<double>(memory.used) / kMiB;
  if (g.utilization != nullptr && g.utilization(g.handle, &utilization) == kSuccess) use.util_pct = utilization.gpu;
  if (g.power != nullptr && g.power(g.handle, &milliwatts) == kSuccess) use.power_w = milliwatts * kMilli;
  return use;
}

GpuEnergy Nvml::energy() const {
  GpuEnergy power;
  if (!gpu_) return power;
  const Gpu& g = *gpu_;
  unsigned value = 0;
  unsigned long long wide = 0;
  if (g.energy != nullptr && g.energy(g.handle, &wide) == kSuccess) power.energy_j = static_cast<double>(wide) * kMilli;
  if (g.clock_reasons != nullptr && g.clock_reasons(g.handle, &wide) == kSuccess)
    power.capped = (wide & kSoftwarePowerCap) != 0;
  if (g.power_limit != nullptr && g.power_limit(g.handle, &value) == kSuccess) power.limit_w = value * kMilli;
  if (g.clock != nullptr && g.clock(g.handle, kSmClock, &value) == kSuccess) power.clock_mhz = value;
  if (g.max_clock != nullptr && g.max_clock(g.handle, kSmClock, &value) == kSuccess) power.max_clock_mhz = value;
  return power;
}

std::string nvml_driver_version() {
  const std::unique_ptr<Nvml::Library> library = Nvml::Library::open();
  int (*version)(char*, unsigned) = nullptr;
  char text[kVersionBytes] = {};
  if (!library || !library->find(version, "nvmlSystemGetDriverVersion")) return "";
  return version(text, kVersionBytes) == kSuccess ? text : "";
}

std::string nvml_connection(const std::string& pci_a, const std::string& pci_b) {
  const std::unique_ptr<Nvml::Library> library = Nvml::Library::open();
  if (!library) return "";
  void *a = library->gpu(pci_a), *b = library->gpu(pci_b);
  if (a == nullptr || b == nullptr) return "";
  int (*p2p)(void*, void*, int, int*) = nullptr;
  int (*link_state)(void*, unsigned, int*) = nullptr;
  int (*ancestor)(void*, void*, int*) = nullptr;
  int status = -1, level = -1;
  if (library->find(p2p, "nvmlDeviceGetP2PStatus") && p2p(a, b, kP2pByNvlink, &status) == kSuccess &&
      status == kP2pOk) {
    int up = 0;
    if (library->find(link_state, "nvmlDeviceGetNvLinkState"))
      for (unsigned link = 0; link < kMostLinks; ++link) {
        int active = 0;
        up += link_state(a, link, &active) == kSuccess && active != 0;
      }
    return fmt::format("NVLink, {} links up", up);
  }
  if (library->find(ancestor, "nvmlDeviceGetTopologyCommonAncestor") && ancestor(a, b, &level) == kSuccess)
    for (const auto& [number, text] : kCommonAncestors)
      if (number == level) return text;
  return "";
}

}  // namespace triad
