// The library.h functions that depend on CUDA, in a build without CUDA.
#include <fmt/format.h>

#include "kernels/library/library.h"

namespace triad::library {

CurrentDevice::CurrentDevice(Device) {}
CurrentDevice::~CurrentDevice() = default;
DeviceTraits device_traits(int) { return {}; }
unsigned long long capture_of(void*) { return 0; }
int device_of(const void*) { return kHost; }

std::string build_info() {
  return fmt::format("{}.{}.{}, CPU only", TRIAD_NSA_VERSION / 10000, TRIAD_NSA_VERSION / 100 % 100,
                     TRIAD_NSA_VERSION % 100);
}

}  // namespace triad::library
