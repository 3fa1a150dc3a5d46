// The raw services of a device: memory, copies, fills, streams, properties. backend_cpu.cpp always; backend_cuda.cpp in
// a build with CUDA, else backend_none.cpp, in which asking for a GPU is an error that says so.
#pragma once
#include <cstdint>
#include <string>

#include "engine/tensor.h"

namespace triad {

// True in a build with CUDA. In `if constexpr (kBuiltWithCuda) return cuda::op(...)` the call is dropped elsewhere, so
// no other file needs an #if on CUDA.
#ifdef TRIAD_WITH_CUDA
inline constexpr bool kBuiltWithCuda = true;
#else
inline constexpr bool kBuiltWithCuda = false;
#endif

struct DeviceInfo {
  std::string name;            // "NVIDIA H200", or the CPU's model
  int64_t memory_bytes = 0;    // total
  int64_t free_bytes = 0;      // now
  int num_sms = 0;             // 0 on the CPU
  int compute_capability = 0;  // 90 for sm_90; 0 on the CPU
  int64_t l2_bytes = 0;
  int driver = 0, runtime = 0;  // CUDA versions as 13000; 0 on the CPU
};

namespace backend {

int cuda_device_count();    // 0 in a build without CUDA or on a machine without a GPU
std::string why_no_cuda();  // the reason for that 0, for error messages
DeviceInfo info(Device);
int64_t bytes_in_use(Device);                // of a GPU's memory, by all; on the CPU: resident memory of this process
std::string pci_address(Device);             // of a GPU: where on this host it sits, however many are visible
std::byte* allocate(Device, int64_t bytes);  // 256-byte aligned, contents undefined; throws with both sizes if it fails
void deallocate(Device, std::byte*) noexcept;
// Host memory that the device copies from and to while the host goes on (pinned); for the CPU ordinary memory.
std::byte* allocate_pinned(Device, int64_t bytes);
void deallocate_pinned(Device, std::byte*) noexcept;

// cudaStream_t; nullptr on the CPU, where all work is done in order by the caller. Of kernels that wait for room the
// one of the higher priority gets it first: 0 is the lowest; more than the GPU has is its highest.
void* create_stream(Device, int priority);
void destroy_stream(Device, void* stream) noexcept;
void synchronize(Device, void* stream);

void* create_event(Device, bool timed);
void destroy_event(Device, void* event) noexcept;
void record_event(Device, void* event, void* stream);
void wait_event(Device, void* stream, void* event);
void synchronize_event(Device, void* event);
bool reached_event(Device, void* event);  // without waiting
double elapsed_ms(Device, void* begin, void* end);

// What is queued on a GPU's stream between these two is not run but recorded; the graph runs it, as often as launched.
void begin_recording(Device, void* stream);
void* end_recording(Device, void* stream);              // cudaGraphExec_t
void abandon_recording(Device, void* stream) noexcept;  // after an error in between
void launch_graph(Device, void* graph, void* stream);
void destroy_graph(Device, void* graph) noexcept;

// Between any two devices; asynchronous on a GPU's stream (pageable host memory makes CUDA wait for it).
void copy(std::byte* dst, Device dst_device, const std::byte* src, Device src_device, int64_t bytes, void* stream);
void fill(std::byte* dst, Device, int value, int64_t bytes, void* stream);

}  // namespace backend
}  // namespace triad
