#include "train/preparation.h"

#include <fmt/ranges.h>

#include <filesystem>

#include "engine/backend.h"
#include "engine/check.h"
#include "io/checkpoint.h"
#include "io/file.h"
#include "train/cpu_advice.h"
#include "train/load_config.h"
#include "train/state.h"
#include "train/stop_signal.h"
#include "train/train_step.h"

namespace triad {

FolderLock lock_folder_for(const Config& config, const Comm& comm) {
  FolderLock lock;
  if (comm.first()) lock_run_folder(lock, config.log.out_dir);
  return lock;
}

std::string find_resume(const TrainRequest& request, Comm& comm) {
  std::string found;
  if (comm.first()) {
    const std::string& own = request.config.log.out_dir;
    if (!request.resume.empty()) found = resolve_checkpoint(request.resume == "latest" ? own : request.resume);
    RunFolder::refuse(own, start_of(request, found));
  }
  return comm.exchange_text(found, "the checkpoint to go on from").front();
}

std::optional<int64_t> find_complete(const TrainRequest& request, Comm& comm) {
  const std::string &own = request.config.log.out_dir, &from = request.resume;
  const auto is_folder = [&](const std::string& path) {
    return std::filesystem::weakly_canonical(from) == std::filesystem::weakly_canonical(path);
  };
  int64_t step = -1;
  if (comm.first() && !from.empty() && (from == "latest" || is_folder(own) || is_folder(own + "/checkpoints")))
    step = RunFolder::complete_at(own).value_or(step);
  step = comm.exchange(step, "the step at which the run is complete").front();
  return step >= request.config.train.steps ? std::optional(step) : std::nullopt;
}

Device safe_device(const TrainRequest& request, const LaunchEnv& launch) {
  const Config& config = request.config;
  if (config.runtime.device == DeviceChoice::cuda && backend::cuda_device_count() == 0)
    fail("device cuda was asked for (runtime.device), but {}; {}", backend::why_no_cuda(),
         advice_without_gpu(request.config_file));
  const Device device = choose_device(config.runtime.device, launch);
  constexpr int64_t kLongRun = 1000;
  if (device.is_cuda() && config.runtime.precision == Precision::fp32 && config.train.steps > kLongRun &&
      !config.train.allow_unsafe)
    fail_usage(
        "runtime.precision is fp32 in a run of {} steps on a GPU: bf16 is several times faster. Set "
        "runtime.precision=bf16, or train.allow_unsafe=true",
        config.train.steps);
  return device;
}

std::unique_ptr<Comm> meet(const LaunchEnv& launch, Device device, const Config& config) {
  std::unique_ptr<Comm> comm =
      open_comm(launch, device, config.dist.backend, static_cast<double>(config.dist.timeout_s));
  const std::string first = comm->exchange_text(config_to_json(config).dump(), "the config").front();
  const std::vector<std::string> lines =
      differences(config_from_json(parse_json(first, "the first rank's config")), config);
  if (!lines.empty()) fail_usage("its config differs from rank 0's: {}", fmt::join(lines, "; "));
  await_stop_signals(/*tells=*/comm->first());  // before, nothing is there that would be worth a step's time
  return comm;
}

RunFolder::Start start_of(const TrainRequest& request, const std::string& resume_from) {
  if (request.overwrite) return RunFolder::Start::overwrite;
  const auto folder_of = [](const std::string& path) { return std::filesystem::weakly_canonical(path); };
  const bool own = !resume_from.empty() &&
                   folder_of(resume_from).parent_path() == folder_of(request.config.log.out_dir + "/checkpoints");
  return own ? RunFolder::Start::resume : RunFolder::Start::fresh;
}

}  // namespace triad
