// NSA's kernels on the GPU under extreme conditions: 65,536 tokens and more, offsets past 2^31 and 2^32, +-100 logits,
// one list for all tokens, large and odd head dimensions. Sampled results are compared with NSA's definition, written
// as plain double loops.
#include <algorithm>
#include <numeric>
#include <string>

#include "tests/support/large_nsa.h"

namespace {

using namespace triad;
using namespace triad::test;
using namespace triad::test::large;

struct Sample {
  int64_t t, h;
};
// Returns pairs of a row in [t0, T) and a head: rows near powers of two, where tiles, blocks and sliding windows end,
// and evenly spread rows. Successive pairs cycle through the heads.
std::vector<Sample> sample_rows(const Sizes& n, int64_t t0) {
  std::vector<int64_t> rows = {t0, t0 + 1, n.T - 2, n.T - 1};
  for (int64_t power = 16; power < n.T; power *= 2) rows.insert(rows.end(), {power - 1, power});
  for (int64_t i = 0; i < 64; ++i) rows.push_back(t0 + i * (n.T - 1 - t0) / 63);
  std::erase_if(rows, [&](int64_t t) { return t < t0 || t >= n.T; });
  std::vector<Sample> samples = {{t0, 0}, {n.T - 1, n.Hq() - 1}};
  for (const int64_t t : rows) samples.push_back({t, static_cast<int64_t>(samples.size()) * 7 % n.Hq()});
  return samples;
}

bool all_finite(const Floats& x) {
  return std::all_of(x.begin(), x.end(), [](float f) { return std::isfinite(f); });
}

void check_forward(Problem& p, int b, const Reference& r, const std::vector<Sample>& samples, int64_t t0) {
  const Floats o = p.rows(p.o[b], t0);
  std::vector<double> lse_errors(samples.size());
  const double o_error = worst_of(static_cast<int64_t>(samples.size()), [&](int64_t i) {
    const auto [t, h] = samples[static_cast<size_t>(i)];
    double lse = 0;
    const Expected want = r.output(t, h, lse);
    const double off = lse == r.lse(t, h) ? 0 : std::abs(lse - r.lse(t, h));
    lse_errors[static_cast<size_t>(i)] = std::isfinite(off) ? off : INFINITY;
    return want.error_of(&o[r.row(t, h) * p.n.dv]);
  });
  const double lse_error = *std::max_element(lse_errors.begin(), lse_errors.end());
  CHECK(all_finite(o));
  CHECK(o_error < p.n.tolerance(p.T));
  CHECK(lse_error < p.n.f32_tolerance());
}

void check_backward(Problem& p, int b, const Reference& r, const std::vector<Sample>& samples, int64_t t0) {
  constexpr int64_t kKeys = 16;
  const Sizes& n = p.n;
  const Floats dq = p.rows(p.dq, t0), dk = p.rows(p.dk[b]), dv = p.rows(p.dv[b]);
  CHECK(all_finite(dq));
  CHECK(all_finite(dk));
  CHECK(all_finite(dv));
  const double dq_error = worst_of(static_cast<int64_t>(samples.size()), [&](int64_t i) {
    const auto [t, h] = samples[static_cast<size_t>(i)];
    return r.query_gradient(t, h).error_of(&dq[r.row(t, h) * n.dk]);
  });
  CHECK(dq_error < p.n.tolerance(p.T));
  const int64_t first = r.first_key(), last = p.k[b].size(1) - 1;
  if (last < first) return;
  std::array<double, kKeys> dv_errors{};
  const double dk_error = worst_of(kKeys, [&](int64_t i) {
    const int64_t s = first + i * (last - first) / (kKeys - 1), g = (i + i / n.Hkv) % n.Hkv;
    Expected want_dk(n.dk), want_dv(n.dv);
    r.key_gradients(s, g, want_dk, want_dv);
    dv_errors[static_cast<size_t>(i)] = want_dv.error_of(&dv[(s * n.Hkv + g) * n.dv]);
    return want_dk.error_of(&dk[(s * n.Hkv + g) * n.dk]);
  });
  CHECK(dk_error < p.n.tolerance(p.T));
  CHECK(*std::max_element(dv_errors.begin(), dv_errors.end()) < p.n.tolerance(p.T));
}

// Returns how far, relatively, the lowest score among listed blocks lies below the highest among the others; infinity
// if the list violates a rule.
double list_error(const Sizes& n, const Reference& cmp, int64_t t, int64_t g) {
  const NsaConfig& c = n.c;
  const int64_t current = t / c.l_sel, count = std::min(c.n_sel, current + 1);
  const float *const list = cmp.list(t, g), *const end = list + count;
  auto has = [&](int64_t j) { return std::find(list, end, static_cast<float>(j)) != end; };
  auto forced = [&](int64_t j) { return j < c.init_blocks || j > current - c.local_blocks; };
  bool valid = std::is_sorted(list, end) && std::adjacent_find(list, end) == end && list[0] >= 0;
  for (const float* tail = end; tail < list + c.n_sel; ++tail) valid = valid && *tail == -1;
  std::vector<double> score(static_cast<size_t>(current + 1), 0.0);
  for (const int64_t s : cmp.visible(t, g))
    for (int64_t h = g * n.G; h < (g + 1) * n.G; ++h) {
      const double p = std::exp(cmp.logit(t, h, s) - cmp.lse(t, h)) / static_cast<double>(c.l);
      for (int64_t token = s * c.d; token < s * c.d + c.l; ++token) score[static_cast<size_t>(token / c.l_sel)] += p;
    }
  double lowest_listed = INFINITY, highest_unlisted = 0;
  for (int64_t j = 0; j <= current; ++j) {
    const double x = score[static_cast<size_t>(j)];
    if (forced(j)) valid = valid && has(j);
    if (!forced(j) && has(j)) lowest_listed = std::min(lowest_listed, x);
    if (!forced(j) && !has(j)) highest_unlisted = std::max(highest_unlisted, x);
  }
  if (!valid) return INFINITY;
  return lowest_listed >= highest_unlisted ? 0 : 1 - lowest_listed / highest_unlisted;
}

void check_selection(Problem& p, const Reference& cmp, const std::vector<Sample>& samples) {
  const double error = worst_of(static_cast<int64_t>(samples.size()), [&](int64_t i) {
    const auto [t, h] = samples[static_cast<size_t>(i)];
    return list_error(p.n, cmp, t, h / p.n.G);
  });
  CHECK(error < 1e-5);
}

// out = sum_b gate_b * o_b; delta_b = gate_b * dout.o_b; dgate_b = dout.o_b, summed over the group's heads
void check_combine(Problem& p, const std::vector<Sample>& samples, int64_t t0) {
  const Sizes& n = p.n;
  const Floats out = p.rows(p.out, t0), dout = p.rows(p.dout, t0);
  std::array<Floats, 3> o, gate, delta, dgate;
  for (int b = 0; b < 3; ++b)
    o[b] = p.rows(p.o[b], t0), gate[b] = p.rows(p.gate[b], t0), delta[b] = p.rows(p.delta[b], t0),
    dgate[b] = p.rows(p.dgate[b], t0);
  const double error = worst_of(static_cast<int64_t>(samples.size()), [&](int64_t i) {
    const auto [t, h] = samples[static_cast<size_t>(i)];
    const int64_t row = (t - t0) * n.Hq() + h, group = (t - t0) * n.Hkv + h / n.G;
    Expected want(n.dv);
    double worst = 0;
    for (int b = 0; b < 3; ++b) {
      const float weight = gate[b][static_cast<size_t>(group)];
      want.add(weight, &o[b][row * n.dv]);
      Expected want_delta(1), want_dgate(1);
      for (int64_t j = 0; j < n.G * n.dv; ++j) {
        const int64_t at = group * n.G * n.dv + j;
        want_dgate.add(dout[static_cast<size_t>(at)], &o[b][at]);
        if (at / n.dv == row) want_delta.add(static_cast<double>(weight) * dout[static_cast<size_t>(at)], &o[b][at]);
      }
      worst = std::max({worst, want_delta.error_of(&delta[b][row]), want_dgate.error_of(&dgate[b][group])});
    }
    return std::max(worst, want.error_of(&out[row * n.dv]));
  });
  CHECK(error < p.n.tolerance(p.T));
}

// Compares all results at sampled rows in [t0, T), and at keys that no earlier row sees. If `lists` isn't empty, the
// selected branch uses them instead of computed ones.
void check_problem(Problem& p, int64_t t0 = 0, const std::vector<int32_t>& lists = {}) {
  const std::vector<Sample> samples = sample_rows(p.n, t0);
  if (!lists.empty()) write(p.ctx(), p.lists, lists.data());
  p.forward(lists.empty());
  check_combine(p, samples, t0);
  for (int b = 0; b < 3; ++b) {
    if (!lists.empty() && b != kSel) continue;
    INFO("the " << kBranches[b] << " branch");
    const Reference r(p, b, t0);
    check_forward(p, b, r, samples, t0);
    if (b == kCmp) check_selection(p, r, samples);
    p.backward(b);
    check_backward(p, b, r, samples, t0);
  }
}

// Returns the memory that a problem needs, found by a dry run, which needs no GPU.
Runtime::Options options_for(const Sizes& n, DType dtype) {
  return memory_for([&](Runtime& plan) {
    Problem p(plan, n, dtype);
    p.forward();
    for (int b = 0; b < 3; ++b) p.backward(b);
  });
}

void check_sizes(const Sizes& n, DType dtype, int64_t t0 = 0, const std::vector<int32_t>& lists = {}) {
  INFO(n.str() << " " << name_of(dtype));
  const Runtime::Options options = options_for(n, dtype);
  if (!require_gpu_memory(options.arena_bytes)) return;
  Runtime rt(options);
  Problem p(rt, n, dtype);
  check_problem(p, t0, lists);
}

std::vector<std::byte> bytes_of(Problem& p, std::initializer_list<Tensor> tensors) {
  std::vector<std::byte> all;
  for (const Tensor& t : tensors) {
    const size_t begin = all.size();
    all.resize(begin + static_cast<size_t>(t.bytes()));
    read(p.ctx(), all.data() + begin, t);
  }
  return all;
}

// Checks that two runs give the same bits.
void check_repeats(const Sizes& n, DType dtype) {
  INFO(n.str() << " " << name_of(dtype));
  Runtime rt(options_for(n, dtype));
  Problem p(rt, n, dtype);
  auto run = [&] {
    p.forward();
    std::vector<std::vector<std::byte>> results = {bytes_of(p, {p.out, p.dgate, p.delta, p.lists})};
    for (int b = 0; b < 3; ++b) {
      p.backward(b);
      results.push_back(bytes_of(p, {p.o[b], p.lse[b], p.dq, p.dk[b], p.dv[b]}));
    }
    return results;
  };
  const auto first = run(), second = run();
  for (size_t i = 0; i < first.size(); ++i) {
    INFO(i);
    const bool equal = first[i] == second[i];
    CHECK(equal);
  }
}

constexpr DType kGpuTypes[] = {DType::f32, DType::bf16};

}  // namespace

