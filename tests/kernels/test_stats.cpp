// log.stats on the device: sums over gates and lists equal what the host computes row by row with sets and maps, and a
// step counts each forward pass once.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "kernels/nsa/cases/nsa_cases.h"
#include "kernels/nsa/stats.h"
#include "tests/support/model_fixture.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/config/load_config.h"
#include "train/inference.h"
#include "train/run/memory_plan.h"
#include "train/step/train_step.h"

using namespace triad;
using namespace triad::test;

namespace {

using F = NsaStats::Field;

// One forward pass's gates [3,B,T,Hkv] and lists [B,T,Hkv,n], on the host.
struct Rows {
  int64_t B, T, groups, n;
  std::vector<double> gate;
  std::vector<int32_t> lists;
};

// Returns statistics over all rows in all forward passes, by nsa/stats.h's definitions.
NsaStats reference_stats(const std::vector<Rows>& forwards, const SelectOptions& o) {
  NsaStats s;
  std::vector<double> entropies, largest;
  std::vector<int64_t> tokens;
  for (const Rows& f : forwards) {
    const int64_t rows = f.B * f.T * f.groups;
    const auto list_of = [&](int64_t row) {
      std::set<int64_t> blocks(f.lists.begin() + row * f.n, f.lists.begin() + (row + 1) * f.n);
      blocks.erase(-1);
      return blocks;
    };
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t t = row / f.groups % f.T, current = t / o.l_sel;
      const double g[3] = {f.gate[row], f.gate[rows + row], f.gate[2 * rows + row]}, sum = g[0] + g[1] + g[2];
      if (sum == 0) {
        s.at[F::dead] += 1;
      } else {
        double entropy = 0, most = 0;
        for (int b = 0; b < 3; ++b) {
          const double p = g[b] / sum;
          if (p > 0) entropy -= p * std::log(p);
          most = std::max(most, p);
          s.at[F::share + b] += p;
        }
        entropies.push_back(entropy), largest.push_back(most);
      }
      int64_t visible_tokens = 0;
      const std::set<int64_t> blocks = list_of(row);
      for (int64_t i = 0; i <= t; ++i) visible_tokens += static_cast<int64_t>(blocks.count(i / o.l_sel));
      tokens.push_back(visible_tokens);
      s.at[F::blocks] += static_cast<double>(blocks.size());
      for (const int64_t block : blocks)
        s.at[F::forced] += block < o.init_blocks || (block <= current && current - block < o.local_blocks);
      if (t == 0) continue;
      const std::set<int64_t> before = list_of(row - f.groups);
      s.at[F::followers] += static_cast<double>(blocks.size());
      for (const int64_t block : blocks) s.at[F::shared] += static_cast<double>(before.count(block));
    }
  }
  const auto total = [](const auto& values) { return std::accumulate(values.begin(), values.end(), 0.0); };
  s.at[F::rows] = static_cast<double>(tokens.size());
  s.at[F::entropy] = total(entropies);
  s.at[F::entropy_min] = *std::min_element(entropies.begin(), entropies.end());
  s.at[F::largest] = total(largest);
  s.at[F::largest_max] = *std::max_element(largest.begin(), largest.end());
  s.at[F::collapsed] =
      static_cast<double>(std::count_if(entropies.begin(), entropies.end(), [](double e) { return e < 0.1; }));
  s.at[F::tokens] = total(tokens);
  const int64_t most = *std::max_element(tokens.begin(), tokens.end());
  s.at[F::tokens_max] = static_cast<double>(most);
  s.at[F::at_max] = static_cast<double>(std::count(tokens.begin(), tokens.end(), most));
  return s;
}

// Checks that counts are equal and that sums differ at most by rounding gates to fp32.
void check_same(const NsaStats& got, const NsaStats& expected, double tolerance) {
  for (int64_t i = 0; i < NsaStats::count; ++i) {
    INFO("field " << i);
    const bool sum = (i >= F::entropy && i <= F::largest_max) || (i >= F::share && i < F::share + 3);
    if (sum)
      CHECK(got.at[i] == Approx(expected.at[i]).epsilon(tolerance).margin(tolerance));
    else
      CHECK(got.at[i] == expected.at[i]);
  }
}

