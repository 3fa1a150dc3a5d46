// The device and the dtype that a config's words name.
#pragma once
#include "engine/comm/launch_env.h"
#include "train/config/config.h"

namespace triad {

// automatic: a GPU if one is usable, else the CPU. cuda: throws Error without a usable GPU. With several GPUs, the one
// of the process's local rank.
Device choose_device(DeviceChoice, const LaunchEnv& env = {});
DType compute_dtype(Precision);

}  // namespace triad
