// Skips tests on machines or in builds that lack what they need.
#pragma once
#include <string>

namespace triad::test {

// Marks the running test as skipped, and returns false. Nothing may be checked before or after it: test_main.cpp fails
// a test that does. A test program whose tests were all skipped ends with kSkippedCode, which CMakeLists.txt gives to
// ctest, so that the test counts as skipped, not as passed. (The number is Catch2 3's own.)
bool skip(const std::string& reason);
inline constexpr int kSkippedCode = 4;

int skips();  // skip() calls in this process

// Each returns false, and marks the test as skipped, where something is missing: `if (!require_gpu()) return;`.
bool require_gpu();
bool require_gpus(int count);
// Builds with CUDA plan for an H200 on machines without a GPU; on machines with another GPU than Hopper, and in builds
// without CUDA, memory plans aren't for the fused kernels.
bool require_hopper_plan();

}  // namespace triad::test
