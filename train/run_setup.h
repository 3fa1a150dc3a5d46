// RunSetup: what a run consists of before its first step: data, memory, model, optimizer, initial state and folder.
// All ranks construct it together.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "engine/nvtx.h"
#include "io/data/loader.h"
#include "train/data_source.h"
#include "train/monitor/memory_report.h"
#include "train/run_folder.h"
#include "train/state.h"
#include "train/train_step.h"
#include "train/trainer.h"

namespace triad {

struct RunSetup {
  // Throws if the run is impossible; no file of the run's folder has changed then.
  RunSetup(const TrainRequest&, Device, OutsideMemory, std::unique_ptr<Comm>, FolderLock);
  RunSetup(const RunSetup&) = delete;

  // Writes the files of the run's start (config.json, env.json, the tokenizer); on a resume, first takes the folder
  // back to the resumed step. Returns where later checkpoints were moved; empty: nothing was. Collective.
  std::string write_initial_files();

  bool first() const { return comm->first(); }
  bool resumed() const { return !resume_from.empty(); }
  int64_t resume_step() const { return resumed() ? initial_state.step : -1; }  // -1: not a resume
  int64_t step_tokens() const { return config.train.tokens_per_step() * comm->world(); }
  int64_t step_targets() const;  // tokens of a step, on all ranks, that have a target
  LoaderOptions loader_options() const;

  const TrainRequest& request;
  const Config& config;
  const Device device;
  OutsideMemory outside;
  std::unique_ptr<Comm> comm;
  FolderLock lock;                // declared before all members that write to the folder, so released after them
  const std::string resume_from;  // a checkpoint; empty: not a resume
  const std::optional<ModelSource> init_from;
  const std::unique_ptr<Tokenizer> tokenizer;  // holds the files' content: later changes to the files have no effect
  const DataSource data;
  const std::unique_ptr<OpListener> nvtx;
  const std::unique_ptr<Runtime> runtime;
  TrainStep step;
  const RunState initial_state;
  const RunFolder folder;  // last: its constructor changes files, and all others may refuse the run
};

}  // namespace triad
