#include "engine/process/progress.h"

#include <fmt/format.h>

namespace triad {

namespace {

// Packs a stage and a layer (-1 and up) into one word, which is never 0.
constexpr int kStageShift = 24;
uint32_t encode(Stage stage, int64_t layer) {
  return static_cast<uint32_t>(stage) << kStageShift | static_cast<uint32_t>(layer + 2);
}
Stage stage_of(uint32_t word) { return static_cast<Stage>(word >> kStageShift); }
int64_t layer_of(uint32_t word) { return static_cast<int64_t>(word & ((1u << kStageShift) - 1)) - 2; }

std::string text_of(Stage stage, int64_t layer) {
  constexpr const char* kNames[] = {
      "start",  "next batch",        "forward",    "head",      "backward", "embedding's backward",
      "update", "wait for a result", "evaluation", "checkpoint"};
  const std::string name = kNames[static_cast<int>(stage)];
  return layer < 0 ? name : fmt::format("{} of layer {}", name, layer);
}

}  // namespace

void Progress::begin(const char* op) {
  op_.store(op, std::memory_order_relaxed);
  in_op_.store(true, std::memory_order_relaxed);
  advance();
}

void Progress::end() {
  in_op_.store(false, std::memory_order_relaxed);
  advance();
}

void Progress::stage(Context& ctx, Stage stage, int64_t layer) {
  const bool goes_forward = stage == Stage::forward || stage == Stage::head;
  const bool evaluates = goes_forward && stage_of(stage_.load(std::memory_order_relaxed)) == Stage::evaluation;
  const uint32_t word = encode(evaluates ? Stage::evaluation : stage, layer);
  stage_.store(word, std::memory_order_relaxed);
  advance();
  if (ctx.device.is_cuda()) backend::write_mark(ctx.device, ctx.stream.handle(), mark_.data(), word);
}

Progress::Position Progress::position() const {
  const uint32_t word = stage_.load(std::memory_order_relaxed);
  return {.count = count_.load(std::memory_order_relaxed),
          .device_mark = device_mark(),
          .steps = steps_.load(std::memory_order_relaxed),
          .op = op_.load(std::memory_order_relaxed),
          .in_op = in_op_.load(std::memory_order_relaxed),
          .stage = word == 0 ? Stage::start : stage_of(word),
          .layer = word == 0 ? -1 : layer_of(word)};
}

std::string Progress::Position::stage_text() const { return text_of(stage, layer); }
std::string Progress::Position::device_text() const {
  return device_mark == 0 ? "" : text_of(stage_of(device_mark), layer_of(device_mark));
}

}  // namespace triad
