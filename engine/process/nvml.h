// What the driver's management library says of a GPU as a whole. The library (libnvidia-ml.so.1) is opened at run time;
// without it, or for what a card does not tell, values are absent. A query takes about a millisecond: never in a step.
#pragma once
#include <memory>
#include <optional>
#include <string>

namespace triad {

struct GpuUse {
  std::optional<double> used_mib;  // of its memory, by all processes
  std::optional<double> util_pct;  // of the last sample period (up to a second), that some kernel ran
  std::optional<double> power_w;
};

class Nvml {
 public:
  // pci: where the GPU sits (backend::pci_address); "": there is none, and every value is absent.
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
// How two GPUs of this host, by their PCI addresses, are joined: "NVLink, 18 links up", "one PCIe switch", ...
std::string nvml_connection(const std::string& pci_a, const std::string& pci_b);

}  // namespace triad
