// Reads and checks the files of a training run: the doctor judges files, not exit codes. A missing, truncated or
// invalid file is an Error that names it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "io/json_config.h"

namespace triad {

struct TrainedRun {
  std::string folder;
  Json config, env, metrics;
  std::vector<double> losses, norms;     // by step, with all digits (from heartbeats)
  int64_t tensors = 0;                   // in model.safetensors: checksums verified, all elements finite
  int64_t fallbacks = 0;                 // calls without a fast kernel, from the last heartbeat
  int64_t slow_steps = 0;                // steps that the run's watchdog reported as slow
  std::map<std::string, double> of_gpu;  // the numbers gpu_* of the last heartbeat
  std::string file(const std::string& name) const { return folder + "/" + name; }
};

// Reads a finished run. Throws an Error if it has not this number of steps and ranks.
TrainedRun read_trained(const std::string& folder, int64_t steps, int ranks);

// The difference of two runs' final weights.
struct WeightDifference {
  int64_t tensors = 0, unequal = 0;  // unequal: tensors whose bytes differ
  double relative = 0, worst = 0;    // |a - b| / |b|, b being the reference: over all tensors, and of the worst one
  std::string first, worst_name;     // names of the first unequal and of the worst tensor
};
WeightDifference compare_weights(const std::string& folder, const std::string& reference_folder);

// The elements of an F32, F64 or I32 tensor. Throws an Error with tensor and element if one is not finite.
std::vector<double> numbers_of(const std::string& path, const std::string& tensor);
// |a - b| / |b| (Euclidean norms); |a - b| if b is 0.
double relative_difference(const std::vector<double>& a, const std::vector<double>& b);

// The last line that begins with "triad:", an error message; else the last line.
std::string final_message(const std::string& output_path);
std::string tail(const std::string& path, size_t lines);  // "" if the file does not exist

}  // namespace triad
