// Learning rate of optimizer step s (0-based): linear warmup over train.warmup_steps to lr, then by train.schedule:
//   cosine, linear: falls to min_lr_fraction * lr at train.steps
//   wsd (warmup, stable, decay): lr, then falls linearly to min_lr_fraction * lr in the last decay_steps() steps.
//   Before these it does not depend on train.steps, so a run can continue from there with more steps.
#pragma once
#include <algorithm>
#include <cmath>
#include <numbers>

#include "train/config.h"

namespace triad {

inline double learning_rate(const TrainConfig& c, int64_t s) {
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

}  // namespace triad
