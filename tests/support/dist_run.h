// Whole runs of several ranks, and what came of them: shared by the tests of ranks.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "tests/support/program.h"

namespace triad::test {

inline const std::string kTiny = TRIAD_SOURCE_DIR "/configs/tiny.json";
inline constexpr const char* kWeights = "/model.safetensors";

// `train` of configs/tiny.json on the CPU.
std::string train_args(const std::string& out, const std::string& more = "");

// A run of four micro-batches a step, shared out among the ranks; it must end well. Returns its folder.
std::string run(const std::string& out, int ranks, const std::string& more = "");

std::map<std::string, std::vector<float>> tensors(const std::string& path);  // of a safetensors file

// |a - b| / |a|, over everything and of the worst tensor.
struct Difference {
  double all = 0, worst = 0;
};
Difference difference(const std::string& a_path, const std::string& b_path);

bool same_file(const std::string& a, const std::string& b);
std::vector<std::string> lines(const std::string& path);

// Column `name` of a CSV file, by step.
std::map<int, double> column(const std::string& path, const std::string& name);

}  // namespace triad::test
