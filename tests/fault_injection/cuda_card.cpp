// A CUDA runtime for a card that the machine lacks, which tests preload (LD_PRELOAD) into the program. Its device has
// the compute capability TRIAD_CARD=86 (8.6). Memory is address space that must not be accessed, and copies and
// products do nothing. A launch prints a line, unless the same kernel was launched with as many threads and bytes
// before:
//   launch <TAB> symbol of the kernel in device code <TAB> threads per CTA <TAB> bytes of dynamic shared memory
// So the host code of every op runs as on that card, and tests/checks/resources.py compares what it launches with the
// limits of the card.
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>

namespace {

int capability() {
  const char* card = std::getenv("TRIAD_CARD");
  return card == nullptr ? 0 : std::atoi(card);
}

constexpr size_t kMemoryBytes = size_t{1} << 45;
constexpr size_t kFront = 1 << 16;  // bytes before an allocation, which hold its size for cudaFree()

struct Launches {
  std::mutex mutex;
  std::map<const void*, std::string> symbols;  // host function -> symbol in device code
  std::set<std::tuple<const void*, unsigned, size_t>> printed;
};
Launches& launches() {  // constructors in other files use it
  static Launches all;
  return all;
}

void* any_handle() {
  static char handle;
  return &handle;
}

}  // namespace

extern "C" {

// ---- kernels ----

void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(any_handle()); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* symbol, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  Launches& all = launches();
  const std::lock_guard lock(all.mutex);
  all.symbols[host] = symbol;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  Launches& all = launches();
  const std::lock_guard lock(all.mutex);
  const unsigned threads = config->blockDim.x * config->blockDim.y * config->blockDim.z;
  if (all.printed.emplace(kernel, threads, config->dynamicSmemBytes).second)
    std::printf("launch\t%s\t%u\t%zu\n", all.symbols[kernel].c_str(), threads, config->dynamicSmemBytes);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }

// ---- the device ----

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  std::memset(p, 0, sizeof(*p));
  std::strcpy(p->name, "simulated card");
  p->totalGlobalMem = kMemoryBytes;
  p->multiProcessorCount = 100;
  p->major = capability() / 10, p->minor = capability() % 10;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

// ---- memory: reserved address space ----

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = kMemoryBytes;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** p, size_t bytes) {
  void* const all = mmap(nullptr, bytes + kFront, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return cudaErrorMemoryAllocation;
  mprotect(all, kFront, PROT_READ | PROT_WRITE);
  *static_cast<size_t*>(all) = bytes + kFront;
  *p = static_cast<char*>(all) + kFront;
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  if (p == nullptr) return cudaSuccess;
  void* const all = static_cast<char*>(p) - kFront;
  munmap(all, *static_cast<size_t*>(all));
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }

// ---- streams and events: everything has already run ----

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = static_cast<cudaStream_t>(any_handle());
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = static_cast<cudaEvent_t>(any_handle());
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

// ---- matrix products ----

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = static_cast<cublasLtHandle_t>(any_handle());
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t result[],
                                              int* count) {
  result[0] = {};
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*, cublasLtMatrixLayout_t,
                              const void*, cublasLtMatrixLayout_t, const void*, const void*, cublasLtMatrixLayout_t,
                              void*, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t) {
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
