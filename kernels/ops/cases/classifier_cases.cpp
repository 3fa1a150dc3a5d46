// Classifier cases: odd chunk sizes, padding columns, rows without a target.
#include "engine/rng.h"
#include "kernels/common/op_case.h"
#include "kernels/ops/classifier.h"

namespace triad {

namespace {

struct ClassifierShape {
  std::string name;
  int64_t rows, width, vocab, padded_vocab, chunk_rows;
  double weight_std;
  bool bench = false;
};

OpCase classifier_case(const ClassifierShape& s) {
  // The upstream gradient is the same number for all rows, so the driver cannot draw a different one for each row.
  const double scale = 1.0 / static_cast<double>(s.rows);
  const ClassifierOptions options = {.vocab = s.vocab, .chunk_rows = s.chunk_rows};
  const auto target = [vocab = s.vocab](int64_t i, uint64_t seed) {
    return i % 5 == 3
               ? -1.0
               : static_cast<double>(Philox(seed, 0).below(static_cast<uint64_t>(i), static_cast<uint64_t>(vocab)));
  };
  OpCase c{.op = "classifier", .name = s.name};
  c.args = {
      {.name = "h", .role = ArgRole::input, .shape = {s.rows, s.width}},
      {.name = "w", .role = ArgRole::param, .shape = {s.padded_vocab, s.width}, .std = s.weight_std},
      {.name = "targets", .role = ArgRole::constant, .shape = {s.rows}, .type = ArgType::i32, .fill = target},
      {.name = "loss", .role = ArgRole::output, .shape = {s.rows}, .type = ArgType::acc, .std = 0.0, .mean = scale}};
  c.args.push_back({.name = "loss again", .role = ArgRole::saved, .shape = {s.rows}, .type = ArgType::acc});
  c.forward = [options](Context& ctx, const Args& t) {
    classifier_forward(ctx, t["loss"], t["h"], t["w"], t["targets"], options);
  };
  c.backward = [options, scale](Context& ctx, const Args& t) {
    classifier_forward_backward(ctx, t["loss again"], t["dh"], t["dw"], t["h"], t["w"], t["targets"], scale, options);
  };
  c.bench = s.bench;
  const double h = static_cast<double>(s.rows * s.width), w = static_cast<double>(s.padded_vocab * s.width);
  c.forward_flops = 2 * h * static_cast<double>(s.padded_vocab);
  c.forward_bytes = 2 * (h + w), c.forward_written = 0;
  c.backward_flops = 3 * c.forward_flops;  // products for logits, dh and dw
  c.backward_bytes = 2 * (h + w) + 2 * h + 8 * w;
  return c;
}

}  // namespace

std::vector<OpCase> classifier_cases() {
  // On Hopper a CTA cluster holds each row of logits; the gradient overwrites them in place.
  OpCase long_rows = classifier_case({"140x4 of 128249 in chunks of 70", 140, 4, 128249, 128256, 70, 0.3});
  long_rows.differences = long_rows.cpu = false;
  return {
      classifier_case({"7x16 of 29 in chunks of 3", 7, 16, 29, 32, 3, 0.3}),
      classifier_case({"1x5 of 2", 1, 5, 2, 2, 2048, 1.0}),
      classifier_case({"130x33 of 257 in chunks of 64", 130, 33, 257, 264, 64, 0.2}),
      classifier_case({"large logits 12x8 of 40", 12, 8, 40, 40, 5, 20.0}),
      long_rows,
      classifier_case({"32768x768 of 50257", 32768, 768, 50257, 50304, ClassifierOptions{}.chunk_rows, 0.02, true})};
}

}  // namespace triad
