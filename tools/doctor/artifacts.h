// Reads and checks the files of a training run, because the doctor judges files, not exit codes. A missing, truncated
// or invalid file is an Error that names it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "io/json_config.h"

namespace triad {

struct TrainedRun {
  std::string folder;
  Json config, env, metrics;
  std::vector<double> losses, norms;  // loss and gradient norm of each step, with all digits (from heartbeats)
  // Number of tensors in model.safetensors, whose checksums are right and whose elements are all finite.
  int64_t tensors = 0;
  int64_t fallbacks = 0;                 // number of calls that fell back to a slower kernel, from the last heartbeat
  int64_t slow_steps = 0;                // number of steps that the run's watchdog reported as slow
  std::map<std::string, double> of_gpu;  // the last heartbeat's fields that begin with gpu_, by name
  std::string file(const std::string& name) const { return folder + "/" + name; }
};

// Reads the files of a finished run. Throws an Error if the run does not have this number of steps and ranks.
TrainedRun read_trained(const std::string& folder, int64_t steps, int ranks);

// How much the final weights of two runs differ.
struct WeightDifference {
  int64_t tensors = 0;  // number of tensors
  int64_t unequal = 0;  // number of tensors whose bytes differ
  // The relative difference |a - b| / |b|, where b is the reference.
  double relative = 0;     // of all tensors together
  double worst = 0;        // of the tensor in which it is largest
  std::string first;       // name of the first tensor that differs
  std::string worst_name;  // name of the tensor with the largest relative difference
};
WeightDifference compare_weights(const std::string& folder, const std::string& reference_folder);

// The elements of a tensor of type F32, F64 or I32. Throws an Error with tensor and element if one is not finite.
std::vector<double> numbers_of(const std::string& path, const std::string& tensor);
// |a - b| / |b| in Euclidean norms, or |a - b| if b is 0.
double relative_difference(const std::vector<double>& a, const std::vector<double>& b);

// The last line of a program's output that begins with "triad:", which is an error message; without one, the last line.
std::string final_message(const std::string& output_path);
std::string tail(const std::string& path, size_t lines);  // the last lines of a file; "" if it does not exist

}  // namespace triad
