#include "train/monitor/watchdog.h"

#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>

#include "engine/check.h"
#include "engine/process/dump_request.h"
#include "engine/process/process_end.h"
#include "engine/process/stack_dump.h"
#include "io/file.h"
#include "train/config/schedule.h"

namespace triad {

namespace {

constexpr int kLookMs = 200;
constexpr double kSampleS = 1, kPulseS = 10;

double anonymous_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("RssAnon:")) return std::strtod(line.c_str() + sizeof "RssAnon:" - 1, nullptr) / 1024;
  return 0;
}

// The newest heartbeat in a rank's file; nullopt if no line can be read.
std::optional<Json> last_heartbeat(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return {};
  constexpr std::streamoff kTail = 1 << 14;
  const std::streamoff size = file.tellg();
  file.seekg(std::max<std::streamoff>(0, size - kTail));
  std::string text(std::istreambuf_iterator<char>(file), {});
  const size_t end = text.rfind('\n');
  if (end == std::string::npos || end == 0) return {};
  const size_t before = text.rfind('\n', end - 1);
  const size_t begin = before == std::string::npos ? 0 : before + 1;
  const Json line = Json::parse(text.substr(begin, end - begin), nullptr, /*allow_exceptions=*/false);
  return line.is_object() ? std::optional(line) : std::nullopt;
}

bool in_step(Stage stage) { return stage != Stage::start && stage != Stage::evaluation && stage != Stage::checkpoint; }

}  // namespace

std::optional<double> StallRule::usual_s() const {
  constexpr size_t kFew = 3;
  if (step_times_.size() < kFew) return {};
  std::vector<double> sorted(step_times_.begin(), step_times_.end());
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<int64_t>(sorted.size() / 2), sorted.end());
  return sorted[sorted.size() / 2];
}

double StallRule::hang_s(const Progress::Position& place) const {
  const auto patience = static_cast<double>(config_.dist.timeout_s);
  return place.stage == Stage::checkpoint ? std::max(config_.log.hang_s, patience) : config_.log.hang_s;
}

size_t StallRule::stage_of(const Progress::Position& place) const {
  return stage_at(config_.train, first_step_ + place.steps).index;
}

StallRule::State StallRule::look(double now_s, const Progress::Position& place) {
  now_ = now_s;
  if (!last_) moved_ = step_began_ = now_s;
  const bool moved = !last_ || place.count != last_->count || place.device_mark != last_->device_mark;
  if (moved) moved_ = now_s;
  if (last_ && place.steps != last_->steps) {
    constexpr size_t kMostTimes = 64;
    const auto steps = static_cast<double>(place.steps - last_->steps);
    step_times_.push_back((now_s - step_began_) / steps);
    if (step_times_.size() > kMostTimes) step_times_.pop_front();
    if (stage_of(place) != stage_of(*last_)) step_times_.clear();  // this stage's steps may have other sizes
    step_began_ = now_s;
  }
  // Time in evaluations and checkpoints doesn't count as step time.
  if (!in_step(place.stage)) step_began_ = now_s;
  last_ = place;
  if (still_s() >= hang_s(place)) return State::hung;
  const std::optional<double> usual = usual_s();
  const bool slow = usual && step_s() >= std::max(config_.log.slow_s, config_.log.slow_factor * *usual);
  return slow ? State::slow : State::advancing;
}

Watchdog::Watchdog(const Progress& progress, const Comm& comm, Device device, const Config& config, std::string folder,
                   int64_t first_step, Callbacks callbacks)
    : progress_(progress),
      comm_(comm),
      config_(config),
      folder_(std::move(folder)),
      first_step_(first_step),
      callbacks_(std::move(callbacks)),
      nvml_(device.is_cuda() ? backend::pci_address(device) : ""),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      rule_(config, first_step) {
  prepare_stack_dumps();
  take_sample();
  wake_on_dump_request(wake_);
  keep_dump_requests();
  thread_ = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  wake_on_dump_request(-1);
  stop_ = true;
  eventfd_write(wake_, 1);
  thread_.join();
  close(wake_);
}

Watchdog::Sample Watchdog::sample() const {
  const std::lock_guard lock(mutex_);
  return sample_;
}

