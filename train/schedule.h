// Learning rate of optimizer step s (0-based): linear warmup over train.warmup_steps, then a cosine decay to
// min_lr_fraction * lr at train.steps.
#pragma once
#include <algorithm>
#include <cmath>
#include <numbers>

#include "train/config.h"

namespace triad {

inline double learning_rate(const TrainConfig& c, int64_t s) {
  if (s < c.warmup_steps) return c.lr * static_cast<double>(s + 1) / static_cast<double>(c.warmup_steps);
  const int64_t decay_steps = std::max<int64_t>(1, c.steps - c.warmup_steps);
  const double progress = std::min(1.0, static_cast<double>(s - c.warmup_steps) / static_cast<double>(decay_steps));
  const double lowest = c.lr * c.min_lr_fraction;
  return lowest + 0.5 * (c.lr - lowest) * (1 + std::cos(std::numbers::pi * progress));
}

}  // namespace triad
