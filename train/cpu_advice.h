// What a run is told that meets a CPU where its config was made for a GPU.
#pragma once
#include <string>

#include "engine/device.h"
#include "train/config.h"

namespace triad {

// The config for a CPU that lies in the same folder: a_b_cpu.json for a_b.json, else a_cpu.json; "" if there is none.
std::string cpu_config_beside(const std::string& config_file);

// What else would train on this machine, for the error that no GPU can be used.
std::string advice_without_gpu(const std::string& config_file);

// About how long a step takes on this machine's CPU: the step's FLOPs at the rate of a small product, which is
// measured, twice over, because the rest of a step takes about as long as its products.
double estimate_cpu_step_s(const Config&);

// bf16 on a CPU: that it is no faster, how long a step and the run take, and what to do. "" for any other run.
std::string cpu_precision_warning(const Config&, Device, const std::string& config_file);

}  // namespace triad
