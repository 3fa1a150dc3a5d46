// Advice for a run on a CPU whose config was made for a GPU.
#pragma once
#include <string>

#include "engine/device.h"
#include "train/config.h"

namespace triad {

// The CPU config in the same folder: a_b_cpu.json for a_b.json, else a_cpu.json; "" if there is none.
std::string cpu_config_for(const std::string& config_file);

// What the user can do instead, for the error that no GPU is usable.
std::string advice_without_gpu(const std::string& config_file);

// Estimated seconds per step on this CPU: twice the step's FLOPs over the measured FLOP/s of a small matmul, because
// the rest of a step takes about as long as its matmuls.
double estimate_cpu_step_s(const Config&);

// Warns that bf16 is not faster on a CPU, with an estimate of the run's duration and an alternative; "" for other runs.
std::string cpu_precision_warning(const Config&, Device, const std::string& config_file);

}  // namespace triad
