// What is settled before a run touches memory or files: where it goes on from, its device, its ranks.
#pragma once
#include <memory>
#include <string>

#include "engine/comm.h"
#include "train/run_folder.h"
#include "train/trainer.h"

namespace triad {

// The checkpoint to go on from; empty for a fresh run.
std::string find_resume(const TrainRequest&);
// Refuses a long run in fp32 on a GPU, unless train.allow_unsafe.
Device safe_device(const Config&, const LaunchEnv&);
// The ranks, which have to be of one mind: another config than rank 0's is an error that names the keys.
std::unique_ptr<Comm> meet(const LaunchEnv&, Device, const Config&);
RunFolder::Start start_of(const TrainRequest&, const std::string& resume_from);

}  // namespace triad
