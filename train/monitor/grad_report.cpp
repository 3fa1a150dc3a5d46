#include "train/monitor/grad_report.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

namespace triad {

namespace {

std::string some_of(const std::vector<std::string>& names) {
  constexpr size_t kMost = 8;
  const std::vector<std::string> some(names.begin(), names.begin() + std::min(names.size(), kMost));
  return fmt::format("{}{}", fmt::join(some, ", "), names.size() > kMost ? ", ..." : "");
}

}  // namespace

std::vector<std::string> unexpected_zeros(const Params& params, const Config& config, int64_t step,
                                          const GradNorms& grads, int64_t longest, bool dense) {
  const int64_t tokens = longest > 0 ? longest : config.train.seq_len;
  std::vector<std::string> names;
  for (size_t i = 0; i < grads.norm.size(); ++i) {
    const ParamSpec& param = params.specs()[i];
    if (dense && !used_by_dense_pass(param)) continue;
    if (grads.is_zero(i) && !expects_zero_gradient(config.model, tokens, step, param)) names.push_back(param.name);
  }
  return names;
}

std::vector<double> layer_norms(const Params& params, const ModelConfig& config, const GradNorms& grads) {
  std::vector<double> norms(static_cast<size_t>(config.n_layers), 0.0);
  for (size_t i = 0; i < grads.norm.size(); ++i)
    if (const int64_t layer = params.specs()[i].layer; layer >= 0)
      norms[static_cast<size_t>(layer)] += grads.norm[i] * grads.norm[i];
  for (double& x : norms) x = std::sqrt(x);
  return norms;
}

GradReport::GradReport(const Config& config, const RunFolder& folder, const Params& params, bool first,
                       int64_t resume_step, int64_t longest)
    : config_(config), folder_(folder), params_(params), first_(first), longest_(longest) {
  if (!first) return;
  if (ledger())
    csv_ =
        std::make_unique<CsvFile>(folder.file("grad_ledger.csv"), "step,parameter,norm,zero,not_finite", resume_step);
  const std::string traces = folder.file("traces.log");
  if (resume_step >= 0 && std::filesystem::exists(traces))
    write_file_atomically(traces, traces_until(resume_step, read_file(traces)));
  if (config.log.diagnoses("backward")) traces_ = std::make_unique<AppendFile>(traces);
}

bool GradReport::measures(int64_t step) const {
  return ledger() || config_.log.diagnoses("layer_norms") || step % config_.log.every == 0;
}
bool GradReport::traces(int64_t step) const {
  return config_.log.diagnoses("backward") && step % config_.log.every == 0;
}

Json GradReport::step(int64_t step, int64_t updates, const TrainStep::Result& result, Telemetry& telemetry) {
  Json beat = Json::object();
  if (traces_ && !result.trace.empty()) traces_->append(trace_text(step, result.trace));
  if (!result.grads) return beat;
  const GradNorms& grads = *result.grads;
  const TrainStage stage = stage_at(config_.train, step - 1);
  zeros_ = unexpected_zeros(params_, in_stage(config_, stage), updates + 1, grads, std::min(longest_, stage.seq_len),
                            stage.is_dense(step - 1));
  int64_t zero = 0;
  std::vector<std::string> not_finite;
  for (size_t i = 0; i < grads.norm.size(); ++i) {
    zero += grads.is_zero(i);
    if (grads.not_finite[i] > 0) not_finite.push_back(params_.specs()[i].name);
  }
  beat["grads_zero"] = zero;
  beat["grads_zero_unexpected"] = zeros_.size();
  beat["grads_not_finite"] = not_finite.size();
  if (config_.log.diagnoses("layer_norms")) {
    std::vector<double> norms = layer_norms(params_, config_.model, grads);
    std::string line;
    for (size_t i = 0; i < norms.size(); ++i) line += fmt::format(" layer{} {:.4e}", i, norms[i]);
    for (size_t i = 0; i < grads.norm.size(); ++i)
      if (const ParamSpec& param = params_.specs()[i]; param.layer < 0)
        line += fmt::format(" {} {:.4e}", param.name, grads.norm[i]);
    telemetry.detail(fmt::format("[GRAD-NORM] step{}{}", step, line));
    beat["layer_grad_norms"] = norms;
  }
  if (!ledger()) return beat;
  // all gradients have arrived: update() throws if one is missing
  const auto all = static_cast<int64_t>(grads.norm.size());
  telemetry.detail(
      fmt::format("[GRAD-TRACE] after_backward_step{} arrived={} missing=0 zero={} unexpected_zero={} "
                  "not_finite={}",
                  step, all, zero, zeros_.size(), not_finite.size()));
  if (!zeros_.empty()) telemetry.detail(fmt::format("[GRAD-TRACE] step{} zero: {}", step, some_of(zeros_)));
  if (!not_finite.empty())
    telemetry.detail(fmt::format("[GRAD-TRACE] step{} not finite: {}", step, some_of(not_finite)));
  if (first_ && !std::exchange(missing_written_, true)) write_missing(step, {}, all);
  const bool row = step % config_.log.every == 0 || !not_finite.empty();
  for (size_t i = 0; csv_ && row && i < grads.norm.size(); ++i)
    csv_->row(fmt::format("{},{},{:.6e},{},{}", step, params_.specs()[i].name, grads.norm[i], grads.is_zero(i) ? 1 : 0,
                          grads.not_finite[i]));
  return beat;
}

void GradReport::missing(int64_t step, const MissingGradients& e) const {
  if (first_) write_missing(step, e.names, e.of);
}

void GradReport::write_missing(int64_t step, const std::vector<std::string>& names, int64_t of) const {
  std::string text =
      fmt::format("step {}: arrived={} missing={}\n", step, of - static_cast<int64_t>(names.size()), names.size());
  for (const std::string& name : names) text += name + "\n";
  write_file_atomically(folder_.file("all_missing_params.txt"), text);
}

}  // namespace triad
