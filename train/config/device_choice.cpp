#include "train/config/device_choice.h"

#include "engine/check.h"

namespace triad {

Device choose_device(DeviceChoice choice, const LaunchEnv& env) {
  if (choice == DeviceChoice::cpu) return Device::cpu();
  if (backend::cuda_device_count() > 0) return device_of(env);
  if (choice == DeviceChoice::cuda)
    fail("device cuda was asked for (runtime.device, --device), but {}", backend::why_no_cuda());
  return Device::cpu();
}

DType compute_dtype(Precision precision) { return precision == Precision::bf16 ? DType::bf16 : DType::f32; }

}  // namespace triad
