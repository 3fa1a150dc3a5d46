#include "train/checkpoint/checkpointer.h"

#include <filesystem>
#include <iterator>
#include <system_error>
#include <thread>
#include <utility>

#include "engine/check.h"
#include "engine/process/seconds_since.h"
#include "io/checkpoint.h"
#include "io/file.h"
#include "io/weight_index.h"

namespace triad {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int buffer_of(Optimizer::State state) { return static_cast<int>(state); }
std::vector<StatePart::Buffer> buffers_of(const Config& config) {
  std::vector<StatePart::Buffer> buffers;
  for (const Optimizer::State state : Optimizer::kStates)
    buffers.push_back({Optimizer::dtype_of(state, config), [=, kind = config.train.optimizer](const ParamSpec& spec) {
                         return Optimizer::keeps(state, spec, kind);
                       }});
  return buffers;
}

const std::vector<NamedBuffer> kWeightBuffers = {{"", buffer_of(Optimizer::State::parameter)}};
std::vector<NamedBuffer> moment_buffers(const Config& config) {
  const auto squares = [kind = config.train.optimizer](const ParamSpec& spec) {
    return Optimizer::keeps(Optimizer::State::exp_avg_sq, spec, kind);
  };
  return {{kAvgPrefix, buffer_of(Optimizer::State::exp_avg)},
          {kAvgSqPrefix, buffer_of(Optimizer::State::exp_avg_sq), squares}};
}

std::string name_of(const RunState& state) { return fmt::format("step_{}", state.step); }

}  // namespace

Checkpointer::Checkpointer(const Config& config, const Params& params, Device device, Place place,
                           std::vector<Tokenizer::File> tokenizer, FilePlan plan, int64_t rank)
    : config_(config),
      params_(params),
      place_(std::move(place)),
      tokenizer_(std::move(tokenizer)),
      plan_(std::move(plan)),
      rank_(rank),
      part_(params, plan_.params(rank), device, buffers_of(config)),
      copied_(device) {}

void Checkpointer::save(Context& ctx, Optimizer& optimizer, const RunState& state, const std::string& temporary) {
  TRIAD_CHECK(!working_.valid(), "a checkpoint of step {} while another is being written", state.step);
  const Clock::time_point begin = Clock::now();
  for (const Optimizer::State which : Optimizer::kStates)
    optimizer.gather(ctx, which, [&](const ElementRange& elements, const Tensor& values) {
      part_.copy(ctx, buffer_of(which), elements, values);
    });
  copied_.record(ctx.stream);
  stall_ms_ = seconds_since(begin) * 1e3;
  state_ = state;
  temporary_ = temporary;
  start([this] {
    copied_.synchronize();
    began_ = Clock::now();
    if (!temporary_.empty()) return write_files(temporary_);
    place_.check();
    temporary_ = begin_checkpoint(place_.parent, name_of(state_));
    try {
      write_files(temporary_);
      put_in_place();
    } catch (...) {
      drop();
      throw;
    }
  });
}

template <class Work>
void Checkpointer::start(Work&& work) {
  written_.reset();
  error_ = nullptr;
  working_ = std::async(std::launch::async, [this, work] {
    try {
      work();
    } catch (...) { error_ = std::current_exception(); }
  });
}

void Checkpointer::write_files(const std::string& folder) const {
  if (part_.params().size() == 0) return;
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored))
    fail(
        "{}: rank {} does not see this folder, which the first rank has made: with dist.zero, log.out_dir must be in a "
        "file system that all ranks share",
        folder, rank_);
  write_part(part_, params_, kWeightBuffers, folder + "/" + plan_.name(kWeightsStem, rank_));
  write_part(part_, params_, moment_buffers(config_), folder + "/" + plan_.name(kMomentsStem, rank_));
}

void Checkpointer::publish() {
  start([this] { put_in_place_with_indices(); });
}

void Checkpointer::put_in_place_with_indices() {
  const auto write_index = [&](const char* stem, const std::vector<NamedBuffer>& buffers) {
    const DType dtype = part_.dtype(buffers.front().buffer);
    write_file_atomically(temporary_ + "/" + index_file_name(stem), plan_.index(params_, stem, buffers, dtype));
  };
  write_index(kWeightsStem, kWeightBuffers);
  write_index(kMomentsStem, moment_buffers(config_));
  put_in_place();
}

// Writes the files that say what the tensors are, and puts the folder in place.
void Checkpointer::put_in_place() {
  write_tokenizer_files(tokenizer_, temporary_);
  const Json state = state_json(config_, state_, checksums_of_files(temporary_));
  const std::string folder =
      finish_checkpoint(place_.parent, name_of(state_), temporary_, dump_json(state, 2) + "\n", place_.check);
  place_.check();  // before other checkpoints there are removed
  const TrainConfig& t = config_.train;
  thin_out_checkpoints(place_.parent, t.keep_last, t.keep_every, t.keep_best ? state_.validation.best_step : -1);
  written_ = Written{folder, stall_ms_, seconds_since(began_)};
}

WorkState Checkpointer::progress(std::chrono::milliseconds wait) {
  if (working_.valid() && working_.wait_for(wait) != std::future_status::ready) return WorkState::busy;
  return error_ != nullptr ? WorkState::failed : WorkState::done;
}

std::optional<Checkpointer::Written> Checkpointer::take(bool wait) {
  if (!working_.valid()) return std::nullopt;
  if (!wait && progress(std::chrono::milliseconds(0)) == WorkState::busy) return std::nullopt;
  working_.get();
  if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  return std::exchange(written_, std::nullopt);
}

void Checkpointer::drop() const { drop_checkpoint(temporary_); }

void Checkpointer::finish_alone() {
  if (!working_.valid()) return;
  take(/*wait=*/true);
  std::error_code ignored;
  if (plan_.whole() || !std::filesystem::exists(temporary_, ignored)) return;
  for (int64_t file = 0; file < plan_.files(); ++file)
    for (const char* stem : {kWeightsStem, kMomentsStem})  // a file has this name once it is whole
      while (!std::filesystem::exists(temporary_ + "/" + plan_.name(stem, file), ignored))
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
  put_in_place_with_indices();
}

}  // namespace triad
