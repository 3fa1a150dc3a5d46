// Ranges of ops for a profiler that reads NVTX (Nsight Systems, Nsight Compute). NVTX's header looks for one at the
// first range; where there is none a range is a comparison. nvtx_cuda.cpp in a build with CUDA, else nvtx_none.cpp.
#pragma once
#include <memory>

#include "engine/op_scope.h"

namespace triad {

std::unique_ptr<OpListener> nvtx_listener();  // null in a build without CUDA

}  // namespace triad
