#include "train/run/startup.h"

#include <fmt/ranges.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>

#include "engine/backend.h"
#include "engine/check.h"
#include "engine/process/text.h"
#include "io/checkpoint.h"
#include "io/file.h"
#include "train/checkpoint/rank_work.h"
#include "train/checkpoint/state.h"
#include "train/config/device_choice.h"
#include "train/config/load_config.h"
#include "train/dist/rank_groups.h"
#include "train/run/cpu_advice.h"
#include "train/step/train_step.h"

namespace triad {

namespace fs = std::filesystem;

FolderLock lock_folder_for(const Config& config, const Comm& comm) {
  FolderLock lock;
  if (comm.first()) lock_run_folder(lock, config.log.out_dir);
  return lock;
}

std::string find_resume(const TrainRequest& request, Comm& comm) {
  std::string found;
  if (comm.first()) {
    const std::string& own = request.config.log.out_dir;
    const bool begins =
        request.resume.empty() || (request.resume == "auto" && !find_newest_checkpoint(own + "/checkpoints"));
    if (!begins) found = resolve_checkpoint(means_out_dir(request.resume) ? own : request.resume);
    const RunFolder::Start start = start_of(request, found);
    RunFolder::refuse(own, start);
    if (start == RunFolder::Start::resume && !request.overwrite) RunFolder::refuse_older(own, found);
    if (start == RunFolder::Start::overwrite && !found.empty() && is_inside(found, own + "/checkpoints"))
      fail(
          "--resume {} lies in {}/checkpoints, which --overwrite removes: copy it elsewhere, or choose another "
          "log.out_dir",
          found, own);
  }
  return comm.all_gather_host_text(found, "the checkpoint to go on from").front();
}

bool means_out_dir(const std::string& resume) { return resume == "latest" || resume == "auto"; }

std::optional<int64_t> complete_at(const Config& config, const std::string& from) {
  const std::string& own = config.log.out_dir;
  const auto is_folder = [&](const std::string& path) {
    return std::filesystem::weakly_canonical(from) == std::filesystem::weakly_canonical(path);
  };
  if (from.empty() || (!means_out_dir(from) && !is_folder(own) && !is_folder(own + "/checkpoints"))) return {};
  const std::optional<int64_t> step = RunFolder::complete_at(own);
  const int64_t patience = config.train.patience;
  const bool ended = step && patience > 0 && RunFolder::evaluations_since(own) >= patience;
  return ended || step >= config.train.steps ? step : std::nullopt;
}

std::optional<int64_t> find_complete(const TrainRequest& request, Comm& comm) {
  int64_t step = -1;
  if (comm.first()) step = complete_at(request.config, request.resume).value_or(step);
  step = comm.all_gather_host(step, "the step at which the run is complete").front();
  return step >= 0 ? std::optional(step) : std::nullopt;
}

Device choose_run_device(const TrainRequest& request, const LaunchEnv& launch) {
  const Config& config = request.config;
  if (config.runtime.device == DeviceChoice::cuda && backend::cuda_device_count() == 0)
    fail("device cuda was asked for (runtime.device), but {}; {}", backend::why_no_cuda(),
         advice_without_gpu(request.config_file));
  const Device device = choose_device(config.runtime.device, launch);
  check_ranks(config, launch.world);
  constexpr int64_t kLongRun = 1000;
  if (device.is_cuda() && config.runtime.precision == Precision::fp32 && config.train.steps > kLongRun &&
      !config.train.allow_unsafe)
    fail_usage(
        "runtime.precision is fp32 in a run of {} steps on a GPU: bf16 is several times faster. Set "
        "runtime.precision=bf16, or train.allow_unsafe=true",
        config.train.steps);
  return device;
}

void require_alike(Comm& comm, const std::vector<RankFact>& facts, const std::string& advice) {
  const auto index_of_difference = [](const std::vector<std::string>& all) {
    return static_cast<size_t>(std::ranges::find_if(all, [&](const auto& it) { return it != all[0]; }) - all.begin());
  };
  std::string values;
  for (const RankFact& fact : facts) values += fact.value + '\n';
  if (const std::vector<std::string> all = comm.all_gather_host_text(values, "what the ranks agree on");
      index_of_difference(all) == all.size())
    return;
  for (const RankFact& fact : facts) {
    const std::vector<std::string> all = comm.all_gather_host_text(fact.value, fact.what);
    const size_t other = index_of_difference(all);
    if (other < all.size())
      fail("{} {} on {}, but {} on {}: {}", fact.what, shortened(all[0]), comm.rank_name(0), shortened(all[other]),
           comm.rank_name(static_cast<int>(other)), advice);
  }
}

std::unique_ptr<Comm> connect_ranks(const LaunchEnv& launch, Device device, const Config& config,
                                    const std::string& build) {
  std::unique_ptr<Comm> comm =
      open_comm(launch, device, config.dist.backend, static_cast<double>(config.dist.timeout_s));
  std::string program = build;  // one line
  for (size_t at; (at = program.find('\n')) != std::string::npos;) program.replace(at, 1, ", ");
  // First, because another build's config may have other keys.
  require_alike(*comm, {{"the program is", program}}, "ranks of two builds do not train together");
  const std::vector<std::string> configs = comm->all_gather_host_text(config_to_json(config).dump(), "the config");
  const auto read = [](const std::string& text) { return config_from_json(parse_json(text, "a rank's config")); };
  for (size_t rank = 1; rank < configs.size(); ++rank) {
    if (configs[rank] == configs[0]) continue;
    const std::vector<std::string> lines = differences(read(configs[0]), read(configs[rank]));
    if (!lines.empty())
      fail_usage("the config of {} differs from rank 0's: {}", comm->rank_name(static_cast<int>(rank)),
                 fmt::join(lines, "; "));
  }
  return comm;
}

namespace {

// Whether the folder has the file. NFS may still remember that the folder, or one above it, was absent: opening a
// folder makes it ask again.
bool sees(const std::string& folder, const std::string& name) {
  constexpr int kTries = 30;
  for (int i = 0; i < kTries; ++i) {
    std::error_code unknown;
    for (fs::path up = fs::absolute(folder); up.has_relative_path(); up = up.parent_path())
      fs::directory_iterator(up, unknown);
    if (fs::exists(folder + "/" + name, unknown)) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return false;
}

}  // namespace

void require_shared_folder(const Config& config, Comm& comm) {
  if (!comm.has_several_hosts()) return;
  const std::string& path = config.log.out_dir;
  std::string name;
  run_on_ranks(
      comm, comm.first(),
      [&] {
        try {
          make_folders(path);
          // The name of an unfinished file, which a later run removes if this one is killed.
          name = fs::path(temporary_name("env.json")).filename().string();
          AppendFile(path + "/" + name);
        } catch (const Error& e) { fail("log.out_dir {}", e.what()); }
      },
      "log.out_dir");
  name = comm.all_gather_host_text(name, "a file in log.out_dir").front();
  std::string wrong;
  std::error_code unknown;
  if (!sees(path, name))
    wrong = fs::exists(path, unknown) ? "has another folder of that name" : "has no such folder";
  else if (access(path.c_str(), W_OK | X_OK) != 0)
    wrong = fmt::format("cannot write to it ({})", std::strerror(errno));
  const std::vector<std::string> all = comm.all_gather_host_text(wrong, "whether log.out_dir is shared");
  if (comm.first()) fs::remove(path + "/" + name, unknown);
  std::vector<std::string> hosts;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const std::string text = fmt::format("host {} {}", comm.peers()[rank].host, all[rank]);
    if (!all[rank].empty() && std::ranges::find(hosts, text) == hosts.end()) hosts.push_back(text);
  }
  if (!hosts.empty())
    fail("log.out_dir {} has to be the same folder on every host: {} made it on host {}, but {}", path,
         comm.first() ? "this rank" : "rank 0", comm.peers()[0].host, fmt::join(hosts, ", "));
}

RunFolder::Start start_of(const TrainRequest& request, const std::string& resume_from) {
  if (!resume_from.empty() && RunFolder::is_checkpoint_of(request.config.log.out_dir, resume_from))
    return RunFolder::Start::resume;
  return request.overwrite ? RunFolder::Start::overwrite : RunFolder::Start::fresh;
}

LoadedConfig load_config_of_run(const std::string& resume, const std::vector<std::string>& sets) {
  if (means_out_dir(resume))
    fail_usage("--resume {} needs a config, for its log.out_dir; --resume RUN, with the run's folder, needs none",
               resume);
  fs::path run(resume);
  if (!run.has_filename()) run = run.parent_path();
  // The parent folder, also for a path that is a single name.
  const auto up = [](const fs::path& path) {
    return path.has_parent_path() ? path.parent_path() : fs::absolute(path).parent_path();
  };
  const auto out_dir = [](const fs::path& path) { return "log.out_dir=" + dump_json(path.string(), -1); };
  if (run.filename() == kLatest) run = up(run);
  if (run.filename() == "checkpoints") run = up(run);
  if (const std::string file = (run / "config.json").string(); fs::exists(file)) {
    Json root = with_later_keys(read_json_file(file));
    set_json_key(root, out_dir(run));
    return load_config(std::move(root), run.filename().string(), sets);
  }
  const std::string checkpoint = resolve_checkpoint(resume);
  Json root = config_of_checkpoint(checkpoint);
  // The run is the one that the path names: a checkpoint may be a link to another place, such as another run's folder.
  const fs::path named = up(run), resolved = up(checkpoint);
  if (named.filename() == "checkpoints")
    set_json_key(root, out_dir(up(named)));
  else if (resolved.filename() == "checkpoints")
    set_json_key(root, out_dir(up(resolved)));
  return load_config(std::move(root), run.filename().string(), sets);
}

std::string resume_command(const TrainRequest& request) {
  const std::string& out = request.config.log.out_dir;
  const std::string run = out.starts_with('-') ? "./" + out : out;  // so that it is not read as an option
  std::string command = shell_word(request.program) + " train";
  command += " --resume " + shell_word(run);
  // Keys that this run's --set had changed from what the environment sets.
  Json now = config_to_json(request.config);
  Json then = now;
  apply_environment(then);
  for (const auto& [group, fields] : now.items())
    for (const auto& [key, value] : fields.items())
      if (then[group][key] != value) command += " --set " + shell_word(group + "." + key + "=" + dump_json(value, -1));
  return command;
}

}  // namespace triad