NsaStats read_stats(Context& ctx, const Tensor& out) {
  NsaStats s;
  read(ctx, s.at, out);
  return s;
}

void write_floats(Context& ctx, const Tensor& to, const std::vector<double>& values) {
  const std::vector<float> single(values.begin(), values.end());
  write(ctx, to, to.dtype == DType::f64 ? static_cast<const void*>(values.data()) : single.data());
}

// Returns a gate by row and branch. The second half of the rows includes the special cases in `open`. No entropy is
// near the limit below which a row counts as collapsed.
double some_gate(const Philox& random, int64_t row, int64_t branch, int64_t rows) {
  const double open[][3] = {{0, 0, 0}, {1, 0, 0}, {0, 0, 1}, {0.5, 0.5, 0.5}, {0.995, 0.004, 0.001}, {1e-30, 0, 0}};
  if (row % 7 < 6 && row > rows / 2) return open[row % 7][branch];
  return 0.1 + 0.9 * random.uniform(static_cast<uint64_t>(branch * rows + row));
}

void check_ops(Device device, DType dtype) {
  struct Problem {
    int64_t B, T, groups;
    SelectOptions o;
  };
  const Problem problems[] = {{1, 1, 1, {8, 4, 8, 4}},
                              {2, 130, 2, {8, 4, 8, 4}},
                              {3, 70, 1, {16, 8, 32, 7, 0, 1}},
                              {1, 700, 3, {16, 8, 16, 64, 2, 3}}};
  for (const auto& [B, T, groups, o] : problems) {
    INFO(device.str() << " " << name_of(dtype) << " " << B << " x " << T << " x " << groups);
    Runtime runtime({.device = device, .arena_bytes = 64 << 20, .scratch_bytes = 1 << 20});
    Context& ctx = runtime.ctx();
    const auto alloc = [&](DType type, const Shape& shape) {
      return runtime.arena().alloc(MemTag::io, "x", type, shape);
    };
    const Tensor gate = alloc(dtype, {3, B, T, groups}), lists = alloc(DType::i32, {B, T, groups, o.n_sel});
    const Tensor pieces = alloc(DType::f64, {2, kStatsPieces, NsaStats::count});
    const Tensor out = alloc(DType::f64, {2, NsaStats::count});
    zero(ctx, pieces);
    std::vector<Rows> forwards;
    for (const uint64_t seed : {1, 2}) {  // two micro-steps, the second of two layers
      Rows f{B, T, groups, o.n_sel, {}, {}};
      const Philox random(seed, 9);
      for (int64_t i = 0; i < gate.numel(); ++i)
        f.gate.push_back(some_gate(random, i % (B * T * groups), i / (B * T * groups), B * T * groups));
      for (const double block : random_block_lists(seed, B, T, groups, o.n_sel, o.l_sel, true))
        f.lists.push_back(static_cast<int32_t>(block));
      write_floats(ctx, gate, f.gate);
      write(ctx, lists, f.lists.data());
      nsa_stats(ctx, pieces[1], gate, lists, o);
      forwards.push_back(std::move(f));
    }
    nsa_stats_merge(ctx, out, pieces);
    check_same(read_stats(ctx, out[1]), reference_stats(forwards, o), dtype == DType::f64 ? 1e-12 : 1e-6);
    const NsaStats none = read_stats(ctx, out[0]);  // statistics without any rows
    CHECK(std::all_of(none.at, none.at + NsaStats::count, [](double x) { return x == 0; }));
  }
}

