// A GPU's memory use, utilisation, power, energy and clock from the driver's management library (libnvidia-ml.so.1),
// which is opened at run time. Values are absent without the library, or if the card does not report them. A query
// takes much longer than a kernel launch, and the host waits for it: do not query within a step.
#pragma once
#include <memory>
#include <optional>
#include <string>

namespace triad {

struct GpuUse {
  std::optional<double> used_mib;  // GPU memory in use by all processes, MiB
  std::optional<double> util_pct;  // how much of the last sample period (at most 1 s) a kernel was running, percent
  std::optional<double> power_w;   // the power that the card draws, W
};

// One reading: a card's energy, power limit and clock.
struct GpuEnergy {
  std::optional<double> energy_j;                  // J that the card has used since the driver was loaded
  std::optional<double> limit_w;                   // the power that the driver lets the card use, W
  std::optional<double> clock_mhz, max_clock_mhz;  // SM clock now, and the highest possible
  std::optional<bool> capped;                      // whether the driver lowers the clock now because of limit_w
};

class Nvml {
 public:
  // pci: the GPU's bus address (backend::pci_address); "": there is no GPU and all values are absent.
  explicit Nvml(const std::string& pci);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  GpuUse sample() const;
  GpuEnergy energy() const;

 private:
  struct Library;
  struct Gpu;
  friend std::string nvml_driver_version();
  friend std::string nvml_connection(const std::string&, const std::string&);
  std::unique_ptr<Library> library_;
  std::unique_ptr<Gpu> gpu_;
};

// Returns the driver's version, for example "580.65.06", or "" if it is unknown.
std::string nvml_driver_version();
// Returns how two GPUs of this host are connected: "NVLink, 18 links up", "one PCIe switch", or "" if unknown. The
// links are all of the first GPU's active NVLinks, also those to other GPUs. The arguments are PCI bus addresses.
std::string nvml_connection(const std::string& pci_a, const std::string& pci_b);

}  // namespace triad
