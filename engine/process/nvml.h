// Memory use, utilisation, power, energy and clock of a GPU from the driver's management library (libnvidia-ml.so.1),
// which is opened at run time. Values are absent without the library, or if the card does not report them. A query
// blocks the host for long compared with a kernel launch: do not call it within a step.
#pragma once
#include <memory>
#include <optional>
#include <string>

namespace triad {

struct GpuUse {
  std::optional<double> used_mib;  // GPU memory in use by all processes, MiB
  std::optional<double> util_pct;  // percent of the last sample period (at most 1 s) in which a kernel ran
  std::optional<double> power_w;   // W
};

// One reading of a card's energy, power limit and clock.
struct GpuPower {
  std::optional<double> energy_j;                   // J that the card has used since the driver was loaded
  std::optional<double> limit_w;                    // the power that the driver lets the card use, W
  std::optional<double> clock_mhz, most_clock_mhz;  // the clock of the SMs now, and the highest that they can have
  std::optional<bool> capped;                       // whether the driver lowers the clock now because of limit_w
};

class Nvml {
 public:
  // pci: the GPU's bus address (backend::pci_address); "": there is no GPU and all values are absent.
  explicit Nvml(const std::string& pci);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  GpuUse sample() const;
  GpuPower power() const;

 private:
  struct Library;
  struct Gpu;
  friend std::string nvml_driver_version();
  friend std::string nvml_connection(const std::string&, const std::string&);
  std::unique_ptr<Library> library_;
  std::unique_ptr<Gpu> gpu_;
};

std::string nvml_driver_version();  // "580.65.06"
// How two GPUs of this host are connected: "NVLink, 18 links up", "one PCIe switch", ...; empty if unknown. The
// arguments are their PCI bus addresses.
std::string nvml_connection(const std::string& pci_a, const std::string& pci_b);

}  // namespace triad
