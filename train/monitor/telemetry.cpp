#include "train/monitor/telemetry.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>
#include <vector>

#include "engine/backend.h"
#include "engine/units.h"
#include "kernels/ops/matmul.h"
#include "model/flops.h"

namespace triad {

namespace {}  // namespace

Telemetry::Telemetry(const Config& config, const RunFolder& folder, Device device, const Comm& comm, const Arena& arena,
                     Resume resume, double step_flops, bool verbose)
    : config_(config),
      device_(device),
      comm_(comm),
      arena_(arena),
      step_flops_(step_flops),
      meter_(config, step_flops, device.is_cuda() ? peak_bf16_flops(backend::info(device).name) : 0, resume.tokens),
      console_(folder, comm, verbose),
      heartbeats_(config, folder, device, comm, arena) {
  if (config.log.tensorboard && comm.first())
    board_ = std::make_unique<TensorBoardWriter>(folder.file("tb"), arena, config, resume.step);
  else if (comm.first() && resume.step >= 0 && std::filesystem::exists(folder.file("tb")))
    // Also in a run without log.tensorboard, which writes no events.
    EventFile(folder.file("tb"), resume.step);
  if (config.log.csv && comm.first()) tables_.emplace(folder, resume.step);
}

void Telemetry::banner(RunSummary run) {
  run.planned_mib = peak_mib();
  run.step_flops = step_flops_;
  for (const std::string& line : banner_lines(config_, device_, comm_, run)) message(line);
  for (const std::string& line : banner_details(config_, comm_, run.environment)) detail(line);
}

void Telemetry::step(StepRecord s) {
  meter_.measure(s, std::chrono::steady_clock::now());
  if (tables_) tables_->step(s);
  if (board_) {
    board_->step(s.loss, s.grad_norm);
    if (s.row)
      board_->row(s.step, s.run_tokens, {s.loss, s.lr, s.tokens_per_s, s.grad_norm, s.median_ms, s.mfu, s.row_comm_ms});
  }
  console_.progress(s, config_.train.steps);
  heartbeats_.step(s);
}

void Telemetry::evaluation(int64_t step, double loss, double bits_per_byte) {
  if (board_) board_->evaluation(step, loss, bits_per_byte);
  if (tables_) tables_->evaluation(step, loss);
  message(fmt::format("step {}  validation loss {:.4f}  perplexity {:.3f}{}", step, loss, std::exp(loss),
                      std::isfinite(bits_per_byte) ? fmt::format("  bits per byte {:.4f}", bits_per_byte) : ""));
}

void Telemetry::fallbacks(int64_t step, const Routes& routes) {
  if (tables_) tables_->fallbacks(step, routes);
}

void Telemetry::routes(const Routes& routes) {
  if (route_steps_logged_++ >= config_.log.route_steps) return;
  struct Line {
    std::string text;
    int64_t first, last;  // layer range to which the text applies
  };
  std::vector<Line> lines;
  for (; routes_logged_ < routes.counts().size(); ++routes_logged_) {
    const Routes::Count& c = routes.counts()[routes_logged_];
    // Products have too many shapes to list them all. Those that are fallbacks are listed.
    const bool is_usual = c.op == "matmul" && config_.runtime.kernels.matmul == KernelChoice::automatic;
    if (is_usual && !c.is_fallback()) continue;
    std::string text = fmt::format("{}: {} {}", c.op, c.kernel, c.shapes());
    if (c.is_fallback()) text += fmt::format(", a fallback: {}", c.reason);
    const auto same = std::find_if(lines.begin(), lines.end(), [&](const Line& t) { return t.text == text; });
    if (same == lines.end())
      lines.push_back({std::move(text), c.layer, c.layer});
    else
      same->first = std::min(same->first, c.layer), same->last = std::max(same->last, c.layer);
  }
  for (const Line& t : lines)
    console_.detail(
        fmt::format("kernel of {}{}", t.text,
                    t.last < 0 ? "" : fmt::format(" (layers {} to {})", std::max<int64_t>(0, t.first), t.last)));
}

double Telemetry::peak_mib() const {
  return static_cast<double>(arena_.capacity_bytes() + (device_.is_cuda() ? kMatmulWorkspaceBytes : 0)) / kMiB;
}

}  // namespace triad