// Checks that a NaN gate in any row makes the gate sums and extremes NaN, and leaves the counts.
void check_not_a_number(Device device, DType dtype) {
  constexpr int64_t kT = 700, kGroups = 3, kRows = kT * kGroups, kAPiece = kRows / kStatsPieces;
  const SelectOptions o{16, 8, 16, 8, 2, 3};
  Runtime runtime({.device = device, .arena_bytes = 64 << 20, .scratch_bytes = 1 << 20});
  Context& ctx = runtime.ctx();
  const auto alloc = [&](DType type, const Shape& shape) {
    return runtime.arena().alloc(MemTag::io, "x", type, shape);
  };
  const Tensor gate = alloc(dtype, {3, 1, kT, kGroups}), lists = alloc(DType::i32, {1, kT, kGroups, o.n_sel});
  const Tensor pieces = alloc(DType::f64, {kStatsPieces, NsaStats::count}),
               out = alloc(DType::f64, {1, NsaStats::count});
  std::vector<int32_t> blocks;
  for (const double block : random_block_lists(1, 1, kT, kGroups, o.n_sel, o.l_sel, true))
    blocks.push_back(static_cast<int32_t>(block));
  write(ctx, lists, blocks.data());
  const Philox random(3, 9);
  for (const int64_t odd : {int64_t{0}, int64_t{1}, kAPiece - 1, kRows / 2, kRows - 2, kRows - 1}) {
    INFO(device.str() << " " << name_of(dtype) << " row " << odd);
    std::vector<double> gates;
    for (int64_t i = 0; i < 3 * kRows; ++i) gates.push_back(0.1 + 0.9 * random.uniform(static_cast<uint64_t>(i)));
    gates[static_cast<size_t>(kRows + odd)] = NAN;
    write_floats(ctx, gate, gates);
    zero(ctx, pieces);
    nsa_stats(ctx, pieces, gate, lists, o);
    nsa_stats_merge(ctx, out, pieces.view({1, kStatsPieces, NsaStats::count}));
    const NsaStats s = read_stats(ctx, out[0]);
    for (const int64_t field : {F::entropy, F::entropy_min, F::largest, F::largest_max, F::share}) {
      INFO("field " << field);
      CHECK(std::isnan(s.at[field]));
    }
    CHECK(s.at[F::rows] == kRows);
    CHECK(s.at[F::dead] == 0);
    CHECK(s.at[F::collapsed] == 0);
  }
}

// Compares statistics over a model's forward passes with those computed from its activations.
void check_model(Device device, DType dtype, const ModelConfig& config) {
  constexpr int64_t kB = 2, kT = 70;
  ModelFixture f(config, kB, kT, device, dtype, 3, 0.5, RecomputePlan::parse("block", config.n_layers));
  Runtime memory({.device = device, .arena_bytes = 8 << 20});
  LayerStats stats(memory.arena(), config,
                   memory.arena().alloc(MemTag::io, "out", DType::f64, {config.n_layers, NsaStats::count}));
  stats.clear(f.ctx());
  // With recomputation all layers share one buffer for gates, so the gates are read one layer at a time, while the
  // buffer holds that layer's.
  std::vector<std::vector<Rows>> forwards(static_cast<size_t>(config.n_layers));
  for (int pass = 0; pass < 2; ++pass) {
    std::vector<int32_t> tokens(static_cast<size_t>(kB * kT));
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>((7 * i + 11 * pass) % 37);
    write(f.ctx(), f.activations().tokens, tokens.data());
    f.model().forward(f.ctx(), f.activations(), &stats);
    f.model().loss_and_backward(f.ctx(), f.activations(), 1);
    // Backward ends with layer 0, so the buffer that all layers share now contains layer 0's gates.
    forwards[0].push_back({kB, kT, config.n_kv_groups, config.nsa.n_sel,
                           read_floats(f.ctx(), f.activations().layer(0).attention.nsa.gate), f.lists(0)});
    // A forward pass without statistics, after which the shared buffer contains the last layer's gates.
    f.model().forward(f.ctx(), f.activations());
    const int64_t last = config.n_layers - 1;
    forwards[static_cast<size_t>(last)].push_back({kB, kT, config.n_kv_groups, config.nsa.n_sel,
                                                   read_floats(f.ctx(), f.activations().layer(last).attention.nsa.gate),
                                                   f.lists(last)});
  }
  stats.finish(f.ctx());
  for (int64_t i = 0; i < config.n_layers; ++i)
    check_same(read_stats(f.ctx(), stats.result()[i]), reference_stats(forwards[static_cast<size_t>(i)], config.nsa),
               1e-5);
}

