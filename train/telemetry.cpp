#include "train/telemetry.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <numeric>
#include <set>
#include <utility>

#include "engine/backend.h"
#include "kernels/matmul.h"
#include "model/flops.h"
#include "train/load_config.h"
#include "train/watchdog.h"

namespace triad {

namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// Of the lines in heartbeat_rank{R}.jsonl; a field that changes its meaning or goes makes it greater.
constexpr int kHeartbeatSchema = 1;

double seconds(std::chrono::steady_clock::duration d) { return std::chrono::duration<double>(d).count(); }

std::string duration_text(double s) {
  const int64_t t = static_cast<int64_t>(std::max(0.0, s));
  if (t >= 3600) return fmt::format("{}h{:02}m", t / 3600, t / 60 % 60);
  return t >= 60 ? fmt::format("{}m{:02}s", t / 60, t % 60) : fmt::format("{}s", t);
}

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
                     int64_t resume_step)
    : config_(config),
      device_(device),
      comm_(comm),
      arena_(arena),
      terminal_(comm.world() == 1 && isatty(STDOUT_FILENO) != 0),  // mpirun's own end is one, wherever it then writes
      last_row_(Clock::now()) {
  log_ = std::make_unique<AppendFile>(folder.file(fmt::format("ranks/rank_{}.log", comm.rank())));
  if (config.log.tensorboard && comm.first())
    board_ = std::make_unique<Board>(folder.file("tb"), arena, resume_step);
  else if (comm.first() && resume_step >= 0 && std::filesystem::exists(folder.file("tb")))
    EventFile(folder.file("tb"), resume_step);  // later steps of the run before no longer count, though none come
  if (device.is_cuda()) peak_flops_ = peak_bf16_flops(backend::info(device).name);
  if (config.log.csv && comm.first()) {
    const bool append = resume_step >= 0;
    training_ = std::make_unique<CsvFile>(folder.file("training.csv"),
                                          "step,loss,lr,tokens_per_s,grad_norm,step_ms,mfu", append ? resume_step : -1);
    validation_ = std::make_unique<CsvFile>(folder.file("val.csv"), "step,val_loss,ppl", append ? resume_step : -1);
    fallbacks_ = std::make_unique<CsvFile>(folder.file("fallback_counters.csv"),
                                           "step,layer,branch,kernel,reason,count", append ? resume_step : -1);
  }
  if (config.log.heartbeat_every > 0)
    heartbeats_ = std::make_unique<JsonLines>(folder.file(fmt::format("heartbeat_rank{}.jsonl", comm.rank())));
}

void Telemetry::banner(int64_t parameters, const std::vector<std::string>& environment, const std::string& data) {
  message(fmt::format("triad: {} parameters; {} ({}), {:.0f} MiB planned", parameters, device_.str(),
                      backend::info(device_).name, peak_mib()));
  message(fmt::format("data: {}", data));
  message(fmt::format("{} tokens an optimizer step", config_.train.tokens_per_step() * comm_.world()));
  std::set<std::string> hosts;
  for (const Peer& p : comm_.peers()) hosts.insert(p.host);
  if (comm_.world() > 1)
    message(fmt::format("{} ranks on {} host{}, {}", comm_.world(), hosts.size(), hosts.size() > 1 ? "s" : "",
                        comm_.name()));
  for (const Peer& p : comm_.peers())
    message(fmt::format("rank {}  host {}  local rank {}  pid {}  {} {}", p.rank, p.host, p.local_rank, p.pid, p.device,
                        p.pci));
  constexpr int kFewCores = 4;  // the step, the loader, the guard, NCCL's own threads
  cpu_set_t cores;
  if (comm_.world() > 1 && device_.is_cuda() && sched_getaffinity(0, sizeof cores, &cores) == 0 &&
      CPU_COUNT(&cores) < kFewCores)
    message(fmt::format("this process may use {} CPU cores only, which is few beside a GPU: mpirun --bind-to none",
                        CPU_COUNT(&cores)));
  if (config_.runtime.cuda_graph && !device_.is_cuda()) message("runtime.cuda_graph has no effect on the CPU");
  const Json resolved = config_to_json(config_);
  for (const auto& [group, fields] : resolved.items()) message(fmt::format("{:<8}{}", group, dump_json(fields, -1)));
  for (const std::string& line : environment) message("environment: " + line);
  last_row_ = Clock::now();
}

Telemetry::~Telemetry() { end_line(); }

void Telemetry::end_line() {
  if (line_open_) std::fputs("\n", stdout);
  line_open_ = false;
}

