// What depends on an optimizer step's number: its stage (train.stages) and its learning rate.
#pragma once
#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "train/config/config.h"

namespace triad {

// A stage in a run, with train.*'s values where train.stages has none.
struct TrainStage {
  size_t index = 0;
  int64_t begin = 0, end = 0;  // its steps, 0-based
  int64_t seq_len = 0, micro_batch_size = 0;
  double lr_factor = 1;
  StageAttention attention = StageAttention::configured;

  int64_t steps() const { return end - begin; }
  // Whether a step (0-based) in the stage is dense. With `alternate`, steps with odd numbers in the log are, which
  // counts from 1.
  bool is_dense(int64_t step) const {
    return attention == StageAttention::dense || (attention == StageAttention::alternate && step % 2 == 0);
  }
  bool has_dense_steps() const { return attention == StageAttention::dense || attention == StageAttention::alternate; }
};

// A run's stages in order; one stage if train.stages is not set.
std::vector<TrainStage> stages_of(const TrainConfig&);
// A step's stage (0-based); the last stage for steps after the run's end.
TrainStage stage_at(const TrainConfig&, int64_t step);
// Whether the validation loss is computed after this many steps: every train.eval_every ones, and at the end.
inline bool evaluates_after(const TrainConfig& c, int64_t steps) {
  return c.eval_every > 0 && (steps % c.eval_every == 0 || steps == c.steps);
}
// The config for a run in which all steps are like the stage's, without train.stages.
Config in_stage(const Config&, const TrainStage&);
// A line about a stage, for the log: "stage 2 of 3: steps 101 to 200 of 4 x 8192 tokens, attention dense".
std::string stage_text(const Config&, const TrainStage&);

// Learning rate at optimizer step s (0-based) before its stage's factor: linear warmup over train.warmup_steps to lr,
// then by train.schedule:
//   cosine, linear: falls to min_lr_fraction * lr at train.steps
//   wsd (warmup, stable, decay): lr, then falls linearly to min_lr_fraction * lr in the last decay_steps() steps.
//   Before these it does not depend on train.steps, so a run can continue from there with more steps.
inline double scheduled_rate(const TrainConfig& c, int64_t s) {
  if (s < c.warmup_steps) return c.lr * static_cast<double>(s + 1) / static_cast<double>(c.warmup_steps);
  const bool stable = c.schedule == Schedule::wsd && (c.decay_fraction == 0 || s < c.steps - c.decay_steps());
  if (stable) return c.lr;
  const int64_t begin = c.schedule == Schedule::wsd ? c.steps - c.decay_steps() : c.warmup_steps;
  const int64_t decay_steps = std::max<int64_t>(1, c.steps - begin);
  const double progress = std::min(1.0, static_cast<double>(s - begin) / static_cast<double>(decay_steps));
  const double lowest = c.lr * c.min_lr_fraction;
  if (c.schedule != Schedule::cosine) return lowest + (c.lr - lowest) * (1 - progress);
  return lowest + 0.5 * (c.lr - lowest) * (1 + std::cos(std::numbers::pi * progress));
}

// The learning rate at optimizer step s (0-based).
inline double learning_rate(const TrainConfig& c, int64_t s) { return scheduled_rate(c, s) * stage_at(c, s).lr_factor; }

}  // namespace triad
