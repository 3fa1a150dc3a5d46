// A device's services as free functions: memory, copies, fills, streams, events, graphs, properties. Every build has
// backend_cpu.cpp; a build with CUDA adds backend_cuda.cpp, any other adds backend_none.cpp, which throws if a GPU is
// requested.
#pragma once
#include <cstdint>
#include <string>

#include "engine/tensor.h"

namespace triad {

// True in a build with CUDA. Ops call their CUDA code as `if constexpr (kBuiltWithCuda) return cuda::op(...)`, which a
// build without CUDA does not compile, so no other file needs an #if on CUDA.
#ifdef TRIAD_WITH_CUDA
inline constexpr bool kBuiltWithCuda = true;
#else
inline constexpr bool kBuiltWithCuda = false;
#endif

struct DeviceInfo {
  std::string name;             // "NVIDIA H200", or the CPU's model
  int64_t memory_bytes = 0;     // the device's whole memory
  int64_t free_bytes = 0;       // free memory when called
  int num_sms = 0;              // 0 on the CPU
  int compute_capability = 0;   // 90 for sm_90; 0 on the CPU
  int64_t l2_bytes = 0;         // L2 cache size
  int driver = 0, runtime = 0;  // driver and runtime CUDA versions, 13000 for 13.0; 0 on the CPU
};

namespace backend {

int cuda_device_count();    // 0 in a build without CUDA or on a machine without a GPU
std::string why_no_cuda();  // why the count is 0, for error messages
DeviceInfo info(Device);
int64_t bytes_in_use(Device);                // GPU: memory used by all processes; CPU: this process's resident memory
std::string pci_address(Device);             // a GPU's PCI bus address, which does not depend on CUDA_VISIBLE_DEVICES
std::byte* allocate(Device, int64_t bytes);  // 256-byte aligned, contents undefined; throws OutOfMemory
void deallocate(Device, std::byte*) noexcept;
// Pinned host memory, for copies that are asynchronous to the host; ordinary memory for the CPU.
std::byte* allocate_pinned(Device, int64_t bytes);
void deallocate_pinned(Device, std::byte*) noexcept;

// Returns a new cudaStream_t, or nullptr on the CPU, where work runs immediately, in the calling thread. priority: 0 is
// the lowest; values above the GPU's range mean its highest. When kernels on several streams wait for SMs, the GPU
// starts those with the highest priority first.
void* create_stream(Device, int priority);
void destroy_stream(Device, void* stream) noexcept;
void synchronize(Device, void* stream);

void* create_event(Device, bool timed);
void destroy_event(Device, void* event) noexcept;
void record_event(Device, void* event, void* stream);
void wait_event(Device, void* stream, void* event);
void synchronize_event(Device, void* event);
bool reached_event(Device, void* event);  // whether all work before the event has finished; does not block
double elapsed_ms(Device, void* begin, void* end);

// CUDA graphs. Between begin_recording() and end_recording(), work queued on a GPU's stream is recorded instead of run.
// Each launch_graph() runs the recorded work once.
void begin_recording(Device, void* stream);
void* end_recording(Device, void* stream);              // returns a cudaGraphExec_t
void abandon_recording(Device, void* stream) noexcept;  // drops a recording after an error in it
void launch_graph(Device, void* graph, void* stream);
void destroy_graph(Device, void* graph) noexcept;

// Copies between any two devices. On a GPU's stream the copy is asynchronous, but CUDA may block the host for pageable
// host memory.
void copy(std::byte* dst, Device dst_device, const std::byte* src, Device src_device, int64_t bytes, void* stream);
void fill(std::byte* dst, Device, int value, int64_t bytes, void* stream);

}  // namespace backend
}  // namespace triad
