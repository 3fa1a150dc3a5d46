#include "train/monitor/stats_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/ops/cast_e4m3.h"
#include "model/fp8.h"

namespace triad {

namespace {

using F = NsaStats::Field;

// Adds one layer's TensorBoard scalars, named watch_gates/layerNN/... and watch_selection/layerNN/...
void add_scalars(std::vector<Scalar>& scalars, int64_t layer, const NsaStats& s, bool gated) {
  const auto add = [&](const char* group, const char* name, double value) {
    scalars.push_back({fmt::format("watch_{}/layer{:02}/{}", group, layer, name), value});
  };
  if (gated) {
    add("gates", "entropy_mean", s.gate_mean(F::entropy));
    add("gates", "entropy_min", s.gate_extreme(F::entropy_min));
    add("gates", "max_mean", s.gate_mean(F::largest));
    add("gates", "max_max", s.gate_extreme(F::largest_max));
    add("gates", "collapse_frac", s.gate_mean(F::collapsed));
    add("gates", "dead_frac", s.mean(F::dead));
    constexpr const char* kBranches[] = {"cmp", "sel", "win"};
    for (int b = 0; b < 3; ++b) add("gates", kBranches[b], s.gate_mean(F::share + b));
  }
  add("selection", "k_mean", s.mean(F::tokens));
  add("selection", "k_max", s.at[F::tokens_max]);
  add("selection", "pct_at_max", s.mean(F::at_max));
  add("selection", "overlap", s.overlap());
  add("selection", "forced_frac", s.forced_share());
}

}  // namespace

StatsReport::StatsReport(const Config& config, const RunFolder& folder, bool first, int64_t resume_step)
    : config_(config) {
  if (!first || !config.log.stats || !config.log.csv) return;
  if (config.model.has_gates())
    gates_csv_ = std::make_unique<CsvFile>(
        folder.file("gates.csv"), "step,layer,entropy_mean,entropy_min,max_mean,max_max,collapse_frac,cmp,sel,win",
        resume_step);
  lists_csv_ =
      std::make_unique<CsvFile>(folder.file("k_stats.csv"), "step,layer,k_mean,k_max,rows,pct_at_max", resume_step);
  if (config.runtime.matmul_dtype == MatmulDType::fp8)
    fp8_csv_ = std::make_unique<CsvFile>(folder.file("fp8.csv"), "step,role,flushed,saturated", resume_step);
}

Json StatsReport::step(int64_t step, std::span<const NsaStats> layers, TensorBoardWriter* board) {
  gates_.clear();
  if (layers.empty()) return Json::object();
  NsaStats all, gated;  // sums over the layers with lists, and over those with gates
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto layer = static_cast<int64_t>(i);
    const NsaStats& s = layers[i];
    if (config_.model.has_lists(layer)) all.merge(s);
    if (!config_.model.has_gates(layer)) continue;
    gated.merge(s);
    gates_.push_back({.layer = layer,
                      .entropy_mean = s.gate_mean(F::entropy),
                      .max_mean = s.gate_mean(F::largest),
                      .collapse_frac = s.gate_mean(F::collapsed),
                      .dead_frac = s.mean(F::dead)});
  }
  if (has_row(step)) rows(step, layers, board);
  Json json = {{"sel_k_mean", all.mean(F::tokens)},
               {"sel_k_max", static_cast<int64_t>(all.at[F::tokens_max])},
               {"sel_rows", static_cast<int64_t>(all.at[F::rows])},
               {"sel_pct_at_max", all.mean(F::at_max)},
               {"sel_overlap", all.overlap()},
               {"sel_forced_frac", all.forced_share()}};
  if (gates_.empty()) return json;
  Json with_gates = {{"gate_entropy_mean", gated.gate_mean(F::entropy)},
                     {"gate_entropy_min", gated.gate_extreme(F::entropy_min)},
                     {"gate_max_gate", gated.gate_extreme(F::largest_max)},
                     {"gate_max_mean", gated.gate_mean(F::largest)},
                     {"gate_collapse_frac", gated.gate_mean(F::collapsed)},
                     {"gate_dead_frac", gated.mean(F::dead)},
                     {"gate_branch_shares",
                      {gated.gate_mean(F::share), gated.gate_mean(F::share + 1), gated.gate_mean(F::share + 2)}}};
  with_gates.update(json);
  return with_gates;
}

Json StatsReport::fp8(int64_t step, std::span<const double> counts, TensorBoardWriter* board) {
  if (counts.empty()) return Json::object();
  Json flushed = Json::object(), saturated = Json::object();
  std::vector<Scalar> scalars;
  for (size_t role = 0; role < Fp8Role::count; ++role) {
    const std::span<const double> its = counts.subspan(role * E4m3Counts::count, E4m3Counts::count);
    const double values = std::max(1.0, its[E4m3Counts::values]), zeros = its[E4m3Counts::zeros] / values,
                 nans = its[E4m3Counts::nans] / values;
    const std::string name = kFp8RoleNames[role];
    flushed[name] = zeros, saturated[name] = nans;
    if (!has_row(step)) continue;
    if (fp8_csv_) fp8_csv_->row(fmt::format("{},{},{:.3e},{:.3e}", step, name, zeros, nans));
    scalars.push_back({"watch_fp8/flushed/" + name, zeros});
  }
  if (board != nullptr && !scalars.empty()) board->file().add(step, scalars);
  return {{"fp8_flushed", std::move(flushed)}, {"fp8_saturated", std::move(saturated)}};
}

void StatsReport::rows(int64_t step, std::span<const NsaStats> layers, TensorBoardWriter* board) {
  std::vector<Scalar> scalars;
  std::vector<double> entropies, largest;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto layer = static_cast<int64_t>(i);
    if (!config_.model.has_lists(layer)) continue;
    const bool gated = config_.model.has_gates(layer);
    const NsaStats& s = layers[i];
    add_scalars(scalars, layer, s, gated);
    if (gated) entropies.push_back(s.gate_mean(F::entropy)), largest.push_back(s.gate_mean(F::largest));
    if (!lists_csv_) continue;
    if (gated)
      gates_csv_->row(fmt::format("{},{},{:.6f},{:.6f},{:.6f},{:.6f},{:.6f},{:.6f},{:.6f},{:.6f}", step, i,
                                  s.gate_mean(F::entropy), s.gate_extreme(F::entropy_min), s.gate_mean(F::largest),
                                  s.gate_extreme(F::largest_max), s.gate_mean(F::collapsed), s.gate_mean(F::share),
                                  s.gate_mean(F::share + 1), s.gate_mean(F::share + 2)));
    lists_csv_->row(fmt::format("{},{},{:.4f},{:.0f},{:.0f},{:.6f}", step, i, s.mean(F::tokens), s.at[F::tokens_max],
                                s.at[F::rows], s.mean(F::at_max)));
  }
  if (board == nullptr) return;
  board->file().add(step, scalars);
  if (entropies.empty()) return;
  board->file().add(step, "watch_gates/entropy_mean_of_layers", entropies);
  board->file().add(step, "watch_gates/max_mean_of_layers", largest);
}

}  // namespace triad
