#include "train/run/run_setup.h"

#include <filesystem>
#include <random>
#include <utility>

#include "io/file.h"
#include "kernels/common/integer.h"
#include "train/checkpoint/run_files.h"
#include "train/config/load_config.h"
#include "train/monitor/document_lengths.h"
#include "train/monitor/env_report.h"
#include "train/run/initial_state.h"
#include "train/run/memory_plan.h"
#include "train/run/run_exit.h"
#include "train/run/startup.h"

namespace triad {

namespace {

// Allocates the run's memory. If the run does not fit, writes its memory plan to the folder, unless the folder holds a
// run already.
std::unique_ptr<Runtime> allocate(const Config& config, Device device, Comm& comm, int64_t most_documents,
                                  StartTimes& times) {
  try {
    return allocate_planned(config, device, &comm, most_documents, &times);
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

RunSetup::RunSetup(const TrainRequest& r, Device run_device, StartTimes start_times, OutsideMemory outside_memory,
                   std::unique_ptr<Comm> ranks, FolderLock folder_lock)
    : request(r),
      config(r.config),
      device(run_device),
      times(std::move(start_times)),
      outside(std::move(outside_memory)),
      comm(std::move(ranks)),
      lock(std::move(folder_lock)),
      resume_from(find_resume(request, *comm)),
      init_from(find_init(config, resume_from)),
      tokenizer(open_tokenizer(config.data)),
      data(times.during("data",
                        [&] {
                          DataSource source = open_data_for(request, *tokenizer, resume_from, init_from);
                          compare_data(*comm, config, *tokenizer, source);
                          if (resume_from.empty()) check_epochs(config, source, comm->world(), 0, 0);
                          return source;
                        })),
      nvtx(nvtx_listener()),
      runtime(times.during("arena", [&] { return allocate(config, device, *comm, data.most_documents, times); })),
      step(times.during("model", [&] { return TrainStep(*runtime, config, comm.get(), data.most_documents); })),
      initial_state(times.during(
          "weights",
          [&] { return begin_run(runtime->ctx(), step, *comm, request, data, resume_from, init_from, changed_data); })),
      sampler(make_prompt_sampler(*runtime, step.model(), *tokenizer, config, *comm)),
      folder(config.log.out_dir, first() ? start_of(request, resume_from) : RunFolder::Start::join, lock) {
  runtime->arena().seal();
  if (nvtx) runtime->ctx().listeners->push_back(nvtx.get());
}

std::string RunSetup::write_initial_files() {
  std::string run_id;
  if (first()) {
    make_folders(folder.file("ranks"));
    // The first file, because it marks the folder's other files as a run's (train/checkpoint/run_files.h).
    std::random_device draw;
    Json env = environment_report(device, *comm, request.build);
    run_id = fmt::format("{:08x}{:08x}", draw(), draw());
    env[kRunId] = run_id;
    env[kTokenizerSums] = Json::object();
    for (const Tokenizer::File& file : tokenizer->files())
      env[kTokenizerSums][file.name] = content_checksum(file.content);
    write_file_atomically(folder.file("env.json"), dump_json(env, 2) + "\n");
  }
  // After this the first rank has prepared the folder.
  folder.hold(comm->all_gather_host_text(run_id, "the run's folder").front());
  comm->record_collectives(folder.file(fmt::format("ranks/rank_{}_collectives.csv", comm->rank())));
  if (!first()) return "";
  std::string set_aside = resumed() ? folder.rewind(initial_state.step) : "";
  write_file_atomically(folder.file("config.json"), dump_json(config_to_json(config), 2) + "\n");
  // Copied so users of the final weights have the tokenizer.
  write_tokenizer_files(tokenizer->files(), folder.path());
  if (data.train.documents() >= 0) {
    std::vector<const DocumentIndex*> indices;
    for (const auto& source : data.train.sources()) indices.push_back(source->documents());
    write_file_atomically(folder.file(kDocumentLengths), dump_json(document_lengths(indices, data.parts), 2) + "\n");
  }
  return set_aside;
}

LoaderOptions RunSetup::loader_options(const TrainStage& stage, const RunState& state) const {
  LoaderOptions options = triad::loader_options(in_stage(config, stage), data, comm->rank(), comm->world());
  options.first_sequence = ceil_div(state.cursor, stage.seq_len);
  options.known = state.groups;
  return options;
}

}  // namespace triad
