#include "train/monitor/pace.h"

#include <algorithm>
#include <vector>

namespace triad {

namespace {
constexpr size_t kFew = 5;      // fewest step times in a median, once the run has had so many steps
constexpr size_t kMost = 1000;  // most step times in a median, because they are sorted in every step
}  // namespace

void StepTimes::add(double ms) {
  ms_.push_back(ms);
  ++since_row_;
  while (ms_.size() > std::min(kMost, std::max(kFew, since_row_))) ms_.pop_front();
}

double StepTimes::median_ms() const {
  if (ms_.empty()) return 0;
  std::vector<double> sorted(ms_.begin(), ms_.end());
  std::sort(sorted.begin(), sorted.end());
  const size_t n = sorted.size();
  return n % 2 == 1 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

double step_flops(const Config& c, const DocumentMix& mix) {
  const TrainConfig& t = c.train;
  const int64_t sequences = t.micro_batch_size * t.accumulate_grad_batches;
  return (training_flops(c.model, sequences, t.seq_len, c.recompute, mix) -
          lora_flops_less(c.model, t.lora, sequences, t.seq_len)) /
         static_cast<double>(c.dist.context);
}

double stage_flops(const Config& run, const TrainStage& stage, const DocumentMix& mix) {
  Config config = in_stage(run, stage);
  const double configured = step_flops(config, mix);
  if (!stage.has_dense_steps()) return configured;
  config.model.attention = AttentionKind::dense;
  const TrainConfig& t = config.train;
  const double index = dense_index_flops(run.model, t.micro_batch_size * t.accumulate_grad_batches, t.seq_len, mix) /
                       static_cast<double>(run.dist.context);
  const double dense = step_flops(config, mix) + index;
  return stage.attention == StageAttention::dense ? dense : (configured + dense) / 2;
}

ThroughputMeter::ThroughputMeter(const Config& config, double step_flops, double peak_flops, int64_t run_tokens)
    : config_(config),
      step_flops_(step_flops),
      stage_end_(config.train.steps),
      peak_flops_(peak_flops),
      run_tokens_(run_tokens) {}

void ThroughputMeter::measure(StepRecord& r, Clock::time_point now) {
  ++steps_, ++steps_since_row_;
  run_tokens_ += r.tokens;
  comm_ms_since_row_ += r.comm_ms;
  times_.add(r.step_ms);
  if (steps_ == 1)
    first_step_ = now;
  else
    flops_ += step_flops_;
  r.first = steps_ == 1;
  r.row = r.step % config_.log.every == 0 || r.step == config_.train.steps;
  r.run_tokens = run_tokens_;
  r.median_ms = times_.median_ms();
  if (r.median_ms > 0) {
    r.tokens_per_s = static_cast<double>(r.tokens) / r.median_ms * 1e3;
    if (peak_flops_ > 0) r.mfu = step_flops_ / r.median_ms * 1e3 / peak_flops_;
  }
  r.row_comm_ms = comm_ms_since_row_ / static_cast<double>(steps_since_row_);
  // The average includes evaluations and checkpoints. It includes the first step only while there is no other, because
  // the first step also loads kernels and records graphs.
  const double so_far_s = r.first ? r.median_ms / 1e3 : std::chrono::duration<double>(now - first_step_).count();
  const double left = step_flops_ * static_cast<double>(stage_end_ - r.step) + later_flops_;
  r.eta_s = so_far_s * left / (r.first ? step_flops_ : flops_);
  if (!r.row) return;
  times_.row();
  steps_since_row_ = 0;
  comm_ms_since_row_ = 0;
}

bool heartbeat_due(int64_t every, int64_t step, double seconds_since_last) {
  if (every == 0) return false;
  if (every > 0) return step % every == 0;
  constexpr int64_t kAllUntil = 1000, kThinner = 10;
  constexpr double kSilence = 60;
  int64_t apart = 1;
  while (step / apart > kAllUntil) apart *= kThinner;
  return step % apart == 0 || seconds_since_last >= kSilence;
}

}  // namespace triad
