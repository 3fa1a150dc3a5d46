#include "tests/support/skip.h"

#include <fmt/format.h>

#include <cstdio>

#include "engine/backend.h"
#include "engine/context.h"
#include "engine/with_cuda.h"

namespace triad::test {

namespace {
int skipped_so_far = 0;
}  // namespace

bool skip(const std::string& reason) {
  std::printf("SKIPPED: %s\n", reason.c_str());
  ++skipped_so_far;
  return false;
}

int skips() { return skipped_so_far; }

bool require_gpu() { return backend::cuda_device_count() > 0 || skip("no GPU (" + backend::why_no_cuda() + ")"); }

bool require_gpus(int wanted) {
  const int found = backend::cuda_device_count();
  return found >= wanted || skip(fmt::format("{} GPUs of {}", found, wanted));
}

bool require_hopper_plan() {
  if (!backend::built_with_cuda()) return skip("no fused kernels (built without CUDA)");
  return Runtime({.device = Device::cuda(), .planning = true}).ctx().compute_capability == 90 ||
         skip("no fused kernels (the GPU is no Hopper)");
}

}  // namespace triad::test