TEST_CASE("NSA agrees with its definition at 8,192 and 65,536 tokens (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  for (const int64_t T : {8192, 65536})
    for (const DType dtype : kGpuTypes) check_sizes({T, 2, 6, 64, 64}, dtype);
}

// These sequences have more blocks than a shared KV tile's bit masks have bits. Only the last rows, and the keys that
// no earlier row sees, are checked.
TEST_CASE("NSA agrees with its definition at 65,601 to a million tokens (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  for (const Sizes& n :
       {Sizes{65601, 1, 6, 64, 64}, {131101, 2, 3, 64, 64}, {1048583, 1, 1, 64, 64}, {80003, 1, 2, 128, 128}})
    check_sizes(n, DType::bf16, n.T - 1200);
}

TEST_CASE("NSA gives the same bits twice at 8,192 tokens (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  for (const DType dtype : kGpuTypes) check_repeats({8192, 2, 6, 64, 64}, dtype);
}

// 65,536 tokens with 272 heads, 128 wide, are 2.3e9 elements. Only keys near the end are checked, which few rows see.
TEST_CASE("NSA is right past 2^31 elements (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  check_sizes({65536, 17, 16, 128, 128}, DType::bf16, 65536 - 1200);
}

// Rows are 15 million elements apart. With two 150-token sequences, the second begins past 2^31 elements and ends past
// 2^32.
TEST_CASE("NSA is right with strides that lead past 2^31 and 2^32 elements (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  for (const int64_t B : {1, 2})
    for (const DType dtype : kGpuTypes)
      check_sizes({.T = 300 / B,
                   .Hkv = 2,
                   .G = 6,
                   .dk = 64,
                   .dv = 64,
                   .c = config(4, 2, 16, 6, 100),
                   .row_stride = 15'000'064,
                   .B = B},
                  dtype);
}

