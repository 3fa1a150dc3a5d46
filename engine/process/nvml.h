// Figures of a GPU from the driver's management library (libnvidia-ml.so.1), which is opened at run time. Values are
// absent without it, and where a card does not report them. A query takes about a millisecond of the host: do not call
// it in a step.
#pragma once
#include <memory>
#include <optional>
#include <string>

namespace triad {

struct GpuUse {
  std::optional<double> used_mib;  // GPU memory in MiB, of all processes
  std::optional<double> util_pct;  // percent of the last sample period (at most 1 s) in which a kernel ran
  std::optional<double> power_w;
};

class Nvml {
 public:
  // pci: the GPU's bus address (backend::pci_address); "": no GPU, all values are absent.
  explicit Nvml(const std::string& pci);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  GpuUse sample() const;

 private:
  struct Library;
  struct Gpu;
  friend std::string nvml_driver_version();
  friend std::string nvml_connection(const std::string&, const std::string&);
  std::unique_ptr<Library> library_;
  std::unique_ptr<Gpu> gpu_;
};

std::string nvml_driver_version();  // "580.65.06"
// The connection of two GPUs of this host, given by PCI bus address: "NVLink, 18 links up", "one PCIe switch", ...;
// empty if unknown.
std::string nvml_connection(const std::string& pci_a, const std::string& pci_b);

}  // namespace triad
