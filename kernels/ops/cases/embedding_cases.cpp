// Token embedding cases, some with a "hot" token that many rows have.
#include <cmath>

#include "engine/rng.h"
#include "kernels/common/op_case.h"
#include "kernels/ops/embedding.h"

namespace triad {

namespace {

struct EmbeddingShape {
  std::string name;
  int64_t rows, width, vocab;
  double hot_share = 0;  // share of rows that have the hot token, vocab / 2
  int64_t row_pad = 0;
  bool bench = false;
};

OpCase embedding_case(const EmbeddingShape& s) {
  const auto token = [vocab = s.vocab, hot = s.hot_share](int64_t i, uint64_t seed) {
    const auto index = static_cast<uint64_t>(i);
    if (Philox(seed, 0).uniform(index) < hot) return static_cast<double>(vocab / 2);
    return static_cast<double>(Philox(seed, 1).below(index, static_cast<uint64_t>(vocab)));
  };
  OpCase c{.op = "embedding", .name = s.name};
  c.args = {{.name = "tokens", .role = ArgRole::constant, .shape = {s.rows}, .type = ArgType::i32, .fill = token},
            {.name = "w", .role = ArgRole::param, .shape = {s.vocab, s.width}},
            {.name = "y", .role = ArgRole::output, .shape = {s.rows, s.width}, .row_pad = s.row_pad}};
  c.forward = [](Context& ctx, const Args& t) { embedding_forward(ctx, t["y"], t["tokens"], t["w"]); };
  c.backward = [](Context& ctx, const Args& t) { embedding_backward(ctx, t["dw"], t["dy"], t["tokens"]); };
  c.bench = s.bench;
  // A table row counts once however often its token occurs; `touched` is how many different tokens to expect. dw is f32
  // and is read and written.
  const double rows = static_cast<double>(s.rows), width = static_cast<double>(s.width);
  const double vocab = static_cast<double>(s.vocab), drawn = rows * (1 - s.hot_share);
  const double touched = vocab * (1 - std::pow(1 - 1 / vocab, drawn));
  c.forward_bytes = 4 * rows + 2 * (touched + rows) * width, c.forward_written = 2 * rows * width;
  c.backward_flops = rows * width;
  c.backward_bytes = 4 * rows + 2 * rows * width + 8 * touched * width, c.backward_written = 4 * touched * width;
  return c;
}

}  // namespace

std::vector<OpCase> embedding_cases() {
  return {embedding_case({"1x1 of 1", 1, 1, 1}), embedding_case({"31x33 of 7", 31, 33, 7}),
          embedding_case({"33x64 of 1000", 33, 64, 1000}), embedding_case({"127x40 of 5, padded", 127, 40, 5, 0, 8}),
          embedding_case({"700x24 of 3", 700, 24, 3}), embedding_case({"2500x16 of 256, hot", 2500, 16, 256, 0.9}),
          embedding_case({"40x8 of 40000", 40, 8, 40000}),  // 40 KB for counters: a CTA has more than 48 KB of shared
                                                            // memory
          embedding_case({"40x8 of 90000", 40, 8, 90000}), embedding_case({"9000x264 of 50, hot", 9000, 264, 50, 0.15}),
          embedding_case({"32768x768 of 50304", 32768, 768, 50304, 0, 0, true}),
          embedding_case({"65536x768 of 50304", 65536, 768, 50304, 0, 0, true}),
          embedding_case({"65536x768 of 256, hot", 65536, 768, 256, 0.15, 0, true})};
}

}  // namespace triad
