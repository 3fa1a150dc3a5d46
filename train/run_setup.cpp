#include "train/run_setup.h"

#include <filesystem>
#include <utility>

#include "io/file.h"
#include "train/initial_state.h"
#include "train/load_config.h"
#include "train/memory_plan.h"
#include "train/monitor/env_report.h"
#include "train/run_exit.h"
#include "train/startup.h"

namespace triad {

namespace {

// Allocates the run's memory. A run that does not fit writes its memory plan to the folder, unless a run has used it.
std::unique_ptr<Runtime> allocate(const Config& config, Device device, Comm& comm) {
  try {
    return allocate_planned(config, device, &comm);
  } catch (const PlanTooLarge& e) {
    report_also([&] {
      if (std::filesystem::exists(config.log.out_dir + "/config.json")) return;
      make_folders(config.log.out_dir);
      write_memory_snapshot(config.log.out_dir, MemoryReport::suffix(comm), e.plan);
    });
    throw;
  }
}

}  // namespace

RunSetup::RunSetup(const TrainRequest& r, Device run_device, OutsideMemory outside_memory, std::unique_ptr<Comm> ranks,
                   FolderLock folder_lock)
    : request(r),
      config(r.config),
      device(run_device),
      outside(std::move(outside_memory)),
      comm(std::move(ranks)),
      lock(std::move(folder_lock)),
      resume_from(find_resume(request, *comm)),
      init_from(find_init(config, resume_from)),
      tokenizer(make_tokenizer(config.data.tokenizer_or_bytes())),
      data(open_data_for(config, *tokenizer, resume_from, init_from)),
      nvtx(nvtx_listener()),
      runtime(allocate(config, device, *comm)),
      step(*runtime, config, comm.get()),
      initial_state(begin_run(runtime->ctx(), step, *comm, config, data, resume_from, init_from)),
      folder(config.log.out_dir, first() ? start_of(request, resume_from) : RunFolder::Start::join, lock) {
  runtime->arena().seal();
  if (nvtx) runtime->ctx().listeners->push_back(nvtx.get());
}

std::string RunSetup::write_initial_files() {
  if (first()) make_folders(folder.file("ranks"));
  comm->barrier("the run's folder");  // prepared by the first rank
  comm->record_collectives(folder.file(fmt::format("ranks/rank_{}_collectives.csv", comm->rank())));
  if (!first()) return "";
  std::string set_aside = resumed() ? folder.rewind(initial_state.step) : "";
  write_file_atomically(folder.file("config.json"), dump_json(config_to_json(config), 2) + "\n");
  write_tokenizer_files(tokenizer->files(), folder.path());  // for users of the final weights
  write_file_atomically(folder.file("env.json"), dump_json(environment_report(device, *comm, request.build), 2) + "\n");
  return set_aside;
}

int64_t RunSetup::step_targets() const {
  return step_tokens() / config.train.seq_len * data.train->count_targets(config.train.seq_len);
}

LoaderOptions RunSetup::loader_options() const {
  const TrainConfig& t = config.train;
  return {.seq_len = t.seq_len,
          .micro_batch = t.micro_batch_size,
          .micro_steps = t.accumulate_grad_batches,
          .seed = static_cast<uint64_t>(config.data.seed),
          .rank = comm->rank(),
          .world = comm->world(),
          .first_sequence = initial_state.sequences,
          .stall_s = config.data.stall_s};
}

}  // namespace triad
