// What every test file includes: Catch2 (2 or 3), and the question whether there is a GPU.
#pragma once
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
#include <cstdio>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "engine/check.h"
#include "engine/context.h"

// Catch2 2 has Approx in the global namespace, 3 has it in Catch: here it is in both, whichever is installed.
#if __has_include(<catch2/catch_all.hpp>)
using Catch::Approx;
#else
namespace Catch {
using Detail::Approx;
}
#endif

namespace triad::test {

// `if (!require_gpu()) return;`: CMake marks a test that prints this line as skipped, so it never counts as passed.
inline bool require_gpu() {
  if (backend::cuda_device_count() > 0) return true;
  std::printf("SKIPPED: no GPU (%s)\n", backend::why_no_cuda().c_str());
  return false;
}

// The same for several.
inline bool require_gpus(int count) {
  if (backend::cuda_device_count() >= count) return true;
  std::printf("SKIPPED: %d GPUs of %d\n", backend::cuda_device_count(), count);
  return false;
}

// Whether the GPU that a plan is for has the fused kernels: where there is no GPU a plan is one for an H200.
inline bool require_hopper_plan() {
  if (kBuiltWithCuda && Runtime({.device = Device::cuda(), .planning = true}).ctx().compute_capability == 90)
    return true;
  std::printf("SKIPPED: no fused kernels (%s)\n", kBuiltWithCuda ? "the GPU is no Hopper" : "built without CUDA");
  return false;
}

// The message of the Error that f throws; every word has to be in it.
template <class F>
void check_error(F&& f, const std::vector<std::string>& words) {
  std::string message = "(nothing was thrown)";
  try {
    f();
  } catch (const Error& e) { message = e.what(); }
  INFO(message);
  CHECK(message != "(nothing was thrown)");
  for (const std::string& word : words) {
    INFO("expected: " << word);
    CHECK(message.find(word) != std::string::npos);
  }
}

// Registers the tests of the OpCase tables, whose names are known only when the program runs.
void register_op_tests();

}  // namespace triad::test
