// Reads and checks a training run's files, because the doctor decides by files, not exit codes. A missing, truncated or
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
  std::vector<double> losses, norms;  // loss and gradient norm by step, with all digits (from heartbeats)
  // Tensors in model.safetensors; all have right checksums and only finite elements.
  int64_t tensors = 0;
  int64_t fallbacks = 0;                     // calls that fell back to a slower kernel, from the last heartbeat
  int64_t slow_steps = 0;                    // steps that the run's watchdog reported as slow
  std::map<std::string, double> gpu_fields;  // the last heartbeat's fields that begin with gpu_, by name
  std::string file(const std::string& name) const { return folder + "/" + name; }
};

// Reads a finished run's files. Throws an Error if the run's steps or ranks differ from these.
TrainedRun read_trained(const std::string& folder, int64_t steps, int ranks);

// How much two runs' final weights differ.
struct WeightDifference {
  int64_t tensors = 0;  // tensor count
  int64_t unequal = 0;  // tensors whose bytes differ
  // The relative difference |a - b| / |b|, where b is the reference.
  double relative = 0;     // relative difference over all tensors together
  double worst = 0;        // largest relative difference in a tensor
  std::string first;       // first tensor that differs
  std::string worst_name;  // tensor with the largest relative difference
};
WeightDifference compare_weights(const std::string& folder, const std::string& reference_folder);

// Elements of an F32, F64 or I32 tensor. Throws an Error with tensor and element if one is not finite.
std::vector<double> numbers_of(const std::string& path, const std::string& tensor);
// |a - b| / |b| in Euclidean norms, or |a - b| if b is 0.
double relative_difference(const std::vector<double>& a, const std::vector<double>& b);

// The first of the output's last lines that begin with "triad:" (an error message, then advice); without one, the last
// line.
std::string final_message(const std::string& output_path);
std::string tail(const std::string& path, size_t lines);  // a file's last lines; "" if it does not exist

}  // namespace triad
