#include "train/monitor/index_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "train/config/schedule.h"

namespace triad {

namespace {

std::string tag(int64_t layer, const char* name) { return fmt::format("watch_index/layer{:02}/{}", layer, name); }

}  // namespace

IndexReport::IndexReport(const Config& config, const RunFolder& folder, bool first, int64_t resume_step)
    : config_(config), resume_step_(resume_step) {
  if (!first || !config.log.stats || !config.log.csv || !config.model.has_index()) return;
  layers_csv_ =
      std::make_unique<CsvFile>(folder.file("index.csv"), "step,layer,index_loss,recall,max_logit", resume_step);
  distances_csv_ =
      std::make_unique<CsvFile>(folder.file("index_recall.csv"), "step,layer,distance,mass,recall", resume_step);
}

void IndexReport::step(int64_t step, std::span<const double> losses, TensorBoardWriter* board) {
  step_ = step;
  losses_.assign(losses.begin(), losses.end());
  if (losses.empty() || (step % config_.log.every != 0 && step != config_.train.steps)) return;
  // The rows of a step with an evaluation have its values too, and wait for it.
  if (!evaluates_after(config_.train, step) || config_.dist.context > 1) rows(step, {});
  if (board == nullptr) return;
  std::vector<Scalar> scalars;
  for (int64_t i = 0; i < config_.model.n_layers; ++i)
    if (config_.model.has_index(i)) scalars.push_back({tag(i, "loss"), losses_[static_cast<size_t>(i)]});
  board->file().add(step, scalars);
}

Json IndexReport::evaluation(int64_t step, std::span<const IndexRecall> layers, TensorBoardWriter* board) {
  if (layers.empty()) return Json::object();
  // A resume that only repeats the last evaluation: the files have its rows.
  const bool repeated = step_ != step && step == resume_step_;
  if (!repeated) rows(step, layers);
  double sum = 0, least = layers.front().recall, most_logit = layers.front().max_logit;
  for (const IndexRecall& r : layers)
    sum += r.recall, least = std::min(least, r.recall), most_logit = std::max(most_logit, r.max_logit);
  const double mean = sum / static_cast<double>(layers.size());
  if (board != nullptr && !repeated) {
    std::vector<Scalar> scalars = {
        {"watch_index/recall_mean", mean}, {"watch_index/recall_min", least}, {"watch_index/max_logit", most_logit}};
    for (const IndexRecall& r : layers) {
      scalars.push_back({tag(r.layer, "recall"), r.recall});
      scalars.push_back({tag(r.layer, "max_logit"), r.max_logit});
    }
    board->file().add(step, scalars);
  }
  return {{"index_recall_mean", mean}, {"index_recall_min", least}, {"max_logit", most_logit}};
}

void IndexReport::rows(int64_t step, std::span<const IndexRecall> layers) {
  if (!layers_csv_) return;
  auto sampled = layers.begin();
  for (int64_t i = 0; i < config_.model.n_layers; ++i) {
    if (!config_.model.has_index(i)) continue;
    const std::string loss = step_ == step ? fmt::format("{:.6f}", losses_[static_cast<size_t>(i)]) : std::string();
    if (layers.empty()) {
      layers_csv_->row(fmt::format("{},{},{},,", step, i, loss));
      continue;
    }
    const IndexRecall& r = *sampled++;
    layers_csv_->row(fmt::format("{},{},{},{:.6f},{:.4f}", step, i, loss, r.recall, r.max_logit));
    for (const IndexRecall::Distance& d : r.distances)
      distances_csv_->row(fmt::format("{},{},{},{:.6e},{:.6f}", step, i, d.begin, d.mass, d.recall));
  }
}

}  // namespace triad
