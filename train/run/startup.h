// Decisions made before a run allocates memory or changes files: its device, its ranks, the checkpoint to resume from.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "train/config/load_config.h"
#include "train/run/run_folder.h"
#include "train/run/trainer.h"

namespace triad {

// Locks log.out_dir on the first rank if the folder exists. Call before reading from it and before allocating memory,
// since another run in the folder may hold most of it.
FolderLock lock_folder_for(const Config&, const Comm&);
// The checkpoint to resume from, found by the first rank; empty for a fresh run. Throws Error if the run may not start
// in the folder, before data are read and before a failed memory plan is written there. Collective.
std::string find_resume(const TrainRequest&, Comm&);
// Whether resume means the run in the config's log.out_dir: `latest`, or `auto`, which begins one where there is none.
bool means_out_dir(const std::string& resume);
// The step at which the run in log.out_dir is complete, if resume means or names that folder; else nullopt. Its
// newest checkpoint may be older or missing: a complete run is not trained again.
std::optional<int64_t> complete_at(const Config&, const std::string& resume);
// Calls complete_at on the first rank and returns its result on all ranks. Collective.
std::optional<int64_t> find_complete(const TrainRequest&, Comm&);
// The run's device. Refuses a long fp32 run on a GPU unless train.allow_unsafe is set. If the config requires a GPU and
// none is usable, the error says what would run instead.
Device choose_run_device(const TrainRequest&, const LaunchEnv&);
// Connects the ranks. Throws on all ranks if their builds or configs differ: an error that names two ranks and their
// builds, or a UsageError with the differing keys. build: TrainRequest::build.
std::unique_ptr<Comm> connect_ranks(const LaunchEnv&, Device, const Config&, const std::string& build);
// Something on which a run's ranks must agree: what it is, for the message "WHAT VALUE on rank 0", and its value on
// this rank.
struct RankFact {
  std::string what, value;
};
// Throws an Error on every rank, with two ranks and their values, if the ranks differ in a fact. All ranks list the
// same facts; advice: ends the message. Collective.
void require_alike(Comm&, const std::vector<RankFact>& facts, const std::string& advice);
// Throws an Error on every rank, with the folder and the hosts, if log.out_dir is not one folder that all hosts can
// write to. Makes the folder if there are several hosts. Collective.
void require_shared_folder(const Config&, Comm&);
RunFolder::Start start_of(const TrainRequest&, const std::string& resume_from);

// The config for a resume whose command names none: config.json in the run's folder, or the config in state.json if
// resume is a checkpoint. log.out_dir becomes the run's current folder; the environment and sets override it as they
// override a file. Throws UsageError for `latest` and `auto`, which name no folder.
LoadedConfig load_config_of_run(const std::string& resume, const std::vector<std::string>& sets);
// The shell command that resumes the run, to be used in the same environment and working directory.
std::string resume_command(const TrainRequest&);

}  // namespace triad
