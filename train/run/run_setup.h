// RunSetup: everything that a run has before its first step: data, memory, model, optimizer, initial state and folder.
// All ranks construct it together.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "engine/nvtx.h"
#include "engine/process/start_times.h"
#include "io/data/loader.h"
#include "train/checkpoint/state.h"
#include "train/monitor/memory_report.h"
#include "train/run/data_source.h"
#include "train/run/prompt_sampler.h"
#include "train/run/run_folder.h"
#include "train/run/trainer.h"
#include "train/step/train_step.h"

namespace triad {

struct RunSetup {
  // Throws if the run is impossible; in that case no file in the run's folder has changed.
  RunSetup(const TrainRequest&, Device, StartTimes, OutsideMemory, std::unique_ptr<Comm>, FolderLock);
  RunSetup(const RunSetup&) = delete;

  // Writes the files that a run writes at its start (config.json, env.json, document_lengths.json, the tokenizer). On a
  // resume, first returns the folder to the resumed step. Returns the folder to which later checkpoints were moved, or
  // "". Collective: all ranks call it.
  std::string write_initial_files();

  bool first() const { return comm->first(); }
  bool resumed() const { return !resume_from.empty(); }
  int64_t resume_step() const { return resumed() ? initial_state.step : -1; }  // -1 if the run does not resume
  // Tokens per step in a stage, on all ranks.
  int64_t step_tokens(const TrainStage& stage) const { return in_stage(config, stage).tokens_per_step(comm->world()); }
  // Batches with a stage's rows from RunState::cursor on.
  LoaderOptions loader_options(const TrainStage&, const RunState&) const;

  const TrainRequest& request;
  const Config& config;
  const Device device;
  StartTimes times;
  OutsideMemory outside;
  std::unique_ptr<Comm> comm;
  FolderLock lock;  // declared before all members that write to the folder, so that the lock is released after them
  const std::string resume_from;  // path to the checkpoint from which the run resumes; empty: not a resume
  const std::optional<ModelSource> init_from;
  // Holds its files' content, so later changes to the files have no effect.
  const std::unique_ptr<Tokenizer> tokenizer;
  const DataSource data;
  const std::unique_ptr<OpListener> nvtx;
  const std::unique_ptr<Runtime> runtime;
  TrainStep step;
  std::string changed_data;  // how the data differ from the resumed checkpoint's, accepted by the user; else empty
  const RunState initial_state;
  const std::unique_ptr<PromptSampler> sampler;  // log.samples; null on other ranks than the first
  // The last member: its constructor changes files, and every other constructor may still refuse the run.
  RunFolder folder;
};

}  // namespace triad
