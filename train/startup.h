// What is settled before a run touches memory or files: where it goes on from, its device, its ranks.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "train/load_config.h"
#include "train/run_folder.h"
#include "train/trainer.h"

namespace triad {

// The folder for the first rank alone, if it is there already: before anything in it is read, and before memory is
// asked for, of which a run that is still there may have most.
FolderLock lock_folder_for(const Config&, const Comm&);
// The checkpoint to go on from, as the first rank finds it; empty for a fresh run. An Error where the folder is none to
// begin so in: before data are read, and before what does not fit in memory would leave its plan there.
std::string find_resume(const TrainRequest&, Comm&);
// The step at which the run is complete that `--resume latest`, or its own folder, would go on with. Its last
// checkpoint may be of long before that, or none: nothing is made again.
std::optional<int64_t> complete_at(const Config&, const std::string& resume);
std::optional<int64_t> find_complete(const TrainRequest&, Comm&);  // as the first rank sees it
// Refuses a long run in fp32 on a GPU, unless train.allow_unsafe. Where no GPU can be used, the error for a config that
// asks for one says what would run.
Device safe_device(const TrainRequest&, const LaunchEnv&);
// The ranks, which have to be of one mind: another config than rank 0's is an error that names the keys. When they have
// met, signals ask for an orderly end; before that they end a process as they always do.
std::unique_ptr<Comm> meet(const LaunchEnv&, Device, const Config&);
RunFolder::Start start_of(const TrainRequest&, const std::string& resume_from);

// The config that a resume goes on with where the command has none: config.json of the run's folder that it names, or,
// of a checkpoint that is named itself, the config in its state.json. log.out_dir is that run's folder, wherever it
// lies now; sets and the environment come over it, as over a file. `latest` names no folder: a UsageError.
LoadedConfig load_config_of_run(const std::string& resume, const std::vector<std::string>& sets);
// The command of a shell that goes on with the run in its folder, in the same environment and working directory.
std::string resume_command(const TrainRequest&);

}  // namespace triad
