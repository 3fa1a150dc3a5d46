#include "train/monitor/backward_trace.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/check.h"
#include "train/monitor/step_text.h"

namespace triad {

void BackwardTrace::start(size_t slot) {
  TRIAD_CHECK(now_ == nullptr, "a trace begins within another");
  now_ = &slots_.at(slot);
  now_->used = 0;
  ctx_.listeners->push_back(this);
}

void BackwardTrace::stop() {
  std::erase(*ctx_.listeners, this);
  now_ = nullptr;
}

void BackwardTrace::begin_on(const char* op, const Stream& on) {
  if (now_->used == now_->entries.size()) now_->entries.emplace_back(ctx_.device);
  Entry& entry = now_->entries[now_->used++];
  entry.op = op, entry.layer = ctx_.routes.layer(), entry.stream = &on;
  entry.begin.record(on);
}

void BackwardTrace::end_on(const Stream& on) { now_->entries[now_->used - 1].end.record(on); }

std::vector<BackwardTrace::Op> BackwardTrace::take(size_t slot) {
  Slot& from = slots_.at(slot);
  std::vector<Op> ops;
  const size_t used = std::exchange(from.used, 0);
  for (size_t i = 0; i < used; ++i) {
    const Entry& e = from.entries[i];
    ops.push_back({e.layer, e.op, e.stream->name(), e.begin.ms_since(from.entries[0].begin), e.end.ms_since(e.begin)});
  }
  return ops;
}

std::string trace_text(int64_t step, const std::vector<BackwardTrace::Op>& ops) {
  double end = 0;
  for (const BackwardTrace::Op& op : ops) end = std::max(end, op.begin_ms + op.ms);
  const auto place = [](int64_t layer) { return layer < 0 ? std::string("-") : fmt::format("layer {}", layer); };
  std::string text =
      fmt::format("step {}: backward of its first micro-step, {} ops, {:.3f} ms\n", step, ops.size(), end);
  text += fmt::format("{:<10} {:<32} {:>10} {:>10}  {}\n", "where", "op", "begin ms", "ms", "stream");
  struct Total {
    int64_t layer;
    double begin, end;
  };
  std::vector<Total> layers;
  for (const BackwardTrace::Op& op : ops) {
    text +=
        fmt::format("{:<10} {:<32} {:>10.3f} {:>10.3f}  {}\n", place(op.layer), op.name, op.begin_ms, op.ms, op.stream);
    if (op.layer < 0) continue;
    if (layers.empty() || layers.back().layer != op.layer) layers.push_back({op.layer, op.begin_ms, 0});
    layers.back().end = std::max(layers.back().end, op.begin_ms + op.ms);
  }
  for (const Total& t : layers)
    text += fmt::format("{:<10} {:<32} {:>10.3f} {:>10.3f}\n", place(t.layer), "in all", t.begin, t.end - t.begin);
  return text + "\n";
}

std::string traces_until(int64_t step, std::string_view file) {
  return text_until(file, step, [](std::string_view line) { return number_between(line, "step ", ":"); });
}

}  // namespace triad
