// CUDA_CHECK(call): throws Error with the call's text, the error's name and its explanation.
#pragma once
#include <cuda_runtime_api.h>

#include "engine/check.h"

#define CUDA_CHECK(call)                                                               \
  do {                                                                                 \
    const cudaError_t cuda_check_error = (call);                                       \
    if (cuda_check_error != cudaSuccess)                                               \
      ::triad::fail("{}: {} ({}) at {}:{}", #call, cudaGetErrorName(cuda_check_error), \
                    cudaGetErrorString(cuda_check_error), __FILE__, __LINE__);         \
  } while (0)
