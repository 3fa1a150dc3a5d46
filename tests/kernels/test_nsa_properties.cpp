// NSA properties that hold for any data, checked by the same code on the CPU and on a GPU: every row equals the
// definition in plain double loops, causality, the selected-token count, each compressed block's weight in a selection
// block's score (NSA paper, Eq. 9), ties, and gradient conservation laws.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/support/nsa_problem.h"

namespace {

using namespace triad;
using namespace triad::test;

// Returns one row's softmax(q k^T / sqrt(dk)) v over the listed keys, computed as the definition says.
Values attend_row(const double* q, const Values& k, const Values& v, const std::vector<int64_t>& keys, int64_t g,
                  const Sizes& n) {
  Values p, o(static_cast<size_t>(n.dv), 0.0);
  double max = -INFINITY, sum = 0;
  for (const int64_t s : keys) {
    double score = 0;
    for (int64_t j = 0; j < n.dk; ++j) score += q[j] * k[static_cast<size_t>((s * n.Hkv + g) * n.dk + j)];
    p.push_back(score / std::sqrt(static_cast<double>(n.dk)));
    max = std::max(max, p.back());
  }
  for (double& x : p) sum += x = std::exp(x - max);
  for (size_t i = 0; i < keys.size(); ++i)
    for (int64_t j = 0; j < n.dv; ++j)
      o[static_cast<size_t>(j)] += p[i] / sum * v[static_cast<size_t>((keys[i] * n.Hkv + g) * n.dv + j)];
  return o;
}

// Returns all rows if the sequence is short; else rows near powers of two, some evenly spread rows and both ends.
std::vector<int64_t> sample_rows(int64_t T) {
  std::vector<int64_t> rows;
  for (int64_t t = 0; t < T; ++t)
    if (T <= 40 || t == 0 || t == T - 1 || (t > 15 && ((t & (t - 1)) == 0 || (t & (t + 1)) == 0)) || t % 97 == 50)
      rows.push_back(t);
  return rows;
}

// Returns the relative L2 error of o [1,T,Hq,dv] over sampled rows, against branch b's definition.
double error_of_rows(Problem& p, int b, const Tensor& o) {
  const Sizes& n = p.n;
  const Values q = p.lab.values(p.q), k = p.lab.values(p.keys(b)), v = p.lab.values(p.vals(b)), got = p.lab.values(o);
  const Values lists = p.lab.values(p.saved.block_index);
  double error = 0, norm = 0;
  for (const int64_t t : sample_rows(n.T))
    for (int64_t h = 0; h < n.Hq(); ++h) {
      const int64_t row = t * n.Hq() + h;
      const Values want =
          attend_row(&q[static_cast<size_t>(row * n.dk)], k, v, p.visible(b, t, h / n.G, lists), h / n.G, n);
      for (int64_t j = 0; j < n.dv; ++j) {
        const double difference = got[static_cast<size_t>(row * n.dv + j)] - want[static_cast<size_t>(j)];
        error += difference * difference, norm += want[static_cast<size_t>(j)] * want[static_cast<size_t>(j)];
      }
    }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

// Checks that each list is ascending and unique, ends with -1 where it is not full, contains the forced blocks, and is
// as long as possible.
void check_lists(Problem& p) {
  const Values lists = p.lab.values(p.saved.block_index);
  bool ordered = true, forced = true, full = true;
  for (int64_t row = 0; row < p.n.T * p.n.Hkv; ++row) {
    const double* list = &lists[static_cast<size_t>(row * p.c.n_sel)];
    const int64_t current = row / p.n.Hkv / p.c.l_sel;
    const double* end = std::find(list, list + p.c.n_sel, -1.0);
    auto has = [&](int64_t j) { return j < 0 || std::find(list, end, static_cast<double>(j)) != end; };
    ordered = ordered && std::is_sorted(list, end) && std::adjacent_find(list, end) == end &&
              std::all_of(end, list + p.c.n_sel, [](double j) { return j == -1; });
    forced = forced && has(0) && has(current) && has(current - 1);
    full = full && end - list == std::min(p.c.n_sel, current + 1);
  }
  CHECK(ordered);
  CHECK(forced);
  CHECK(full);
}

// Checks two gradient conservation laws. Softmax weights sum to one, so dv sums to dout over the rows that see a key.
// Logits are bilinear in q and k, so <dq, q> = <dk, k>.
void check_conservation(Problem& p, int b) {
  const Sizes& n = p.n;
  Lab& lab = p.lab;
  const DType T = lab.setting.dtype, acc = acc_dtype(T);
  const Tensor dout = lab.from(random_values(p.out.numel(), 99), p.out.shape(), T);
  const Tensor delta = lab.poisoned(p.saved.lse[b].shape(), acc), dq = lab.poisoned(p.q.shape(), acc);
  const Tensor dk = lab.poisoned(p.keys(b).shape(), T), dv = lab.poisoned(p.vals(b).shape(), T);
  attention_delta(lab.ctx(), delta, dout, p.saved.o[b]);
  zero(lab.ctx(), dq);
  const AttendGradOut out{dq, dk, dv};
  const AttendIn in{p.q, p.keys(b), p.vals(b)};
  Scratch::Scope scope(lab.ctx().scratch);
  const Tensor rounding_unit = attend_rounding_unit(lab.ctx(), scope, dq, dout, in.q, {{in.k, in.v, {}, delta}});
  const AttendGradIn grad{dout, {}, delta, p.saved.lse[b], rounding_unit};
  if (b == kCmp) nsa_attend_compressed_backward(lab.ctx(), out, grad, in, p.c);
  if (b == kSel) nsa_attend_selected_backward(lab.ctx(), out, grad, in, p.saved.block_index, p.c.l_sel);
  if (b == kWin) nsa_attend_window_backward(lab.ctx(), out, grad, in, p.c.w);

  auto close = [&](double x, double y, double scale) {
    return std::abs(x - y) <= lab.setting.tolerance() * (scale + 1);
  };
  auto product = [](const Values& x, const Values& y, double& scale) {
    double sum = 0;
    for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i], scale += std::abs(x[i] * y[i]);
    return sum;
  };
  double scale = 0;
  const double q_side = product(lab.values(dq), lab.values(p.q), scale);
  const double k_side = product(lab.values(dk), lab.values(p.keys(b)), scale);
  CHECK(close(q_side, k_side, scale));

  const Values dv_values = lab.values(dv), dout_values = lab.values(dout), lse = lab.values(p.saved.lse[b]);
  double given = 0, received = 0, total = 0;
  for (const double x : dv_values) received += x, total += std::abs(x);
  for (size_t row = 0; row < lse.size(); ++row)
    for (int64_t j = 0; j < n.dv && std::isfinite(lse[row]); ++j) {
      const double x = dout_values[row * static_cast<size_t>(n.dv) + static_cast<size_t>(j)];
      given += x, total += std::abs(x);
    }
  CHECK(close(given, received, total));
}

// Changes all of token s's inputs, and checks that earlier tokens' outputs and lists keep their bits and that later
// outputs change.
void check_causality(Problem& p, int64_t s) {
  const Values before = p.lab.values(p.out), lists_before = p.lab.values(p.saved.block_index);
  uint64_t stream = 1000;
  auto change = [&](const Tensor& t) {
    const Tensor row = t.slice(1, s, s + 1);
    Values values = random_values(row.numel(), stream++);
    for (double& x : values) x *= 3;
    p.lab.assign(row, values);
  };
  change(p.q);
  for (int b = 0; b < 3; ++b) change(p.k[b]), change(p.v[b]);
  p.forward();
  const Values after = p.lab.values(p.out), lists_after = p.lab.values(p.saved.block_index);
  CHECK(std::equal(before.begin(), before.begin() + s * p.n.Hq() * p.n.dv, after.begin()));
  CHECK(std::equal(lists_before.begin(), lists_before.begin() + s * p.n.Hkv * p.c.n_sel, lists_after.begin()));
  const bool changed =
      !std::equal(before.begin() + s * p.n.Hq() * p.n.dv, before.end(), after.begin() + s * p.n.Hq() * p.n.dv);
  CHECK(changed);
}

// Runs all checks above for one shape.
void check_shape(const Setting& setting, const Sizes& n) {
  INFO(n.str() << " " << name_of(setting.dtype));
  Problem p(setting, n, config(32, 16, 32, 5, 100));
  p.forward();
  check_lists(p);
  const Values out = p.lab.values(p.out);
  CHECK(std::all_of(out.begin(), out.end(), [](double x) { return std::isfinite(x); }));
  for (int b = 0; b < 3; ++b) {
    INFO("branch " << b);
    CHECK(error_of_rows(p, b, p.saved.o[b]) < setting.tolerance());
    check_conservation(p, b);
  }
  check_causality(p, n.T / 2);

  Problem dense(setting, n, config(32, 16, 32, 5, n.T, Branch::win));
  dense.forward();
  CHECK(error_of_rows(dense, kWin, dense.out) < setting.tolerance());
}

// Checks up to 60 shapes, those with T <= T_max. Together they pair every length with every group size, and every head
// dimension with every length and group size.
void check_cover(const Setting& setting, int64_t T_max) {
  const std::vector<int64_t> lengths = {1, 15, 31, 32, 33, 63, 65, 127, 507, 2048}, groups = {1, 2, 4, 6, 8, 16};
  const std::vector<std::pair<int64_t, int64_t>> widths = {{32, 32}, {64, 64}, {128, 128}, {192, 128}, {60, 100}};
  for (size_t i = 0; i < lengths.size() && lengths[i] <= T_max; ++i)
    for (size_t j = 0; j < groups.size(); ++j) {
      const auto [dk, dv] = widths[(i + j) % widths.size()];
      check_shape(setting, {lengths[i], groups[j] < 8 ? 2 : 1, groups[j], dk, dv});
    }
}

// ---- mean and maximum selected-token counts, which follow from n_sel and l_sel ----

void check_token_counts(const Setting& setting, int64_t T, double mean, int64_t max) {
  INFO("T " << T);
  Problem p(setting, {T, 1, 2, 32, 32}, config(32, 16, 64, 16, 64));
  p.forward();
  check_lists(p);
  const Values lists = p.lab.values(p.saved.block_index);
  int64_t sum = 0, largest = 0;
  for (int64_t t = 0; t < T; ++t) {
    const int64_t count = static_cast<int64_t>(p.visible(kSel, t, 0, lists).size());
    sum += count, largest = std::max(largest, count);
  }
  CHECK(static_cast<double>(sum) / static_cast<double>(T) == mean);
  CHECK(largest == max);
}

// ---- configurations in which a branch equals dense attention ----

void check_dense_limits(const Setting& setting) {
  for (const Sizes& n : {Sizes{1, 1, 1, 32, 32}, {33, 2, 4, 64, 64}, {127, 1, 6, 32, 32}, {100, 2, 2, 60, 100}})
    for (const Branch branch : {Branch::cmp, Branch::sel, Branch::win}) {
      INFO(n.str() << " branch " << static_cast<int>(branch));
      Problem p(setting, n, config(1, 1, 1, std::max<int64_t>(n.T, 3), n.T + 5, branch));
      p.forward();
      const int b = static_cast<int>(branch);
      const Values lists = p.lab.values(p.saved.block_index);
      bool all_seen = true;
      for (int64_t t = 0; t < n.T; ++t)
        all_seen = all_seen && static_cast<int64_t>(p.visible(b, t, 0, lists).size()) == t + 1;
      CHECK(all_seen);
      CHECK(error_of_rows(p, b, p.out) < setting.tolerance());
    }
}

void check_equal_heads(const Setting& setting) {
  const Sizes n{200, 2, 6, 64, 64};
  Problem p(setting, n, config(32, 16, 32, 5, 60));
  Values q = p.lab.values(p.q);
  for (int64_t row = 0; row < n.T * n.Hq(); ++row)
    std::copy_n(q.begin() + row / n.G * n.G * n.dk, n.dk, q.begin() + row * n.dk);
  p.lab.assign(p.q, q);
  p.forward();
  const Values out = p.lab.values(p.out);
  double worst = 0;
  for (int64_t row = 0; row < n.T * n.Hq(); ++row)
    for (int64_t j = 0; j < n.dv; ++j)
      worst = std::max(worst, std::abs(out[static_cast<size_t>(row * n.dv + j)] -
                                       out[static_cast<size_t>(row / n.G * n.G * n.dv + j)]));
  CHECK(worst < (setting.dtype == DType::bf16 ? 2e-2 : 1e-6));
}

// ---- the selection rule, for chosen compressed-block probabilities ----

// Returns the last row's list (of T rows) if compressed block c has probability p[h][c] in head h (two heads). To
// obtain these probabilities, q_h is sqrt(dk) in column h and 0 elsewhere, and k_c is ln p[h][c] + lse_h in column h.
std::vector<int64_t> last_list(const Setting& setting, const std::array<Values, 2>& p, int64_t T,
                               const SelectOptions& o) {
  constexpr int64_t kHeads = 2, kWidth = 64;
  constexpr double kLse[kHeads] = {0, 1.5};
  Lab lab(setting);
  const int64_t Tc = compressed_length(T, o.l, o.d);
  Values q(static_cast<size_t>(T * kHeads * kWidth), 0.0), k(static_cast<size_t>(Tc * kWidth), 0.0), lse;
  for (int64_t row = 0; row < T * kHeads; ++row) {
    q[static_cast<size_t>(row * kWidth + row % kHeads)] = 8;
    lse.push_back(kLse[row % kHeads]);
  }
  for (size_t h = 0; h < kHeads; ++h)
    for (size_t c = 0; c < k.size() / kWidth; ++c) k[c * kWidth + h] = std::log(std::max(p[h][c], 1e-20)) + kLse[h];
  const Tensor lists = lab.poisoned({1, T, 1, o.n_sel}, DType::i32);
  nsa_select(lab.ctx(), lists, lab.from(q, {1, T, kHeads, kWidth}, setting.dtype),
             lab.from(k, {1, Tc, 1, kWidth}, setting.dtype), lab.from(lse, {1, T, kHeads}, DType::f32), o);
  const Values values = lab.values(lists);
  return {values.end() - o.n_sel, values.end()};
}

// With l = 32, d = 16 and 64-token selection blocks, block j's score sums the probabilities of compressed blocks 4j + i
// with weights 1/2, 1, 1, 1, 1/2, for i = -1 .. 3. The test gives one of these blocks probability 1. Block j must then
// win the one free slot against a block whose score is slightly lower, and lose it if that score is slightly higher.
void check_golden_weights(const Setting& setting) {
  const int64_t T = 64 * 12, j = 5, rival = 8;
  const SelectOptions o{32, 16, 64, 4};
  const double weights[] = {0.5, 1, 1, 1, 0.5};
  for (int64_t i = -1; i <= 3; ++i)
    for (const double factor : {0.95, 1.05}) {
      INFO("block 4j + " << i << ", rival " << factor);
      Values p(static_cast<size_t>(compressed_length(T, o.l, o.d)), 0.0);
      p[static_cast<size_t>(4 * j + i)] = 1;
      p[static_cast<size_t>(4 * rival + 1)] = factor * weights[i + 1];
      // Compressed block 4j - 1 (i = -1) adds equally to both scores, j - 1 and j; the lower index wins.
      const int64_t tied = i == -1 ? j - 1 : j;
      CHECK(last_list(setting, {p, p}, T, o) == std::vector<int64_t>{0, factor < 1 ? tied : rival, 10, 11});
    }
}

void check_ties(const Setting& setting) {
  const SelectOptions o{32, 16, 64, 6};
  const Values ones(static_cast<size_t>(compressed_length(64 * 12, o.l, o.d)), 1.0);
  CHECK(last_list(setting, {ones, ones}, 64 * 12, o) == std::vector<int64_t>{0, 1, 2, 3, 10, 11});
  CHECK(last_list(setting, {ones, ones}, 64 * 3, o) == std::vector<int64_t>{0, 1, 2, -1, -1, -1});
}

// Each head gives probability 0.5 to a block that the other does not, and 0.4 to block 5. Block 5 has the highest sum
// over the group's heads, so it wins the free slot.
void check_group_sum(const Setting& setting) {
  const SelectOptions o{32, 16, 64, 4};
  const int64_t T = 64 * 12;
  const Values nothing(static_cast<size_t>(compressed_length(T, o.l, o.d)), 0.0);
  std::array<Values, 2> p = {nothing, nothing};
  p[0][13] = p[1][29] = 0.5, p[0][21] = p[1][21] = 0.4;  // compressed blocks within selection blocks 3, 7 and 5
  CHECK(last_list(setting, p, T, o) == std::vector<int64_t>{0, 5, 10, 11});
}

// Checks lists that no selection produces: one block for all rows, short lists, and rows that do not list their own
// block.
void check_given_lists(const Setting& setting) {
  const Sizes n{300, 2, 4, 64, 64};
  Problem p(setting, n, config(32, 16, 32, 6, 64));
  auto list_of = [&](int64_t kind, int64_t t) -> std::vector<double> {
    const double current = static_cast<double>(t / p.c.l_sel);
    if (kind == 0) return {0};
    if (kind == 1) return {current};
    if (t % 3 == 0 || current < 3) return {0};  // varied list lengths
    return {0, std::floor(current / 2), current};
  };
  for (int64_t kind = 0; kind < 3; ++kind) {
    INFO("kind " << kind);
    Values lists(static_cast<size_t>(n.T * n.Hkv * p.c.n_sel), -1.0);
    for (int64_t row = 0; row < n.T * n.Hkv; ++row) {
      const std::vector<double> list = list_of(kind, row / n.Hkv);
      std::copy(list.begin(), list.end(), lists.begin() + row * p.c.n_sel);
    }
    p.lab.assign(p.saved.block_index, lists);
    p.forward(true);
    CHECK(error_of_rows(p, kSel, p.saved.o[kSel]) < setting.tolerance());
    check_conservation(p, kSel);
  }
}

}  // namespace

