// Helpers for tests that train on several ranks: they start runs, and compare the files that runs write.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "tests/support/train_run.h"

namespace triad::test {

inline constexpr const char* kWeights = "/model.safetensors";

// A rank count, and the keys that divide the work and the model's state among ranks.
struct Arrangement {
  int ranks;
  const char* keys;
};

// `triad` arguments that train configs/tiny.json on the CPU into the folder `out`.
std::string train_args(const std::string& out, const std::string& more = "");

// Trains on `ranks` processes with four micro-batches a step in total, and requires exit code 0. Returns the run's
// folder.
std::string run(const std::string& out, int ranks, const std::string& more = "");

// A shell prefix that starts one of two ranks as torchrun would, without torchrun's agent: mpirun itself would end a
// rank that hangs because the other is gone.
std::string as_torchrun_would(int rank);

// Waits until all ranks have trained some steps, and returns their process ids, which are in their heartbeats.
std::vector<int> pids_of(const std::string& run, int ranks, size_t steps);
// Waits a minute at most. Returns true if all processes are gone.
bool all_gone(const std::vector<int>& pids);

// The tensors of a safetensors file, or of several with an index, by name; all must be F32. path: as in WeightIndex.
std::map<std::string, std::vector<float>> tensors(const std::string& path);

// Relative difference |a - b| / |a| between two safetensors files: over all elements (all), and in the tensor where
// it's largest (worst).
struct Difference {
  double all = 0, worst = 0;
};
Difference difference(const std::string& a_path, const std::string& b_path);

// The files and folders below a folder, by their paths in it: the text of each file.
std::map<std::string, std::string> contents(const std::string& folder);

bool same_file(const std::string& a, const std::string& b);  // true if the bytes are equal and the file is not empty

// A CSV file's column `name`, by step.
std::map<int, double> column(const std::string& path, const std::string& name);

}  // namespace triad::test
