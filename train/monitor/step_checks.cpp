#include "train/monitor/step_checks.h"

#include <fmt/format.h>

#include <filesystem>

#include "engine/check.h"

namespace triad {

void StepChecks::begin_bucket_table(std::optional<int64_t> resumed_at) {
  const bool traced = config_.log.diagnoses("buckets");
  const std::string path =
      folder_.file(comm_.first() ? "ddp_buckets.txt" : fmt::format("ddp_buckets_rank{}.txt", comm_.rank()));
  const bool is_there = resumed_at && std::filesystem::exists(path);
  if (!traced && !comm_.first() && !is_there) return;
  const std::string table = step_.reducer()->table(), header = std::string("\n") + BucketTrace::kHeader;
  const std::string rows =
      is_there ? BucketTrace::rows_until(*resumed_at, table + header, read_file(path)) : std::string();
  write_file_atomically(path, table + (traced || !rows.empty() ? header + rows : ""));
  if (traced) bucket_rows_.emplace(path);
}

std::optional<std::string> StepChecks::buckets(Telemetry& telemetry, int64_t step, const BucketTrace::Step& traced) {
  bucket_rows_->append(BucketTrace::rows(step, traced));
  if (traced.odd.empty()) return {};
  std::string text;
  for (const auto& [bucket, ranks] : traced.odd) {
    const std::vector<int64_t>& params = step_.reducer()->plan().buckets()[static_cast<size_t>(bucket)].params;
    text += fmt::format("{}bucket {} ({} to {}): {}", text.empty() ? "" : "; ", bucket,
                        params.empty() ? "padding" : param_name(params.front()),
                        params.empty() ? "padding" : param_name(params.back()), ranks);
  }
  telemetry.heartbeat(step, "divergence", {{"text", text}});
  return fmt::format("step {}: the ranks' sums of gradients differ: {}", step, text);
}

void StepChecks::anomalies(Telemetry& telemetry, StepHealth health, const TrainStep::Result& result,
                           const Watchdog::Sample& sample) {
  health.loss = result.loss, health.grad_norm = result.grad_norm;
  health.host_mib = sample.host_mib, health.device_mib = sample.gpu.used_mib;
  for (const Anomaly& anomaly : anomalies_.step(health)) {
    // All ranks find such an anomaly, so only the first rank reports it.
    if (!anomaly.single_rank && !comm_.first()) continue;
    const std::string whose = anomaly.single_rank ? fmt::format("rank {}: ", comm_.rank()) : "";
    telemetry.heartbeat(health.step, "anomaly", {{"type", anomaly.type}, {"text", anomaly.text}});
    telemetry.alert(fmt::format("anomaly {}: {}{}", anomaly.type, whose, anomaly.text));
    if (config_.log.on_anomaly != OnAnomaly::stop || wants_stop_) continue;
    write_anomaly_type(folder_.path(), anomaly.type, anomaly.text);
    wants_stop_ = true;
  }
}

}  // namespace triad
