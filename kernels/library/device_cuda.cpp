// The library.h functions that depend on CUDA, with CUDA. CMakeLists.txt defines TRIAD_CUDA_ARCHITECTURES.
#include <fmt/format.h>

#include "engine/cuda_check.h"
#include "kernels/library/library.h"

namespace triad::library {

CurrentDevice::CurrentDevice(Device device) {
  if (!device.is_cuda()) return;
  int now = 0;
  CUDA_CHECK(cudaGetDevice(&now));
  if (now == device.index) return;
  CUDA_CHECK(cudaSetDevice(device.index));
  before_ = now;
}
CurrentDevice::~CurrentDevice() {
  if (before_ >= 0) cudaSetDevice(before_);
}

DeviceTraits device_traits(int ordinal) {
  DeviceTraits traits;
  int major = 0, minor = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&traits.num_sms, cudaDevAttrMultiProcessorCount, ordinal));
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal));
  CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal));
  traits.compute_capability = 10 * major + minor;
  return traits;
}

unsigned long long capture_of(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  CUDA_CHECK(cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id));
  if (status == cudaStreamCaptureStatusInvalidated) return kInvalidCapture;
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

int device_of(const void* address) {
  if (backend::cuda_device_count() == 0) return kHost;
  cudaPointerAttributes a{};
  CUDA_CHECK(cudaPointerGetAttributes(&a, address));
  if (a.type == cudaMemoryTypeManaged) return kAnywhere;
  return a.type == cudaMemoryTypeDevice ? a.device : kHost;
}

std::string build_info() {
  return fmt::format("{}.{}.{}, CUDA {}.{}, architectures {}", TRIAD_NSA_VERSION / 10000, TRIAD_NSA_VERSION / 100 % 100,
                     TRIAD_NSA_VERSION % 100, CUDART_VERSION / 1000, CUDART_VERSION / 10 % 100,
                     TRIAD_CUDA_ARCHITECTURES);
}

}  // namespace triad::library
