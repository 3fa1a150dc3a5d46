// Marks ops as NVTX ranges for a profiler (Nsight Systems, Nsight Compute). NVTX's header looks for a profiler at the
// first range; without one, a range costs one comparison. nvtx_cuda.cpp in a build with CUDA, else nvtx_none.cpp.
#pragma once
#include <memory>

#include "engine/op_scope.h"

namespace triad {

std::unique_ptr<OpListener> nvtx_listener();  // null in a build without CUDA

}  // namespace triad
