#include "train/monitor/anomaly.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "engine/process/counted.h"

namespace triad {

namespace {

// The throughput rule compares spans of at least 20 steps and 10 s, so a single slow step doesn't trigger it. The usual
// rate is the median over at least 5 spans.
constexpr int64_t kRateSteps = 20;
constexpr double kRateSeconds = 10;
constexpr size_t kUsualSpans = 5, kMostSpans = 200;
// The rule for growing memory compares the minima in successive 100-step spans: five rises in a row are an anomaly.
constexpr int64_t kCreepSpan = 100;
constexpr size_t kCreepSpans = 6;
// A layer's gates count as collapsed or dead if they exceed a bound in three consecutive steps. The entropy is in nats.
constexpr double kLeastEntropy = 0.5, kMostMaxMean = 0.9, kMostCollapse = 0.5;
// Bound on the fraction of rows with all gates 0. No healthy run has such rows: a sigmoid gate is 0 in fp32 only below
// a logit of -88. The 1% bound tolerates unusual data.
constexpr double kMostDead = 0.01;
constexpr int kGatesInRow = 3;

}  // namespace

std::vector<Anomaly> AnomalyRules::step(const StepHealth& s) {
  std::vector<Anomaly> found;
  const auto judge = [&](const char* type, const std::optional<std::string>& wrong, bool single_rank = false) {
    bool& on = is_on_[type];
    if (wrong && !on) found.push_back({type, fmt::format("step {}: {}", s.step, *wrong), single_rank});
    on = wrong.has_value();
  };
  judge("throughput_flat", flat_throughput(s.tokens, s.seconds), /*single_rank=*/true);
  judge("loss_plateau", plateau(s.loss));
  judge("host_memory_creep", creep(host_, s.host_mib), /*single_rank=*/true);
  judge("device_memory_creep", creep(device_, s.device_mib), /*single_rank=*/true);
  if (!s.gates.empty()) {
    judge("gate_collapse", collapsed(s.gates));
    judge("gate_dead", dead(s.gates));
  }
  judge("zero_gradients", zero_gradients(s));
  return found;
}

void AnomalyRules::stage() {
  rate_steps_ = 0;
  rate_tokens_ = rate_seconds_ = 0;
  span_rates_.clear();
  losses_.clear();
  plateau_text_.reset();
  throughput_text_.reset();
}

// Describes the anomaly if the last full span's rate (tokens/s) is below log.throughput_drop times the earlier spans'
// median.
std::optional<std::string> AnomalyRules::flat_throughput(double tokens, double seconds) {
  rate_tokens_ += tokens, rate_seconds_ += seconds;
  if (++rate_steps_ < kRateSteps || rate_seconds_ < kRateSeconds) return throughput_text_;
  const double now = rate_tokens_ / rate_seconds_;
  const int64_t steps = std::exchange(rate_steps_, 0);
  rate_tokens_ = rate_seconds_ = 0;
  throughput_text_.reset();
  if (span_rates_.size() >= kUsualSpans) {
    std::vector<double> sorted = span_rates_;
    std::nth_element(sorted.begin(), sorted.begin() + static_cast<int64_t>(sorted.size() / 2), sorted.end());
    const double usual = sorted[sorted.size() / 2];
    if (now < config_.log.throughput_drop * usual)
      throughput_text_ = fmt::format(
          "throughput fell flat: {:.0f} tokens/s over the last {} steps, {:.0f} were usual "
          "(log.throughput_drop = {})",
          now, steps, usual, config_.log.throughput_drop);
  }
  // A slow span isn't added to those that define the usual rate.
  if (throughput_text_) return throughput_text_;
  span_rates_.push_back(now);
  if (span_rates_.size() > kMostSpans) span_rates_.erase(span_rates_.begin());
  return throughput_text_;
}

// Describes the anomaly if the mean loss over the last log.plateau_steps steps isn't significantly (2 standard errors)
// below the mean over as many steps before.
std::optional<std::string> AnomalyRules::plateau(double loss) {
  const auto span = static_cast<size_t>(config_.log.plateau_steps);
  if (span == 0 || !std::isfinite(loss)) return plateau_text_;
  losses_.push_back(loss);
  if (losses_.size() > 2 * span) losses_.pop_front();
  if (losses_.size() < 2 * span || until_plateau_look_-- > 0) return plateau_text_;
  // The sums cost O(span), so they are computed only every span / 10 steps.
  until_plateau_look_ = static_cast<int64_t>(span / 10);
  const auto middle = losses_.begin() + static_cast<int64_t>(span);
  const double n = static_cast<double>(span), before = std::accumulate(losses_.begin(), middle, 0.0) / n,
               after = std::accumulate(middle, losses_.end(), 0.0) / n;
  double squares = 0;
  for (auto it = losses_.begin(); it != losses_.end(); ++it) {
    const double d = *it - (it < middle ? before : after);
    squares += d * d;
  }
  constexpr double kErrors = 2;  // the difference must exceed this many standard errors
  const double error = std::sqrt(squares / n / n);
  plateau_text_.reset();
  if (before - after <= kErrors * error)
    plateau_text_ = fmt::format("the loss is on a plateau: {:.4f} on average over the last {} steps, {:.4f} before",
                                after, span, before);
  return plateau_text_;
}

std::optional<std::string> AnomalyRules::creep(Creep& c, const std::optional<double>& mib) const {
  if (!mib) return {};
  c.least_now = c.steps == 0 ? *mib : std::min(c.least_now, *mib);
  if (++c.steps == kCreepSpan) {
    c.least.push_back(c.least_now);
    if (c.least.size() > kCreepSpans) c.least.pop_front();
    c.steps = 0;
  }
  if (c.least.size() < kCreepSpans) return {};
  for (size_t i = 1; i < c.least.size(); ++i)
    if (c.least[i] <= c.least[i - 1]) return {};
  const double growth = c.least.back() - c.least.front();
  if (growth < config_.log.creep_mib) return {};
  return fmt::format(
      "memory creeps: {:.0f} MiB more in {} steps, each {} of them more than those before "
      "(log.creep_mib = {}): {:.0f} MiB now",
      growth, kCreepSpan * (kCreepSpans - 1), kCreepSpan, config_.log.creep_mib, c.least.back());
}

std::optional<std::string> AnomalyRules::collapsed(std::span<const GateHealth> gates) {
  // no rule for gates applies: the config forces one branch
  if (config_.model.nsa.gate.force != Branch::none) return {};
  std::vector<std::string> layers;
  for (const GateHealth& g : gates) {
    const bool bad = g.entropy_mean < kLeastEntropy || g.max_mean > kMostMaxMean || g.collapse_frac > kMostCollapse;
    int& in_row = collapsed_in_row_[g.layer];
    in_row = bad ? in_row + 1 : 0;
    if (in_row >= kGatesInRow)
      layers.push_back(fmt::format("layer {} (entropy {:.3f}, largest gate {:.3f}, collapsed {:.0f}%)", g.layer,
                                   g.entropy_mean, g.max_mean, 100 * g.collapse_frac));
  }
  if (layers.empty()) return {};
  return fmt::format("gates have collapsed onto one branch: {}", fmt::join(layers, ", "));
}

std::optional<std::string> AnomalyRules::dead(std::span<const GateHealth> gates) {
  std::vector<std::string> layers;
  for (const GateHealth& g : gates) {
    int& in_row = dead_in_row_[g.layer];
    in_row = g.dead_frac > kMostDead ? in_row + 1 : 0;
    if (in_row >= kGatesInRow)
      layers.push_back(fmt::format("layer {} ({:.0f}% of its rows)", g.layer, 100 * g.dead_frac));
  }
  if (layers.empty()) return {};
  return fmt::format("gates are dead, all three branches off: {}", fmt::join(layers, ", "));
}

std::optional<std::string> AnomalyRules::zero_gradients(const StepHealth& s) const {
  if (s.grad_norm == 0) return "the whole gradient is zero";
  const size_t count = s.zero_grads.size();
  if (count == 0) return {};
  constexpr size_t kMostNames = 8;
  return fmt::format("{} {} zero: {}{}", counted(count, "gradient"), count == 1 ? "is" : "are",
                     fmt::join(s.zero_grads.first(std::min(count, kMostNames)), ", "),
                     count > kMostNames ? ", ..." : "");
}

}  // namespace triad
