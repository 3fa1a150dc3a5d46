// Helpers for tests that train on several ranks: start a run, and compare the files that it writes.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "tests/support/program.h"

namespace triad::test {

inline const std::string kTiny = TRIAD_SOURCE_DIR "/configs/tiny.json";
inline constexpr const char* kWeights = "/model.safetensors";

// The arguments of `triad` that train configs/tiny.json on the CPU into the folder `out`.
std::string train_args(const std::string& out, const std::string& more = "");

// Trains with four micro-batches a step, divided among the ranks, and requires exit code 0. Returns the run's folder.
std::string run(const std::string& out, int ranks, const std::string& more = "");

std::map<std::string, std::vector<float>> tensors(const std::string& path);  // of a safetensors file with F32 tensors

// |a - b| / |a| of two safetensors files: over all elements, and of the worst tensor.
struct Difference {
  double all = 0, worst = 0;
};
Difference difference(const std::string& a_path, const std::string& b_path);

bool same_file(const std::string& a, const std::string& b);  // equal bytes, and not empty
std::vector<std::string> lines(const std::string& path);

// Column `name` of a CSV file, by step.
std::map<int, double> column(const std::string& path, const std::string& name);

}  // namespace triad::test
