// Every test includes this header: Catch2 (version 2 or 3), and functions that skip a test on machines without a GPU.
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

// Makes Approx visible both globally and in Catch: Catch2 2 declares it globally, Catch2 3 in Catch.
#if __has_include(<catch2/catch_all.hpp>)
using Catch::Approx;
#else
namespace Catch {
using Detail::Approx;
}
#endif

namespace triad::test {

// Returns false, and marks the test as skipped, if there is no GPU: `if (!require_gpu()) return;`. CMake recognizes the
// line that is printed, so the test does not count as passed.
inline bool require_gpu() {
  if (backend::cuda_device_count() > 0) return true;
  std::printf("SKIPPED: no GPU (%s)\n", backend::why_no_cuda().c_str());
  return false;
}

// Returns false, and marks the test as skipped, if there are fewer than `count` GPUs.
inline bool require_gpus(int count) {
  if (backend::cuda_device_count() >= count) return true;
  std::printf("SKIPPED: %d GPUs of %d\n", backend::cuda_device_count(), count);
  return false;
}

// Returns false, and marks the test as skipped, if memory plans on this machine are not for a Hopper card. (Builds with
// CUDA plan for an H200 on machines without a GPU.)
inline bool require_hopper_plan() {
  if (kBuiltWithCuda && Runtime({.device = Device::cuda(), .planning = true}).ctx().compute_capability == 90)
    return true;
  std::printf("SKIPPED: no fused kernels (%s)\n", kBuiltWithCuda ? "the GPU is no Hopper" : "built without CUDA");
  return false;
}

// Checks that f throws an Error whose message contains each of the words.
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

// Registers the tests of the OpCase tables with Catch2, at run time, because their names come from the tables.
void register_op_tests();

}  // namespace triad::test
