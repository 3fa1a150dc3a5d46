// What a run of the trainer left behind, read back and checked: the doctor judges files, not exit codes. A file that is
// missing, cut or not what it should be is an Error that names it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "io/json_config.h"

namespace triad {

struct TrainedRun {
  std::string folder;
  Json config, env, metrics;
  std::vector<double> losses, norms;     // of each step, with all their digits
  int64_t tensors = 0;                   // in model.safetensors, each read, its checksum right and all finite
  int64_t fallbacks = 0;                 // of the last step's heartbeat
  int64_t slow_steps = 0;                // that its watchdog told of
  std::map<std::string, double> of_gpu;  // the last heartbeat's gpu_* that are known
  std::string file(const std::string& name) const { return folder + "/" + name; }
};

// A run of so many steps on so many ranks that came to its end.
TrainedRun read_trained(const std::string& folder, int64_t steps, int ranks);

// Two runs' final weights. Norms over everything; `worst` of one tensor.
struct WeightDifference {
  int64_t tensors = 0, unequal = 0;  // unequal: by their bytes
  double relative = 0, worst = 0;    // |a - b| / |a|
  std::string first, worst_name;     // the first unequal one
};
WeightDifference compare_weights(const std::string& folder, const std::string& reference_folder);

// Of an F32, F64 or I32 tensor. One that is not finite is an Error, which names tensor and element.
std::vector<double> numbers_of(const std::string& path, const std::string& tensor);
// |a - b| / |b| over all of them.
double relative_difference(const std::vector<double>& a, const std::vector<double>& b);

// A program's last words: its last line that begins "triad:", else its last line.
std::string last_words(const std::string& output_path);
std::string tail(const std::string& path, size_t lines);

}  // namespace triad