TEST_CASE("NSA follows its definition for every pair of sizes (CPU)", "[nsa]") {
  check_cover(kCpu, 507);
  check_shape(kCpu, {2048, 2, 6, 64, 64});
}
TEST_CASE("NSA follows its definition for every pair of sizes (GPU)", "[nsa][gpu]") {
  on_gpu([](const Setting& s) { check_cover(s, 2048); });
}

TEST_CASE("NSA selects the number of tokens that n_sel and l_sel imply (CPU)", "[nsa]") {
  check_token_counts(kCpu, 512, 256.5, 512);
  check_token_counts(kCpu, 2048, 752.5, 1024);
}
// 8-key blocks leave half a warp's 16 keys without a token. Scores of -128 make p infinite there, if they are not
// masked: lse is about -128 too, and the score of a missing key is 0.
TEST_CASE("dq is finite if scores are very negative and blocks are shorter than a tile (GPU)", "[nsa][gpu]") {
  if (!require_gpu()) return;
  constexpr int64_t kT = 21, kBlock = 8, kLists = 3;
  for (const int64_t width : {64, 128})
    for (const bool portable : {false, true}) {
      Lab lab({Device::cuda(), DType::bf16});
      Context& ctx = lab.ctx();
      ctx.portable_only = portable;
      const Shape q_shape = {1, kT, 2, width}, k_shape = {1, kT, 1, width};
      const double side = std::sqrt(128 / std::sqrt(static_cast<double>(width)));
      const auto filled = [&](const Shape& shape, double x) {
        return lab.from(Values(static_cast<size_t>(shape.numel()), x), shape, DType::bf16);
      };
      const Tensor q = filled(q_shape, side), k = filled(k_shape, -side);
      const Tensor v = lab.from(random_values(kT * width, 1), k_shape, DType::bf16),
                   dout = lab.from(random_values(2 * kT * width, 2), q_shape, DType::bf16);
      Values entries;
      for (int64_t t = 0; t < kT; ++t)
        for (int64_t i = 0; i < kLists; ++i) entries.push_back(i * kBlock <= t ? static_cast<double>(i) : -1.0);
      const Tensor lists = lab.from(entries, {1, kT, 1, kLists}, DType::i32);
      const AttendIn in{q, k, v};
      const Tensor o = lab.poisoned(q_shape, DType::bf16), lse = lab.poisoned({1, kT, 2}, DType::f32),
                   delta = lab.poisoned({1, kT, 2}, DType::f32), dq = lab.poisoned(q_shape, DType::f32);
      nsa_attend_selected_forward(ctx, {o, lse}, in, lists, kBlock);
      attention_delta(ctx, delta, dout, o);
      zero(ctx, dq);
      Scratch::Scope scope(ctx.scratch);
      const Tensor unit = attend_rounding_unit(ctx, scope, dq, dout, q, {{k, v, {}, delta}});
      CHECK(!unit.empty());
      nsa_attend_selected_backward(ctx, {dq, lab.poisoned(k_shape, DType::bf16), lab.poisoned(k_shape, DType::bf16)},
                                   {dout, {}, delta, lse, unit}, in, lists, kBlock);
      for (const double x : lab.values(lse)) CHECK(x < -120);
      for (const double x : lab.values(dq)) CHECK(std::isfinite(x));
    }
}

