// backend.h in a build without CUDA: all memory is the host's, and all work runs in the calling thread.
#include <cstring>

#include "engine/backend_cpu.h"
#include "engine/check.h"
#include "engine/with_cuda.h"

namespace triad::backend {

namespace {
void require_cpu(Device device) {
  TRIAD_CHECK(!device.is_cuda(), "device {} was asked for, but {}", device.str(), why_no_cuda());
}
}  // namespace

bool built_with_cuda() { return false; }
int cuda_device_count() { return 0; }
std::string why_no_cuda() { return "this build has no CUDA (configure with a CUDA toolkit: cmake --preset cuda)"; }
DeviceInfo info(Device device) {
  require_cpu(device);
  return cpu::info();
}
int64_t bytes_in_use(Device) { return cpu::bytes_in_use(); }
std::string pci_address(Device) { return ""; }
std::byte* allocate(Device device, int64_t bytes) {
  require_cpu(device);
  return cpu::allocate(bytes);
}
void deallocate(Device, std::byte* p) noexcept { cpu::deallocate(p); }
std::byte* allocate_pinned(Device device, int64_t bytes) { return allocate(device, bytes); }
void deallocate_pinned(Device device, std::byte* p) noexcept { deallocate(device, p); }
void* create_stream(Device device, int) {
  require_cpu(device);
  return nullptr;
}
void destroy_stream(Device, void*) noexcept {}
void synchronize(Device, void*) {}
void* create_event(Device, bool) { return nullptr; }
void destroy_event(Device, void*) noexcept {}
void record_event(Device, void*, void*) {}
void record_event_of_graph(Device, void*, void*) {}
void wait_event_of_graph(Device, void*, void*) {}
void wait_event(Device, void*, void*) {}
void synchronize_event(Device, void*) {}
bool reached_event(Device, void*) { return true; }
double elapsed_ms(Device, void*, void*) { return 0; }
void begin_recording(Device, void*) {}
void* end_recording(Device, void*) { return nullptr; }
void abandon_recording(Device, void*) noexcept {}
void launch_graph(Device, void*, void*) {}
void destroy_graph(Device, void*) noexcept {}
void copy(std::byte* dst, Device, const std::byte* src, Device, int64_t bytes, void*) { std::memmove(dst, src, bytes); }
void fill(std::byte* dst, Device, int value, int64_t bytes, void*) { std::memset(dst, value, bytes); }

}  // namespace triad::backend
