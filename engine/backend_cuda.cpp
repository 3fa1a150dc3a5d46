// backend.h over the CUDA runtime. Calls that depend on CUDA's current device set it first, so a thread may use several
// GPUs.
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "engine/backend_cpu.h"
#include "engine/cuda_check.h"
#include "engine/memory.h"
#include "engine/with_cuda.h"

namespace triad::backend {

namespace {
cudaStream_t as_stream(void* s) { return static_cast<cudaStream_t>(s); }
cudaEvent_t as_event(void* e) { return static_cast<cudaEvent_t>(e); }
void select(Device device) {
  TRIAD_CHECK(device.index < cuda_device_count(), "device {} was asked for, but {}", device.str(),
              cuda_device_count() == 0 ? why_no_cuda() : fmt::format("there are {}", cuda_device_count()));
  CUDA_CHECK(cudaSetDevice(device.index));
}
}  // namespace

bool built_with_cuda() { return true; }

int cuda_device_count() {
  static const int count = [] {
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess) n = 0;
    cudaGetLastError();  // clears CUDA's error: a machine without a GPU is a valid result here
    return n;
  }();
  return count;
}

std::string why_no_cuda() {
  int n = 0, driver = 0;
  const cudaError_t e = cudaGetDeviceCount(&n);
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) return "no NVIDIA driver is loaded";
  cudaGetLastError();
  return e == cudaSuccess ? "this machine has no GPU" : fmt::format("no GPU can be used: {}", cudaGetErrorString(e));
}

DeviceInfo info(Device device) {
  if (!device.is_cuda()) return cpu::info();
  select(device);
  cudaDeviceProp p;
  CUDA_CHECK(cudaGetDeviceProperties(&p, device.index));
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  DeviceInfo d;
  d.name = p.name;
  d.memory_bytes = static_cast<int64_t>(total);
  d.free_bytes = static_cast<int64_t>(free);
  d.num_sms = p.multiProcessorCount;
  d.compute_capability = p.major * 10 + p.minor;
  d.l2_bytes = p.l2CacheSize;
  CUDA_CHECK(cudaDriverGetVersion(&d.driver));
  CUDA_CHECK(cudaRuntimeGetVersion(&d.runtime));
  return d;
}

int64_t bytes_in_use(Device device) {
  if (!device.is_cuda()) return cpu::bytes_in_use();
  select(device);
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(total - free);
}

std::string pci_address(Device device) {
  char text[32];
  CUDA_CHECK(cudaDeviceGetPCIBusId(text, sizeof text, device.index));
  return text;
}

std::byte* allocate(Device device, int64_t bytes) {
  if (!device.is_cuda()) return cpu::allocate(bytes);
  select(device);
  void* p = nullptr;
  const cudaError_t e = cudaMalloc(&p, static_cast<size_t>(bytes > 0 ? bytes : 1));
  if (e != cudaSuccess) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    throw OutOfMemory(fmt::format("out of memory on {}: {} MiB asked for, {} of {} MiB free ({})", device.str(),
                                  bytes >> 20, free >> 20, total >> 20, cudaGetErrorString(e)),
                      bytes, static_cast<int64_t>(free));
  }
  return static_cast<std::byte*>(p);
}

void deallocate(Device device, std::byte* p) noexcept {
  if (!device.is_cuda()) return cpu::deallocate(p);
  cudaSetDevice(device.index);
  cudaFree(p);
}

namespace {

// Large pinned blocks: address -> bytes. cudaMallocHost touches and pins page by page, 0.45 s per GB. These consist of
// huge pages that several threads touch, and are pinned as a whole.
constexpr int64_t kLargeBlock = int64_t{1} << 30;
std::mutex large_blocks_mutex;
std::map<std::byte*, size_t> large_blocks;

std::byte* allocate_large(int64_t bytes) {
  constexpr size_t kHugePage = size_t{2} << 20, kPage = 4096;
  const size_t size = (static_cast<size_t>(bytes) + kHugePage - 1) / kHugePage * kHugePage;
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) fail("{} bytes of host memory: {}", size, std::strerror(errno));
  madvise(p, size, MADV_HUGEPAGE);  // huge pages only make it faster
  auto* const begin = static_cast<std::byte*>(p);
  const size_t threads = std::clamp(std::thread::hardware_concurrency() / 2, 1u, 16u);
  const size_t part = (size / kHugePage + threads - 1) / threads * kHugePage;
  {
    std::vector<std::jthread> workers;
    for (size_t from = 0; from < size; from += part) {
      const auto touch = [=] {
        for (size_t at = from; at < std::min(from + part, size); at += kPage) begin[at] = std::byte{0};
      };
      try {
        workers.emplace_back(touch);
      } catch (const std::system_error&) { touch(); }  // no more threads may be started
    }
  }
  if (const cudaError_t e = cudaHostRegister(p, size, cudaHostRegisterPortable); e != cudaSuccess) {
    cudaGetLastError();  // clears CUDA's error
    munmap(p, size);
    fail("{} bytes of host memory cannot be pinned: {}", size, cudaGetErrorString(e));
  }
  const std::lock_guard lock(large_blocks_mutex);
  large_blocks[begin] = size;
  return begin;
}

}  // namespace

