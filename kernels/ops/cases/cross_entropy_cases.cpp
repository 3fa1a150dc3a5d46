// Cross-entropy cases: padding columns, rows without a target, logits of +-1e4.
#include "engine/rng.h"
#include "kernels/common/op_case.h"
#include "kernels/ops/cross_entropy.h"

namespace triad {

namespace {

struct LossShape {
  std::string name;
  int64_t rows, vocab, columns;
  double std = 2.0;
  bool extreme = false;  // one logit is +1e4 in each row, all others -1e4
  int64_t row_pad = 0;
  bool bench = false;
  bool one_pass = false;  // backward is cross_entropy_forward_backward(), which writes the loss too
};

OpCase cross_entropy_case(const LossShape& s) {
  // The upstream gradient is the same number for all rows, so the driver cannot draw a different one for each row.
  const double scale = 1.0 / static_cast<double>(s.rows);
  const auto target = [vocab = s.vocab](int64_t i, uint64_t seed) {
    if (i % 5 == 3) return -1.0;
    return static_cast<double>(Philox(seed, 0).below(static_cast<uint64_t>(i), static_cast<uint64_t>(vocab)));
  };
  OpCase c{.op = "cross_entropy", .name = s.name};
  c.args = {
      {.name = "logits", .role = ArgRole::input, .shape = {s.rows, s.columns}, .std = s.std, .row_pad = s.row_pad},
      {.name = "targets", .role = ArgRole::constant, .shape = {s.rows}, .type = ArgType::i32, .fill = target},
      {.name = "loss", .role = ArgRole::output, .shape = {s.rows}, .type = ArgType::acc, .std = 0.0, .mean = scale},
      {.name = "lse", .role = ArgRole::saved, .shape = {s.rows}, .type = ArgType::acc}};
  if (s.extreme) {
    c.args[0].fill = [columns = s.columns, vocab = s.vocab](int64_t i, uint64_t) {
      return i % columns == i / columns * 30011 % vocab ? 1e4 : -1e4;
    };
  }
  c.forward = [vocab = s.vocab](Context& ctx, const Args& t) {
    cross_entropy_forward(ctx, t["loss"], t["lse"], t["logits"], t["targets"], vocab);
  };
  c.backward = [vocab = s.vocab, scale](Context& ctx, const Args& t) {
    cross_entropy_backward(ctx, t["dlogits"], t["logits"], t["lse"], t["targets"], vocab, scale);
  };
  if (s.one_pass) {
    c.args.push_back({.name = "loss again", .role = ArgRole::saved, .shape = {s.rows}, .type = ArgType::acc});
    c.backward = [vocab = s.vocab, scale](Context& ctx, const Args& t) {
      cross_entropy_forward_backward(ctx, t["loss again"], t["dlogits"], t["logits"], t["targets"], vocab, scale);
    };
  }
  c.bench = s.bench;
  const double elements = static_cast<double>(s.rows * s.columns);
  c.forward_flops = 3 * elements;
  c.forward_bytes = 2 * elements, c.forward_written = 0;
  c.backward_flops = 3 * elements;
  c.backward_bytes = 4 * elements;
  return c;
}

// Forward and backward in one call, with rows that are too long for one SM in at least one dtype. Only the GPU has
// special kernels for long rows, so the CPU-only tests leave them out.
OpCase long_rows(LossShape s) {
  s.name += ", one pass";
  s.one_pass = true;
  OpCase c = cross_entropy_case(s);
  c.differences = c.cpu = false;
  c.gpu_f32 = !s.bench;  // keeps the check short
  return c;
}

}  // namespace

std::vector<OpCase> cross_entropy_cases() {
  return {
      cross_entropy_case({"1x1", 1, 1, 1}), cross_entropy_case({"7x33", 7, 33, 33}),
      cross_entropy_case({"9x29 of 32", 9, 29, 32}), cross_entropy_case({"31x64, padded", 31, 64, 64, 2.0, false, 8}),
      cross_entropy_case({"5x5003 of 5056", 5, 5003, 5056}),
      cross_entropy_case({"3x17000, sharp", 3, 17000, 17000, 30.0}),
      cross_entropy_case({"12x40, logits of 1e4", 12, 40, 40, 0, true}),
      cross_entropy_case({"7x33, one pass", 7, 33, 33, 2.0, false, 0, false, true}),
      cross_entropy_case({"9x29 of 32, one pass", 9, 29, 32, 2.0, false, 0, false, true}),
      cross_entropy_case({"31x64, padded, one pass", 31, 64, 64, 2.0, false, 8, false, true}),
      // More rows than the GPU has SMs: a CTA processes several and uses both buffers.
      cross_entropy_case({"500x5003 of 5056, one pass", 500, 5003, 5056, 2.0, false, 0, false, true}),
      cross_entropy_case({"3x17000, sharp, one pass", 3, 17000, 17000, 30.0, false, 0, false, true}),
      cross_entropy_case({"12x40, logits of 1e4, one pass", 12, 40, 40, 0, true, 0, false, true}),
      // In f32, an SM's shared memory holds one row in this case and not even one in the next.
      cross_entropy_case({"140x28999 of 29000, one pass", 140, 28999, 29000, 2.0, false, 0, false, true}),
      cross_entropy_case({"3x60001 of 60008, one pass", 3, 60001, 60008, 2.0, false, 0, false, true}),
      // On Hopper, a CTA cluster shares these rows in at least one dtype, except in the last case. The comments give
      // the cluster's CTA count in each dtype, and say where it has a single buffer.
      // f32: 4; bf16: no cluster. Three rows and more per cluster on an H100.
      long_rows({"110x60001 of 60008", 110, 60001, 60008}),
      // bf16: 4, f32: 8.
      long_rows({"7x128256, padded", 7, 128256, 128256, 2.0, false, 8}), long_rows({"70x128256", 70, 128256, 128256}),
      long_rows({"6x128256, logits of 1e4", 6, 128256, 128256, 0, true}),
      // bf16: 4, f32: 8. In the first case the last CTA has padding columns, in the second it has nothing else.
      long_rows({"9x151931 of 152064", 9, 151931, 152064}), long_rows({"5x80001 of 128256", 5, 80001, 128256}),
      // bf16: 4, f32: 8 with a single buffer. More rows than clusters.
      long_rows({"50x229999 of 230000", 50, 229999, 230000}),
      // bf16: 8, f32: 8 with a single buffer.
      long_rows({"5x300001 of 300008", 5, 300001, 300008}),
      // bf16: 8 with a single buffer, f32: too long for a cluster. The next case is too long in both.
      long_rows({"18x480001 of 480008", 18, 480001, 480008}), long_rows({"2x930001 of 930008", 2, 930001, 930008}),
      cross_entropy_case({"2048x50257 of 50304", 2048, 50257, 50304, 2.0, false, 0, true}),
      cross_entropy_case({"4096x50257 of 50304, one pass", 4096, 50257, 50304, 2.0, false, 0, true, true}),
      long_rows({"1024x128256", 1024, 128256, 128256, 2.0, false, 0, true})};
}

}  // namespace triad
