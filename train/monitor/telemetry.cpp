#include "train/monitor/telemetry.h"

#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <limits>
#include <numeric>
#include <utility>

#include "engine/backend.h"
#include "engine/process/progress_line.h"
#include "kernels/ops/matmul.h"
#include "model/flops.h"
#include "train/load_config.h"
#include "train/monitor/watchdog.h"

namespace triad {

namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// Version of the lines in heartbeat_rank{R}.jsonl; increase it when a field changes its meaning or is removed.
constexpr int kHeartbeatSchema = 1;

double seconds(std::chrono::steady_clock::duration d) { return std::chrono::duration<double>(d).count(); }

Json library_versions() {
  return {{"matrix products", matmul_libraries()},
          {"fmt", FMT_VERSION},
          {"nlohmann_json", fmt::format("{}.{}.{}", NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                                        NLOHMANN_JSON_VERSION_PATCH)},
          {"zlib", zlibVersion()}};
}

std::string iso_time(std::time_t now) {
  char text[32];
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

}  // namespace

Json environment_report(Device device, const Comm& comm, const std::string& build) {
  const DeviceInfo info = backend::info(device);
  utsname machine{};
  uname(&machine);
  Json report = {{"build", build},
                 {"host", machine.nodename},
                 {"libraries", library_versions()},
                 {"kernel", std::string(machine.sysname) + " " + machine.release},
                 {"cpu", backend::info(Device::cpu()).name},
                 {"cpu_threads", sysconf(_SC_NPROCESSORS_ONLN)},
                 {"device", device.str()},
                 {"device_name", info.name},
                 {"device_memory_mib", static_cast<double>(info.memory_bytes) / kMiB}};
  if (device.is_cuda()) {
    report["compute_capability"] = info.compute_capability;
    report["num_sms"] = info.num_sms;
    report["cuda_driver"] = info.driver;
    report["cuda_runtime"] = info.runtime;
  }
  report["world"] = comm.world();
  report["comm"] = comm.name();
  for (const Peer& p : comm.peers())
    report["ranks"].push_back(
        {{"rank", p.rank}, {"host", p.host}, {"local_rank", p.local_rank}, {"device", p.device}, {"pci", p.pci}});
  report["environment"] = shown_environment();
  return report;
}

Telemetry::Telemetry(const Config& config, const RunFolder& folder, Device device, const Comm& comm, const Arena& arena,
                     Resume resume, bool verbose)
    : config_(config),
      device_(device),
      comm_(comm),
      arena_(arena),
      terminal_(comm.world() == 1 &&
                is_terminal(STDOUT_FILENO)),  // not with mpirun, which gives each rank a pseudo-terminal
      verbose_(verbose),
      last_heartbeat_(Clock::now()),
      tokens_(resume.tokens) {
  log_ = std::make_unique<AppendFile>(folder.file(fmt::format("ranks/rank_{}.log", comm.rank())));
  if (config.log.tensorboard && comm.first())
    board_ = std::make_unique<TensorBoardWriter>(folder.file("tb"), arena, config, resume.step, resume.tokens);
  else if (comm.first() && resume.step >= 0 && std::filesystem::exists(folder.file("tb")))
    TensorBoardWriter::rewind(folder.file("tb"), resume.step, resume.tokens);  // though this run writes no events
  if (device.is_cuda()) peak_flops_ = peak_bf16_flops(backend::info(device).name);
  if (config.log.csv && comm.first()) {
    training_ = std::make_unique<CsvFile>(folder.file("training.csv"),
                                          "step,loss,lr,tokens_per_s,grad_norm,step_ms,mfu", resume.step);
    validation_ = std::make_unique<CsvFile>(folder.file("val.csv"), "step,val_loss,ppl", resume.step);
    fallbacks_ = std::make_unique<CsvFile>(folder.file("fallback_counters.csv"),
                                           "step,layer,branch,kernel,reason,count", resume.step);
  }
  if (config.log.heartbeat_every != 0)
    heartbeats_ = std::make_unique<JsonLines>(folder.file(fmt::format("heartbeat_rank{}.jsonl", comm.rank())));
}

void Telemetry::banner(RunSummary run) {
  run.planned_mib = peak_mib();
  for (const std::string& line : banner_lines(config_, device_, comm_, run)) message(line);
  for (const std::string& line : banner_details(config_, comm_, run.environment)) detail(line);
}

Telemetry::~Telemetry() { end_progress_line(); }

void Telemetry::print(const std::string& text) {
  if (!comm_.first()) return;
  const std::lock_guard lock(terminal_mutex_);
  end_progress_line();
  std::fputs((text + "\n").c_str(), stdout);
  std::fflush(stdout);
}

void Telemetry::message(const std::string& text) {
  log_->append(text + "\n");
  print(text);
}

void Telemetry::detail(const std::string& text) {
  log_->append(text + "\n");
  if (verbose_) print(text);
}

void Telemetry::alert(const std::string& text) {
  std::string line = "triad: " + text;
  constexpr int kRows = 3;  // maximum height on a terminal
  if (is_terminal(STDERR_FILENO))
    line =
        cut_line(line, kRows * terminal_columns(STDERR_FILENO), fmt::format("... (ranks/rank_{}.log)", comm_.rank()));
  {
    // Waits at most 1 s: the mutex's holder may hang in a write to a blocked terminal, and this may be the alert about
    // it.
    const std::unique_lock lock(terminal_mutex_, std::chrono::seconds(1));
    end_progress_line();
    std::fputs((line + "\n").c_str(), stderr);
  }
  if (!log_) return;
  try {
    log_->append(text + "\n");
  } catch (const std::exception& e) {  // a full disk must not end the run here
    std::fputs(fmt::format("triad: {}\n", e.what()).c_str(), stderr);
  }
}

void Telemetry::step(const Step& s) {
  if (heartbeats_) fetch_ms_.insert(fetch_ms_.end(), s.fetch_ms.begin(), s.fetch_ms.end());
  ++steps_, ++steps_since_row_;
  tokens_ += s.tokens;
  comm_ms_since_row_ += s.comm_ms;
  step_times_.add(s.step_ms);
  if (board_) board_->step(s.loss, s.grad_norm);
  const double ms = step_times_.median_ms();
  tokens_per_s_ = ms > 0 ? static_cast<double>(s.tokens) / ms * 1e3 : 0;
  const bool is_row = s.step % config_.log.every == 0 || s.step == config_.train.steps;
  if (is_row) row(s);
  progress(s, is_row);
  if (is_row) {
    step_times_.row();
    steps_since_row_ = 0;
    comm_ms_since_row_ = 0;
  }
  if (heartbeats_ && heartbeat_due(config_.log.heartbeat_every, s.step, seconds(Clock::now() - last_heartbeat_)))
    step_heartbeat(s);
}

void Telemetry::row(const Step& s) {
  const double ms = step_times_.median_ms();
  std::string mfu;
  double of_peak = 0;
  if (peak_flops_ > 0 && ms > 0) {
    const TrainConfig& t = config_.train;
    const double flops =
        training_flops(config_.model, t.micro_batch_size * t.accumulate_grad_batches, t.seq_len, config_.recompute());
    of_peak = flops / ms * 1e3 / peak_flops_;
    mfu = fmt::format("{:.4f}", of_peak);
  }
  if (training_)
    training_->row(fmt::format("{},{:.6f},{:.6e},{:.1f},{:.6f},{:.3f},{}", s.step, s.loss, s.lr, tokens_per_s_,
                               s.grad_norm, ms, mfu));
  if (board_)
    board_->row(s.step, tokens_,
                {s.loss, s.lr, tokens_per_s_, s.grad_norm, ms, of_peak,
                 comm_ms_since_row_ / static_cast<double>(steps_since_row_)});
}

// Time left: the mean time per step so far, evaluations and checkpoints included. The first step counts only while it
// is the only one, because it also loads kernels and records graphs.
double Telemetry::eta_s(int64_t step) const {
  const auto left = static_cast<double>(config_.train.steps - step);
  if (steps_ < 2) return step_times_.median_ms() / 1e3 * left;
  return seconds(Clock::now() - first_step_) / static_cast<double>(steps_ - 1) * left;
}

// On a terminal, redraws the progress line as steps complete. Elsewhere, prints one for each row and one for the first
// step, which gives an early estimate of the run's duration.
void Telemetry::progress(const Step& s, bool is_row) {
  constexpr double kRedrawS = 0.5;
  const Clock::time_point now = Clock::now();
  if (steps_ == 1) first_step_ = now;
  const bool last = s.step == config_.train.steps;
  const bool redraw = terminal_ && (last || seconds(now - line_shown_) >= kRedrawS);
  if (!is_row && !redraw && steps_ > 1) return;
  std::vector<LinePiece> pieces = {{fmt::format("step {}/{}", s.step, config_.train.steps), 0},
                                   {fmt::format("loss {:.4f}", s.loss), 0},
                                   {fmt::format("lr {:.2e}", s.lr), 3},
                                   {fmt::format("norm {:.3f}", s.grad_norm), 2},
                                   {fmt::format("{:.0f} tok/s", tokens_per_s_), 0},
                                   {fmt::format("{:.1f} ms", step_times_.median_ms()), 4},
                                   {fmt::format("eta {}", duration_text(eta_s(s.step))), 1}};
  if (comm_.world() > 1)
    pieces.push_back({fmt::format("comm {:.2f} ms", comm_ms_since_row_ / static_cast<double>(steps_since_row_)), 5});
  const std::string line = fit_line(pieces, std::numeric_limits<int>::max());
  if (is_row || steps_ == 1) log_->append(line + "\n");
  if (!comm_.first()) return;
  if (!terminal_) return print(line);
  const std::lock_guard lock(terminal_mutex_);
  show_progress_line(STDOUT_FILENO, fit_line(pieces, terminal_columns(STDOUT_FILENO) - 1));
  line_shown_ = now;
}

void Telemetry::step_heartbeat(const Step& s) {
  last_heartbeat_ = Clock::now();
  std::sort(fetch_ms_.begin(), fetch_ms_.end());
  const auto fetch = [&](double share) {
    return fetch_ms_.empty() ? 0 : fetch_ms_[static_cast<size_t>(share * static_cast<double>(fetch_ms_.size() - 1))];
  };
  Json line = {{"loss", s.loss},
               {"tokens_per_s", tokens_per_s_},
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
  heartbeat(s.step, "step_end", line);
}

void Telemetry::evaluation(int64_t step, double loss) {
  if (board_) board_->evaluation(step, tokens_, loss);
  if (validation_) validation_->row(fmt::format("{},{:.6f},{:.4f}", step, loss, std::exp(loss)));
  message(fmt::format("step {}  validation loss {:.4f}  perplexity {:.3f}", step, loss, std::exp(loss)));
}

void Telemetry::fallbacks(int64_t step, const Routes& routes) {
  if (!fallbacks_) return;
  fallbacks_written_.resize(routes.counts().size(), 0);
  for (size_t i = 0; i < fallbacks_written_.size(); ++i) {
    const Routes::Count& c = routes.counts()[i];
    const int64_t fresh = c.calls - std::exchange(fallbacks_written_[i], c.calls);
    if (!c.is_fallback() || fresh == 0) continue;
    std::string reason = c.reason;  // must not split the CSV column
    std::replace(reason.begin(), reason.end(), ',', ';');
    fallbacks_->row(
        fmt::format("{},{},{},{},{},{}", step, c.layer, branch_of(c.op), c.op + " " + c.kernel, reason, fresh));
  }
}

void Telemetry::routes(const Routes& routes) {
  if (route_steps_logged_++ >= config_.log.route_steps) return;
  struct Line {
    std::string text;
    int64_t first, last;  // layers
  };
  std::vector<Line> lines;
  for (; routes_logged_ < routes.counts().size(); ++routes_logged_) {
    const Routes::Count& c = routes.counts()[routes_logged_];
    if (c.op == "matmul" && config_.runtime.kernels.matmul == KernelChoice::automatic) continue;  // too many shapes
    std::string text = fmt::format("{}: {} {}", c.op, c.kernel, c.shapes());
    if (c.is_fallback()) text += fmt::format(", a fallback: {}", c.reason);
    const auto same = std::find_if(lines.begin(), lines.end(), [&](const Line& t) { return t.text == text; });
    if (same == lines.end())
      lines.push_back({std::move(text), c.layer, c.layer});
    else
      same->first = std::min(same->first, c.layer), same->last = std::max(same->last, c.layer);
  }
  for (const Line& t : lines)
    detail(fmt::format("kernel of {}{}", t.text,
                       t.last < 0 ? "" : fmt::format(" (layers {} to {})", std::max<int64_t>(0, t.first), t.last)));
}

void Telemetry::heartbeat(int64_t step, const std::string& msg, const Json& more) {
  if (!heartbeats_) return;
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
  heartbeats_->append(line);
}

double Telemetry::peak_mib() const {
  return static_cast<double>(arena_.capacity_bytes() + (device_.is_cuda() ? kMatmulWorkspaceBytes : 0)) / kMiB;
}

}  // namespace triad