std::byte* allocate_pinned(Device device, int64_t bytes) {
  if (!device.is_cuda()) return cpu::allocate(bytes);
  select(device);
  if (bytes >= kLargeBlock) return allocate_large(bytes);
  void* p = nullptr;
  CUDA_CHECK(cudaMallocHost(&p, static_cast<size_t>(bytes > 0 ? bytes : 1)));
  return static_cast<std::byte*>(p);
}

void deallocate_pinned(Device device, std::byte* p) noexcept {
  if (!device.is_cuda()) return cpu::deallocate(p);
  cudaSetDevice(device.index);
  size_t bytes = 0;  // size if it is a large block
  {
    const std::lock_guard lock(large_blocks_mutex);
    if (const auto large = large_blocks.extract(p)) bytes = large.mapped();
  }
  if (bytes == 0) return void(cudaFreeHost(p));
  cudaHostUnregister(p);
  munmap(p, bytes);
}

void* create_stream(Device device, int priority) {
  if (!device.is_cuda()) return nullptr;
  select(device);
  int last = 0, first = 0;
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&last, &first));
  cudaStream_t s = nullptr;
  CUDA_CHECK(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, std::max(first, last - priority)));
  return s;
}
void destroy_stream(Device device, void* stream) noexcept {
  if (device.is_cuda() && stream != nullptr) cudaStreamDestroy(as_stream(stream));
}
void synchronize(Device device, void* stream) {
  if (device.is_cuda()) CUDA_CHECK(cudaStreamSynchronize(as_stream(stream)));
}

void* create_event(Device device, bool timed) {
  if (!device.is_cuda()) return nullptr;
  select(device);
  cudaEvent_t e = nullptr;
  CUDA_CHECK(cudaEventCreateWithFlags(&e, timed ? cudaEventDefault : cudaEventDisableTiming));
  return e;
}
void destroy_event(Device device, void* event) noexcept {
  if (device.is_cuda() && event != nullptr) cudaEventDestroy(as_event(event));
}
void record_event(Device device, void* event, void* stream) {
  if (device.is_cuda()) CUDA_CHECK(cudaEventRecord(as_event(event), as_stream(stream)));
}
// Whether the stream is being recorded. Outside a recording, the flags for external events are an error.
static bool is_recording(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CUDA_CHECK(cudaStreamIsCapturing(as_stream(stream), &status));
  return status == cudaStreamCaptureStatusActive;
}
// Inside a recording, the "external" flags make the record or the wait a graph node, which each launch executes anew. A
// wait refers to the record queued before it; later records do not change it. So a host that is a step ahead may record
// an event again while a graph that waits for it is still queued (tests/engine/test_graph.cpp).
void record_event_of_graph(Device device, void* event, void* stream) {
  if (!device.is_cuda()) return;
  CUDA_CHECK(cudaEventRecordWithFlags(as_event(event), as_stream(stream),
                                      is_recording(stream) ? cudaEventRecordExternal : cudaEventRecordDefault));
}
void wait_event_of_graph(Device device, void* stream, void* event) {
  if (!device.is_cuda()) return;
  CUDA_CHECK(cudaStreamWaitEvent(as_stream(stream), as_event(event),
                                 is_recording(stream) ? cudaEventWaitExternal : cudaEventWaitDefault));
}
void wait_event(Device device, void* stream, void* event) {
  if (device.is_cuda()) CUDA_CHECK(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0));
}
void synchronize_event(Device device, void* event) {
  if (device.is_cuda()) CUDA_CHECK(cudaEventSynchronize(as_event(event)));
}
bool reached_event(Device device, void* event) {
  if (!device.is_cuda()) return true;
  select(device);  // the calling thread may not have set a device yet
  const cudaError_t e = cudaEventQuery(as_event(event));
  if (e == cudaErrorNotReady) return false;
  CUDA_CHECK(e);
  return true;
}
double elapsed_ms(Device, void* begin, void* end) {
  float ms = 0;
  CUDA_CHECK(cudaEventElapsedTime(&ms, as_event(begin), as_event(end)));
  return ms;
}

void begin_recording(Device, void* stream) {
  CUDA_CHECK(cudaStreamBeginCapture(as_stream(stream), cudaStreamCaptureModeThreadLocal));
}
void* end_recording(Device, void* stream) {
  cudaGraph_t graph = nullptr;
  CUDA_CHECK(cudaStreamEndCapture(as_stream(stream), &graph));
  cudaGraphExec_t executable = nullptr;
  const cudaError_t e = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  CUDA_CHECK(e);
  return executable;
}
void abandon_recording(Device, void* stream) noexcept {
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(as_stream(stream), &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();  // clears CUDA's last error; the exception that ended the recording is in flight
}
void launch_graph(Device, void* graph, void* stream) {
  CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), as_stream(stream)));
}
void destroy_graph(Device, void* graph) noexcept {
  if (graph != nullptr) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}

void copy(std::byte* dst, Device dst_device, const std::byte* src, Device src_device, int64_t bytes, void* stream) {
  if (!dst_device.is_cuda() && !src_device.is_cuda()) {
    std::memmove(dst, src, bytes);
  } else {
    CUDA_CHECK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, as_stream(stream)));
  }
}

void fill(std::byte* dst, Device device, int value, int64_t bytes, void* stream) {
  if (!device.is_cuda()) {
    std::memset(dst, value, bytes);
  } else {
    CUDA_CHECK(cudaMemsetAsync(dst, value, bytes, as_stream(stream)));
  }
}

}  // namespace triad::backend