void check_models(Device device, DType dtype) {
  for (const GateKind kind : {GateKind::softmax, GateKind::sigmoid})
    for (const double temperature : {1.0, 0.05}) {
      ModelConfig config = small_model();
      config.nsa.gate.kind = kind, config.nsa.gate.temperature = temperature;
      check_model(device, dtype, config);
    }
  for (const Branch forced : {Branch::cmp, Branch::sel, Branch::win}) {
    ModelConfig config = small_model();
    config.nsa.gate.force = forced;
    check_model(device, dtype, config);
  }
  ModelConfig config = small_model();
  config.nsa.gate.uniform = true;
  check_model(device, dtype, config);
}

// Runs `count` steps on initial weights and returns the last one's statistics by layer.
std::vector<NsaStats> steps(Device device, const std::vector<std::string>& sets, int count = 1) {
  Config config = load_config(kTiny, sets).config;
  std::unique_ptr<Runtime> runtime = allocate_planned(config, device);
  TrainStep step(*runtime, config);
  step.model().params().init(runtime->ctx(), 7);
  const int64_t positions = config.train.tokens_per_step();
  TrainStep::Result result;
  for (int64_t i = 0; i < count; ++i) {
    step.begin();
    for (int64_t micro = 0; micro < config.train.accumulate_grad_batches; ++micro) {
      std::vector<int32_t> tokens;
      for (int64_t j = 0; j < config.train.seq_len * config.train.micro_batch_size; ++j)
        tokens.push_back(static_cast<int32_t>((j * 13 + 7 * i + 29 * micro) % config.model.vocab_size));
      step.micro_step(tokens, tokens, positions);
    }
    result = step.finish(i, positions);
  }
  return result.stats;
}

void check_known(Device device, int64_t T, double k_mean, const std::string& gate, const std::string& precision) {
  const std::vector<NsaStats> layers =
      steps(device, {"train.seq_len=" + std::to_string(T), "train.micro_batch_size=2", "nsa.l=32", "nsa.d=16",
                     "nsa.l_sel=64", "nsa.n_sel=16", "nsa.w=64", "nsa.gate=" + gate, "runtime.precision=" + precision});
  REQUIRE(layers.size() == 2);
  for (const NsaStats& s : layers) {
    const double rows = static_cast<double>(2 * T * 2), k_max = static_cast<double>(std::min<int64_t>(T, 1024));
    CHECK(s.at[F::rows] == rows);
    CHECK(s.mean(F::tokens) == k_mean);
    CHECK(s.at[F::tokens_max] == k_max);
    CHECK(s.mean(F::at_max) == (static_cast<double>(T) - k_max + 64) / 64 / static_cast<double>(T));
    CHECK(s.mean(F::entropy) == Approx(std::log(3.0)).epsilon(1e-6));
    CHECK(s.at[F::entropy_min] == Approx(std::log(3.0)).epsilon(1e-6));
    CHECK(s.mean(F::largest) == Approx(1.0 / 3).epsilon(1e-6));
    CHECK(s.at[F::collapsed] == 0);
    for (int b = 0; b < 3; ++b) CHECK(s.mean(F::share + b) == Approx(1.0 / 3).epsilon(1e-6));
    // Consecutive rows' lists differ by a few blocks at most, except where a new block begins.
    CHECK(s.overlap() > 0.5);
    CHECK(s.overlap() < 1);
    CHECK(s.forced_share() > 3.0 / 16);
    CHECK(s.forced_share() < 0.6);
  }
}

void check_same_layers(const std::vector<NsaStats>& a, const std::vector<NsaStats>& b) {
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i)
    for (int64_t j = 0; j < NsaStats::count; ++j) CHECK(a[i].at[j] == b[i].at[j]);
}

void check_counted_once(Device device, const std::string& other) {
  const std::vector<std::string> sets = {"train.accumulate_grad_batches=3", "train.lr=0.05", "train.warmup_steps=0"};
  const std::vector<NsaStats> plain = steps(device, sets, 4);
  REQUIRE(plain.size() == 2);
  for (const NsaStats& s : plain) {
    // 3 micro-steps with 2 sequences, 48 tokens and 2 groups: only the last step's rows count.
    CHECK(s.at[F::rows] == 3 * 2 * 48 * 2);
    CHECK(s.at[F::entropy_min] < std::log(3.0));  // the gates differ from their initial 1/3
  }
  std::vector<std::string> with = sets;
  with.push_back(other);
  check_same_layers(steps(device, with, 4), plain);
}

}  // namespace