void Watchdog::take_sample() {
  const Sample fresh = {.gpu = nvml_.sample(), .host_mib = anonymous_mib()};
  const std::lock_guard lock(mutex_);
  sample_ = fresh;
}

void Watchdog::run() {
  using Clock = std::chrono::steady_clock;
  pthread_setname_np(pthread_self(), "watchdog");
  Clock::time_point last = Clock::now();
  double now_s = 0, next_sample_s = 0;
  while (!stop_) {
    pollfd wait = {wake_, POLLIN, 0};
    poll(&wait, 1, kLookMs);
    eventfd_t ignored;
    eventfd_read(wake_, &ignored);
    // One iteration adds at most 1 s to the watchdog's clock, so that a process that was suspended does not look hung.
    const Clock::time_point now = Clock::now();
    now_s += std::min(1.0, std::chrono::duration<double>(now - last).count());
    last = now;
    try {
      if (now_s >= next_sample_s) {
        take_sample();
        next_sample_s = now_s + kSampleS;
      }
      if (!stop_) look(now_s);
    } catch (const std::exception& e) { callbacks_.alert(fmt::format("watchdog: {}", e.what())); }
  }
}

void Watchdog::look(double now_s) {
  const Progress::Position place = progress_.position();
  judge(rule_.look(now_s, place), place);
  if (take_dump_request()) {
    const std::string file = dump("asked for by SIGUSR1; the run goes on", place);
    callbacks_.heartbeat(first_step_ + place.steps, "stackdump", {{"file", file}});
    if (callbacks_.after_dump) callbacks_.after_dump(first_step_ + place.steps);
  }
  // The first step loads kernels and records graphs, and may take minutes.
  if (next_word_s_ == 0) next_word_s_ = now_s + callbacks_.wait_s;
  if (callbacks_.waiting && place.steps == 0 && now_s >= next_word_s_) {
    next_word_s_ = now_s + callbacks_.wait_s;
    callbacks_.waiting(first_step_ + 1, now_s, where(place));
  }
  // In a long step, writes a heartbeat at intervals shorter than log.hang_s, from which other ranks read which
  // collectives this rank has begun. While the rank is hung none is written, so that "hung" stays its last heartbeat.
  const double pulse_s = std::min(kPulseS, config_.log.hang_s / 3);
  if (place.steps != pulse_step_) next_pulse_s_ = now_s + pulse_s, pulse_step_ = place.steps;
  if (now_s < next_pulse_s_ || state_ == StallRule::State::hung) return;
  next_pulse_s_ = now_s + pulse_s;
  callbacks_.heartbeat(first_step_ + place.steps, "progress",
                       {{"at", where(place)}, {"progress", place.count}, {"still_s", rule_.still_s()}});
}

void Watchdog::judge(StallRule::State state, const Progress::Position& place) {
  using State = StallRule::State;
  const State before = std::exchange(state_, state);
  if (before == state) return;
  const int64_t step = first_step_ + place.steps;
  const std::string at = where(place);
  if (state == State::advancing) {
    callbacks_.heartbeat(step, "recovered", {{"at", at}});
    callbacks_.alert(fmt::format("rank {}: advancing again after it was {}: {}", comm_.rank(),
                                 before == State::slow ? "SLOW" : "HUNG", at));
  } else if (state == State::slow) {
    const std::string text =
        fmt::format("rank {}: SLOW, still advancing: step {} has taken {:.1f} s, {:.3f} s are usual; {}", comm_.rank(),
                    step + 1, rule_.step_s(), rule_.usual_s().value_or(0), at);
    callbacks_.heartbeat(step, "slow",
                         {{"at", at}, {"step_s", rule_.step_s()}, {"usual_s", rule_.usual_s().value_or(0)}});
    callbacks_.alert(text);
    if (config_.log.on_anomaly == OnAnomaly::stop) stop_for("slow", text);
  } else {
    constexpr double kReportS = 10;
    if (config_.log.on_anomaly == OnAnomaly::stop) end_process_within(kReportS);
    std::string text = fmt::format("rank {}: HUNG: no progress for {:.1f} s in step {}; {}", comm_.rank(),
                                   rule_.still_s(), step + 1, at);
    // Runs an action and ignores its failure: the disk or the GPU driver may cause the hang, and the other actions must
    // still run.
    const auto attempt = [&](auto&& work) {
      try {
        work();
      } catch (const std::exception& e) { text += fmt::format("; {}", e.what()); }
    };
    CommGuard::Last last{};
    attempt([&] {
      last = comm_.last_collective();
      if (last.under_way) text += fmt::format("; it waits in {}{}", last.what, others(last.number));
    });
    // The file .anomaly_type is written before the stack dump, which may take long.
    if (config_.log.on_anomaly == OnAnomaly::stop) attempt([&] { stop_for("hung", text); });
    std::string file;
    attempt([&] { file = dump(text, place); });
    callbacks_.alert(text + (file.empty() ? "" : "; stacks in " + file));
    attempt([&] {
      callbacks_.heartbeat(
          step, "hung",
          {{"at", at}, {"still_s", rule_.still_s()}, {"waits_in_collective", last.under_way}, {"file", file}});
    });
    if (config_.log.on_anomaly != OnAnomaly::stop) return;
    _exit(1);  // no cleanup, because the main thread is hung
  }
}

