#include "train/run/cpu_advice.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <system_error>

#include "engine/context.h"
#include "engine/process/counted.h"
#include "kernels/ops/matmul.h"
#include "model/flops.h"
#include "train/config/device_choice.h"
#include "train/step/train_step.h"

namespace triad {

namespace {

std::string duration_text(double s) {
  constexpr double kMinute = 60, kHour = 3600, kDay = 86400;
  if (s < 1) return fmt::format("{:.0f} ms", std::ceil(s * 1e3));
  if (s < 2 * kMinute) return fmt::format("{:.0f} s", s);
  if (s < 2 * kHour) return fmt::format("{:.0f} minutes", s / kMinute);
  if (s < 2 * kDay) return fmt::format("{:.0f} hours", s / kHour);
  return fmt::format("{:.0f} days", s / kDay);
}

// Measured FLOP/s in a matmul with this dtype on this CPU.
double measure_product_rate(DType dtype) {
  constexpr int64_t kSize = 512;
  // Timed matmuls; the first one is slower, because it allocates memory and starts threads.
  constexpr int kRuns = 3;
  const int64_t operand = align_up(kSize * kSize * size_of(dtype)), scratch = 3 * align_up(kSize * kSize * 4);
  Runtime runtime({.device = Device::cpu(), .arena_bytes = 3 * operand + scratch, .scratch_bytes = scratch});
  Tensor matrix[3];
  for (Tensor& m : matrix) {
    m = runtime.arena().alloc(MemTag::workspace, "a product's rate", dtype, {kSize, kSize});
    zero(runtime.ctx(), m);
  }
  double least_s = 1e9;
  for (int run = 0; run < kRuns; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    matmul(runtime.ctx(), matrix[0], matrix[1], matrix[2], {});
    least_s = std::min(least_s, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return 2.0 * kSize * kSize * kSize / std::max(least_s, 1e-9);
}

}  // namespace

std::string cpu_config_for(const std::string& config_file) {
  const std::filesystem::path file(config_file);
  for (std::string stem = file.stem().string(); !stem.empty(); stem.resize(std::min(stem.size(), stem.rfind('_')))) {
    const std::filesystem::path other = file.parent_path() / (stem + "_cpu.json");
    std::error_code none;
    if (std::filesystem::is_regular_file(other, none) && other != file) return other.string();
    if (stem.find('_') == std::string::npos) break;
  }
  return "";
}

std::string advice_without_gpu(const std::string& config_file) {
  const std::string other = cpu_config_for(config_file);
  constexpr const char* kSets = "--set runtime.device=cpu --set runtime.precision=fp32";
  if (other.empty()) return fmt::format("a CPU trains it with {}, slowly if it is large", kSets);
  return fmt::format("{} is made for a CPU; {} trains this one on it, slowly", other, kSets);
}

double estimate_cpu_step_s(const Config& config) {
  const TrainConfig& t = config.train;
  const double flops = training_flops(config.model, t.micro_batch_size * t.accumulate_grad_batches, t.seq_len);
  return 2 * flops / measure_product_rate(compute_dtype(config.runtime.precision));
}

std::string cpu_precision_warning(const Config& config, Device device, const std::string& config_file) {
  if (device.is_cuda() || config.runtime.precision != Precision::bf16) return "";
  const double step_s = estimate_cpu_step_s(config);
  const std::string other = cpu_config_for(config_file);
  return fmt::format(
      "warning: runtime.precision is bf16 on a CPU, which computes in fp32 and rounds: fp32 is faster. A step takes "
      "about {} here, {} about {}. --set runtime.precision=fp32{}",
      duration_text(step_s), counted(config.train.steps, "step"),
      duration_text(step_s * static_cast<double>(config.train.steps)),
      other.empty() ? "" : ", or " + other + ", which is made for a CPU");
}

}  // namespace triad
