#include "train/monitor/pace.h"

#include <algorithm>
#include <vector>

namespace triad {

namespace {
constexpr size_t kFew = 5;      // minimum number of steps in a median, if the run has had so many
constexpr size_t kMost = 1000;  // maximum number of steps in a median, because each step sorts them
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