std::string Watchdog::where(const Progress::Position& place) const {
  std::string text = fmt::format("in {}, {} {}", place.stage_text(), place.in_op ? "within" : "after",
                                 place.op == nullptr ? "no op yet" : place.op);
  if (const std::string device = place.device_text(); !device.empty())
    text += fmt::format("; the GPU is in {}", device);
  return text;
}

// Names the ranks for which this rank waits: those whose heartbeats report fewer collectives than own_collectives.
std::string Watchdog::others(int64_t own_collectives) const {
  std::string text;
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  for (int rank = 0; rank < comm_.world(); ++rank) {
    if (rank == comm_.rank()) continue;
    const std::optional<Json> line = last_heartbeat(fmt::format("{}/heartbeat_rank{}.jsonl", folder_, rank));
    if (!line || !line->contains("collectives") || !line->contains("ts")) continue;
    const int64_t begun = line->value("collectives", int64_t{0});
    if (begun < own_collectives)
      text += fmt::format("; rank {} has begun {} collectives (step {}, \"{}\", {:.1f} s ago), this rank {}", rank,
                          begun, line->value("step", int64_t{0}), line->value("msg", std::string("?")),
                          now - line->value("ts", now), own_collectives);
  }
  return text;
}

std::string Watchdog::dump(const std::string& why, const Progress::Position& place) const {
  const std::time_t now = std::time(nullptr);
  const std::string path = fmt::format("{}/stackdump_rank{}_{}.txt", folder_, comm_.rank(), now);
  const std::string stacks = dump_stacks();
  const CommGuard::Last last = comm_.last_collective();
  std::string text = fmt::format("rank {} of {}, pid {}, unix time {}\nwhy: {}\n", comm_.rank(), comm_.world(),
                                 getpid(), static_cast<int64_t>(now), why);
  fmt::format_to(std::back_inserter(text), "steps done: {}; no progress for {:.1f} s\n", first_step_ + place.steps,
                 rule_.still_s());
  fmt::format_to(std::back_inserter(text), "stage: {}\nlast op: {}{}\n", place.stage_text(),
                 place.op == nullptr ? "none" : place.op, place.in_op ? " (not ended)" : "");
  if (const std::string device = place.device_text(); !device.empty())
    fmt::format_to(std::back_inserter(text), "the GPU has reached: {}\n", device);
  fmt::format_to(std::back_inserter(text), "last collective: {}{}\n\n", last.what,
                 last.under_way ? " (under way)" : "");
  AppendFile(path).append(text + stacks);
  return path;
}

void Watchdog::stop_for(const char* type, const std::string& text) {
  write_anomaly_type(folder_, type, text);
  wants_stop_ = true;
}

void write_anomaly_type(const std::string& folder, const std::string& type, const std::string& text) {
  write_file_atomically(folder + "/.anomaly_type", type + "\n" + text + "\n");
}

}  // namespace triad
