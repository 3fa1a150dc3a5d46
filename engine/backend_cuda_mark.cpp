// write_mark() (process/progress.h) with CUDA: a stream writes a word to pinned memory when it reaches the mark.
// cuStreamWriteValue32 does this without a kernel.
#include <cuda.h>

#include "engine/cuda_check.h"
#include "engine/process/progress.h"

namespace triad::backend {

namespace {

using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

// Looked up in the driver at run time, because the program does not link libcuda.
WriteValue find_write_value() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  constexpr unsigned kVersion = 12000;  // first CUDA version with which a graph may record cuStreamWriteValue32
  CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &function, kVersion, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess) fail("the CUDA driver has no cuStreamWriteValue32");
  return reinterpret_cast<WriteValue>(function);
}

}  // namespace

void write_mark(Device, void* stream, std::byte* pinned, uint32_t value) {
  static const WriteValue write = find_write_value();
  const CUresult result =
      write(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(pinned), value, CU_STREAM_WRITE_VALUE_DEFAULT);
  if (result != CUDA_SUCCESS) fail("cuStreamWriteValue32 failed with CUDA driver error {}", static_cast<int>(result));
}

}  // namespace triad::backend