TEST_CASE("NSA selects the number of tokens that n_sel and l_sel imply (GPU)", "[nsa][gpu]") {
  on_gpu([](const Setting& s) {
    check_token_counts(s, 512, 256.5, 512);
    check_token_counts(s, 2048, 752.5, 1024);
    check_token_counts(s, 4096, 872.5, 1024);
  });
}

TEST_CASE("Each branch of NSA is dense attention if blocks are single tokens and all fit (CPU)", "[nsa]") {
  check_dense_limits(kCpu);
}
TEST_CASE("Each branch of NSA is dense attention if blocks are single tokens and all fit (GPU)", "[nsa][gpu]") {
  on_gpu(check_dense_limits);
}

TEST_CASE("Equal heads of a group give equal outputs of NSA (CPU)", "[nsa]") { check_equal_heads(kCpu); }
TEST_CASE("Equal heads of a group give equal outputs of NSA (GPU)", "[nsa][gpu]") { on_gpu(check_equal_heads); }

TEST_CASE("Selection weighs compressed blocks by their overlap (CPU)", "[nsa]") { check_golden_weights(kCpu); }
TEST_CASE("Selection weighs compressed blocks by their overlap (GPU)", "[nsa][gpu]") { on_gpu(check_golden_weights); }

TEST_CASE("Selection gives ties to the lower index and ends short lists with -1 (CPU)", "[nsa]") { check_ties(kCpu); }
TEST_CASE("Selection gives ties to the lower index and ends short lists with -1 (GPU)", "[nsa][gpu]") {
  on_gpu(check_ties);
}

TEST_CASE("Selection sums the probabilities of a group's heads (CPU)", "[nsa]") { check_group_sum(kCpu); }
TEST_CASE("Selection sums the probabilities of a group's heads (GPU)", "[nsa][gpu]") { on_gpu(check_group_sum); }

TEST_CASE("The selected branch is right for blocks in all lists and for short lists (CPU)", "[nsa]") {
  check_given_lists(kCpu);
}
TEST_CASE("The selected branch is right for blocks in all lists and for short lists (GPU)", "[nsa][gpu]") {
  on_gpu(check_given_lists);
}