void Telemetry::message(const std::string& text) {
  log_->append(text + "\n");
  if (!comm_.first()) return;
  end_line();
  std::fputs((text + "\n").c_str(), stdout);
  std::fflush(stdout);
}

void Telemetry::alert(const std::string& text) {
  std::fputs(("triad: " + text + "\n").c_str(), stderr);
  if (!log_) return;
  try {
    log_->append(text + "\n");
  } catch (const std::exception& e) {  // a disk that is full ends nothing here: its own writers do
    std::fputs(fmt::format("triad: {}\n", e.what()).c_str(), stderr);
  }
}

void Telemetry::step(const Step& s) {
  tokens_since_row_ += s.tokens;
  if (heartbeats_) fetch_ms_.insert(fetch_ms_.end(), s.fetch_ms.begin(), s.fetch_ms.end());
  ++steps_since_row_;
  comm_ms_since_row_ += s.comm_ms;
  if (board_) board_->step(s.loss, s.grad_norm);
  const bool row = s.step % config_.log.every == 0 || s.step == config_.train.steps;
  if (row) {
    const double elapsed = seconds(Clock::now() - last_row_);
    tokens_per_s_ = static_cast<double>(tokens_since_row_) / elapsed;
    const double step_s = elapsed / static_cast<double>(steps_since_row_);
    std::string mfu;
    double of_peak = 0;
    if (peak_flops_ > 0) {
      const TrainConfig& t = config_.train;
      const double flops =
          training_flops(config_.model, t.micro_batch_size * t.accumulate_grad_batches, t.seq_len, config_.recompute());
      of_peak = flops / step_s / peak_flops_;
      mfu = fmt::format("{:.4f}", of_peak);
    }
    if (training_)
      training_->row(fmt::format("{},{:.6f},{:.6e},{:.1f},{:.6f},{:.3f},{}", s.step, s.loss, s.lr, tokens_per_s_,
                                 s.grad_norm, step_s * 1e3, mfu));
    if (board_)
      board_->row(s.step, {s.loss, s.lr, tokens_per_s_, s.grad_norm, step_s * 1e3, of_peak,
                           comm_ms_since_row_ / static_cast<double>(steps_since_row_)});
    const double eta = step_s * static_cast<double>(config_.train.steps - s.step);
    std::string line =
        fmt::format("step {}/{}  loss {:.4f}  lr {:.2e}  norm {:.3f}  {:.0f} tok/s  {:.1f} ms  eta {}", s.step,
                    config_.train.steps, s.loss, s.lr, s.grad_norm, tokens_per_s_, step_s * 1e3, duration_text(eta));
    if (comm_.world() > 1)
      line += fmt::format("  comm {:.2f} ms", comm_ms_since_row_ / static_cast<double>(steps_since_row_));
    if (terminal_) {
      log_->append(line + "\n");
      std::fputs(("\r\x1b[2K" + line).c_str(), stdout);
      std::fflush(stdout);
      line_open_ = true;
    } else {
      message(line);
    }
    last_row_ = Clock::now();
    tokens_since_row_ = steps_since_row_ = 0;
    comm_ms_since_row_ = 0;
  }
  if (!heartbeats_ || s.step % config_.log.heartbeat_every != 0) return;
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
  if (board_) board_->evaluation(step, loss);
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
    std::string reason = c.reason;  // a column of its own
    std::replace(reason.begin(), reason.end(), ',', ';');
    fallbacks_->row(
        fmt::format("{},{},{},{},{},{}", step, c.layer, branch_of(c.op), c.op + " " + c.kernel, reason, fresh));
  }
}

void Telemetry::routes(const Routes& routes) {
  if (route_steps_told_++ >= config_.log.route_steps) return;
  struct Told {
    std::string text;
    int64_t first, last;  // layers
  };
  std::vector<Told> lines;
  for (; routes_told_ < routes.counts().size(); ++routes_told_) {
    const Routes::Count& c = routes.counts()[routes_told_];
    if (c.op == "matmul" && config_.runtime.kernels.matmul == KernelChoice::automatic) continue;  // a dozen shapes
    std::string text = fmt::format("{}: {} {}", c.op, c.kernel, c.shapes());
    if (c.is_fallback()) text += fmt::format(", a fallback: {}", c.reason);
    const auto same = std::find_if(lines.begin(), lines.end(), [&](const Told& t) { return t.text == text; });
    if (same == lines.end())
      lines.push_back({std::move(text), c.layer, c.layer});
    else
      same->first = std::min(same->first, c.layer), same->last = std::max(same->last, c.layer);
  }
  for (const Told& t : lines)
    message(fmt::format("kernel of {}{}", t.text,
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
