// Advice for a run on a CPU whose config was made for a GPU.
#pragma once
#include <string>

#include "engine/device.h"
#include "train/config/config.h"

namespace triad {

// The path to the CPU's config in the same folder: a_b_cpu.json for a_b.json, or else a_cpu.json; "" if neither file
// exists.
std::string cpu_config_for(const std::string& config_file);

// The advice that follows the error "no GPU is usable": what the user can do instead.
std::string advice_without_gpu(const std::string& config_file);

// Estimated seconds per step on this CPU, computed as twice the step's FLOPs over a small matmul's measured FLOP/s,
// because everything else in a step takes about as long as its matmuls.
double estimate_cpu_step_s(const Config&);

// For a bf16 run on a CPU: a warning that bf16 is not faster there, with the run's estimated duration and an
// alternative. "" for other runs.
std::string cpu_precision_warning(const Config&, Device, const std::string& config_file);

}  // namespace triad
