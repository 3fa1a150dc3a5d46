#include "train/monitor/heartbeats.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <numeric>

#include "engine/units.h"
#include "train/monitor/pace.h"
#include "train/monitor/watchdog.h"

namespace triad {

namespace {

// Heartbeat format version; increase it when a field changes its meaning or is removed.
constexpr int kHeartbeatSchema = 1;

std::string iso_time(std::time_t now) {
  char text[32];
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

}  // namespace

Heartbeats::Heartbeats(const Config& config, const RunFolder& folder, Device device, const Comm& comm,
                       const Arena& arena)
    : config_(config), device_(device), comm_(comm), arena_(arena) {
  if (config.log.heartbeat_every != 0) file_.emplace(folder.file(fmt::format("heartbeat_rank{}.jsonl", comm.rank())));
}

void Heartbeats::write(int64_t step, const std::string& msg, const Json& more) {
  if (!file_) return;
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  Json line = {{"schema", kHeartbeatSchema},
               {"ts", now},
               {"iso", iso_time(static_cast<std::time_t>(now))},
               {"pid", getpid()},
               {"rank", comm_.rank()},
               {"step", step},
               {"msg", msg}};
  if (device_.is_cuda()) {
    line["gpu_mem_alloc_mib"] = static_cast<double>(arena_.used_bytes()) / kMiB;
    line["gpu_mem_reserved_mib"] = static_cast<double>(arena_.capacity_bytes()) / kMiB;
  }
  const Watchdog* const watchdog = watchdog_;
  const Watchdog::Sample sample = watchdog == nullptr ? Watchdog::Sample{} : watchdog->sample();
  const auto known = [](const std::optional<double>& value) { return value ? Json(*value) : Json(); };
  line["gpu_used_mib"] = known(sample.gpu.used_mib);
  line["gpu_util_pct"] = known(sample.gpu.util_pct);
  line["power_w"] = known(sample.gpu.power_w);
  if (watchdog != nullptr) line["host_mib"] = sample.host_mib;
  if (comm_.world() > 1) line["collectives"] = comm_.collectives();
  for (const auto& [key, value] : more.items()) line[key] = value;
  file_->append(line);
}

void Heartbeats::step(const StepRecord& s) {
  if (!file_) return;
  fetch_ms_.insert(fetch_ms_.end(), s.fetch_ms.begin(), s.fetch_ms.end());
  const Clock::time_point now = Clock::now();
  if (!heartbeat_due(config_.log.heartbeat_every, s.step, std::chrono::duration<double>(now - last_step_).count()))
    return;
  last_step_ = now;
  std::sort(fetch_ms_.begin(), fetch_ms_.end());
  const auto fetch = [&](double share) {
    return fetch_ms_.empty() ? 0 : fetch_ms_[static_cast<size_t>(share * static_cast<double>(fetch_ms_.size() - 1))];
  };
  Json line = {{"loss", s.loss},
               {"lr", s.lr},
               {"tokens_per_s", s.tokens_per_s},
               {"grad_norm", s.grad_norm},
               {"step_ms", s.step_ms},
               {"compute_ms", s.compute_ms},
               {"update_ms", s.update_ms},
               {"fetch_ms", std::accumulate(s.fetch_ms.begin(), s.fetch_ms.end(), 0.0)},
               {"fetch_p50_ms", fetch(0.5)},
               {"fetch_p95_ms", fetch(0.95)}};
  fetch_ms_.clear();
  if (comm_.world() > 1) line["comm_wait_ms"] = s.comm_ms;
  if (s.routes != nullptr) {
    for (const char* branch : {"cmp", "sel", "win", "select", "matmul"})
      line[fmt::format("fb_{}", branch)] = s.routes->fallbacks(branch);
    line["fb_total"] = s.routes->fallbacks();
  }
  for (const auto& [key, value] : s.more.items()) line[key] = value;
  write(s.step, "step_end", line);
}

}  // namespace triad