TEST_CASE("stats: the sums over gates and lists follow their definition", "[stats]") {
  check_ops(Device::cpu(), DType::f32);
  check_ops(Device::cpu(), DType::f64);
  check_not_a_number(Device::cpu(), DType::f32);
  check_not_a_number(Device::cpu(), DType::f64);
}

TEST_CASE("stats: the sums over gates and lists follow their definition on the GPU", "[stats][gpu]") {
  if (!require_gpu()) return;
  check_ops(Device::cuda(), DType::f32);
  check_not_a_number(Device::cuda(), DType::f32);
}

TEST_CASE("stats: dead rows do not change the sums and extremes of others, in any order of merging", "[stats]") {
  NsaStats dead, even, other;
  dead.add_dead_gates(), dead.add_dead_gates();
  even.add_gates(0.3, 0.3, 0.4, 1.1);
  other.add_gates(0.2, 0.6, 0.2, 0.9), other.add_dead_gates();
  std::vector<const NsaStats*> order = {&dead, &even, &other};
  std::sort(order.begin(), order.end());
  do {
    NsaStats all;
    for (const NsaStats* s : order) all.merge(*s);
    CHECK(all.at[F::rows] == 5);
    CHECK(all.at[F::dead] == 3);
    CHECK(all.at[F::entropy_min] == 0.9);
    CHECK(all.at[F::largest_max] == 0.6);
    CHECK(all.at[F::collapsed] == 0);
    CHECK(all.gate_mean(F::entropy) == Approx(1.0));
    CHECK(all.gate_mean(F::share + 1) == Approx(0.45));
    CHECK(all.mean(F::dead) == 0.6);
  } while (std::next_permutation(order.begin(), order.end()));
  CHECK(std::isnan(dead.gate_mean(F::share)));  // no row has open gates: the mean is undefined
  CHECK(std::isnan(dead.gate_extreme(F::entropy_min)));
}

TEST_CASE("stats: a model's statistics are those of its activations, for every kind of gate", "[stats]") {
  check_models(Device::cpu(), DType::f32);
  check_models(Device::cpu(), DType::f64);
}

TEST_CASE("stats: a model's statistics are those of its activations on the GPU", "[stats][gpu]") {
  if (!require_gpu()) return;
  check_models(Device::cuda(), DType::f32);
  check_models(Device::cuda(), DType::bf16);
}

TEST_CASE("stats: initial gates are 1/3 with entropy ln 3; k is 752.5 at T = 2048 and 256.5 at 512", "[stats]") {
  check_known(Device::cpu(), 2048, 752.5, "softmax", "fp32");
  check_known(Device::cpu(), 512, 256.5, "sigmoid", "fp32");
}

TEST_CASE("stats: initial gates and k on the GPU", "[stats][gpu]") {
  if (!require_gpu()) return;
  check_known(Device::cuda(), 2048, 752.5, "softmax", "bf16");
  check_known(Device::cuda(), 512, 256.5, "sigmoid", "fp32");
}

TEST_CASE("stats: a step counts each forward pass once, and no recomputed pass", "[stats]") {
  check_counted_once(Device::cpu(), "runtime.recompute=block");
  check_counted_once(Device::cpu(), "runtime.recompute=attention");
}

TEST_CASE("stats: a step counts each forward pass once on the GPU, also if a graph is replayed", "[stats][gpu]") {
  if (!require_gpu()) return;
  check_counted_once(Device::cuda(), "runtime.recompute=block");
  check_counted_once(Device::cuda(), "runtime.cuda_graph=true");
}

TEST_CASE("stats: dense attention has none, and log.stats=false disables them", "[stats]") {
  CHECK(steps(Device::cpu(), {"model.attention=dense"}).empty());
  CHECK(steps(Device::cpu(), {"log.stats=false"}).empty());
}