TEST_CASE("NSA is finite and right with logits of +-100 and sums near exp(-120) (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  for (const DType dtype : kGpuTypes)
    for (const int64_t dk : {64, 128}) {
      check_sizes({.T = 1500, .Hkv = 2, .G = 6, .dk = dk, .dv = 64, .logit_std = 35}, dtype);
      check_sizes({.T = 1500, .Hkv = 2, .G = 6, .dk = dk, .dv = 64, .logit_mean = -120}, dtype);
    }
}

TEST_CASE("NSA's selected branch is right with one list for all tokens (GPU)", "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  const Sizes n{8192, 2, 6, 64, 64};
  for (const std::vector<int32_t>& list : {std::vector<int32_t>{0}, {0, 1, 2, 3, 40, 41, 63, 64, 100, 120, 127}}) {
    std::vector<int32_t> lists(static_cast<size_t>(n.T * n.Hkv * n.c.n_sel), -1);
    for (size_t row = 0; row < lists.size(); row += static_cast<size_t>(n.c.n_sel))
      std::copy(list.begin(), list.end(), lists.begin() + static_cast<int64_t>(row));
    for (const DType dtype : kGpuTypes) check_sizes(n, dtype, 0, lists);
  }
  // Lists may contain blocks after a row's own. With 2,048 tokens a list fits into one word's bits.
  const Sizes short_sequence{2048, 2, 6, 64, 64};
  std::vector<int32_t> later_blocks(static_cast<size_t>(short_sequence.T * short_sequence.Hkv * short_sequence.c.n_sel),
                                    -1);
  for (size_t row = 0; row < later_blocks.size(); row += static_cast<size_t>(short_sequence.c.n_sel))
    later_blocks[row] = 0, later_blocks[row + 1] = 31;
  check_sizes(short_sequence, DType::bf16, 0, later_blocks);
  // One list for all tokens, in a sequence with over 1,024 blocks.
  const Sizes long_sequence{65601, 1, 6, 64, 64};
  std::vector<int32_t> lists(static_cast<size_t>(long_sequence.T * long_sequence.c.n_sel), -1);
  for (size_t row = 0; row < lists.size(); row += static_cast<size_t>(long_sequence.c.n_sel))
    std::iota(lists.begin() + static_cast<int64_t>(row), lists.begin() + static_cast<int64_t>(row) + 5, 0);
  check_sizes(long_sequence, DType::bf16, long_sequence.T - 1200, lists);
}

TEST_CASE("NSA is right for groups of 12 and 16 heads, and for large and odd head dimensions (GPU)",
          "[nsa][gpu][large]") {
  if (!require_gpu()) return;
  for (const DType dtype : kGpuTypes)
    for (const Sizes& n :
         {Sizes{1111, 1, 12, 64, 64}, {1111, 2, 16, 192, 128}, {777, 2, 12, 100, 60}, {1500, 1, 12, 192, 128}})
      check_sizes(n, dtype);
  // Here a 128-key selection block is longer than a CTA's 64-token tile.
  check_sizes({40000, 1, 10, 64, 64, config(32, 16, 128, 16, 512)}, DType::bf16, 40000 - 700);
}
