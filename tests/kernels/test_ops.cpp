// Tests for the OpCase tables. For each op: gradients, the CPU in every dtype, the GPU against the CPU, and the
// benchmark sizes. Each is its own test ("rmsnorm gradients"), so ctest runs them in parallel.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <utility>

#include "engine/check.h"
#include "tests/support/op_driver.h"
#include "tests/support/test.h"

namespace triad::test {

namespace {

constexpr double kGradientTolerance = 1e-6;
// Fraction of rows whose list (an i32 output) may differ between CPU and GPU, since scores are equal within rounding.
constexpr double kListMismatch = 0.005;
// In bf16 the GPU's error may be twice the CPU's, plus half a unit in the last place for cases in which the CPU has
// almost no error: GPU kernels round probabilities to bf16 for the tensor cores, the CPU reference keeps them in fp32.
constexpr double kBf16Factor = 2.0, kBf16Floor = 0x1p-9;
// For a tensor with fewer elements than this, one run is a single draw of a few rounding errors, and the GPU-to-CPU
// error ratio scatters by 1 / sqrt(elements). If it exceeds the bound, the pooled errors of kFurtherSeeds more runs
// must be within the same bound.
constexpr size_t kFewElements = 64;
constexpr uint64_t kFurtherSeeds = 8;
// Bounds on the CPU's error in bf16 and f32 against double: far above rounding, far below what a wrong formula causes.
constexpr double kBf16Sane = 0.05, kF32Sane = 1e-4;

void expect(bool ok, const std::string& what) {
  if (ok) {
    SUCCEED();
  } else {
    FAIL_CHECK(what);
  }
}

std::string label(const OpCase& c, const std::string& where) { return fmt::format("{} {} ({})", c.op, c.name, where); }

void expect_clean(const OpRun& run, const std::string& where) {
  const std::vector<std::string> complaints = run.complaints();
  expect(complaints.empty(), fmt::format("{}: {}", where, fmt::join(complaints, "; ")));
}

bool is_list(const OpRun& run, size_t s) { return run.dtype(s) == DType::i32; }
// True for everything that an op writes: outputs, saved tensors and gradients.
bool is_written(const Slot& slot) { return slot.kind != SlotKind::fixed; }

double mismatched_rows(const OpRun& got, const OpRun& want, size_t s) {
  const std::vector<double> a = got.values(s), b = want.values(s);
  const int64_t cols = got.slots()[s].cols(), rows = got.slots()[s].rows();
  int64_t different = 0;
  for (int64_t r = 0; r < rows; ++r) different += !std::equal(&a[r * cols], &a[r * cols] + cols, &b[r * cols]);
  return rows == 0 ? 0 : static_cast<double>(different) / static_cast<double>(rows);
}

// Checks that every float tensor written by `got` is within `tolerance` of the one written by `want`.
void expect_close(const OpRun& got, const OpRun& want, double tolerance, const std::string& where) {
  for (size_t s = 0; s < got.slots().size(); ++s) {
    if (!is_written(got.slots()[s]) || is_list(got, s)) continue;
    const double error = relative_error(got.values(s), want.values(s));
    expect(error <= tolerance,
           fmt::format("{}: {} has relative error {:.3g} > {:.3g}", where, got.slots()[s].name, error, tolerance));
  }
}

void expect_same_bits(const OpRun& a, const OpRun& b, const std::string& what) {
  expect(a.same_bits(b), what + ": the bits differ");
}

void check_gradients(const OpCase& c) {
  for (const GradientError& e : gradient_errors(c))
    expect(e.error <= kGradientTolerance,
           fmt::format("{}: {} is {:.3g} off the differences of {} elements (limit {:.0e})", label(c, "cpu f64"),
                       e.name, e.error, e.elements, kGradientTolerance));
}

void check_cpu(const OpCase& c) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const std::string where = label(c, fmt::format("cpu {}", name_of(dtype)));
    OpRun first(c, {.dtype = dtype}), second(c, {.dtype = dtype}, &first),
        two_threads(c, {.dtype = dtype, .threads = 2}, &first);
    for (OpRun* run : {&first, &second, &two_threads}) run->run();
    expect_clean(first, where);
    expect_same_bits(first, second, where + ", twice");
    expect_same_bits(first, two_threads, where + ", one thread and two");
    if (dtype == DType::f64) continue;
    OpRun exact(c, {.dtype = DType::f64, .precision = dtype}, &first);
    exact.run();
    expect_close(first, exact, dtype == DType::f32 ? kF32Sane : kBf16Sane, where + " against f64");
  }
}

// Three GPU runs of a case: two with aligned tensors and one with unaligned ones. Checks that no run has complaints and
// that the aligned ones give the same bits.
struct GpuRuns {
  GpuRuns(const OpCase& c, DType dtype, const std::string& where, uint64_t seed = 1)
      : aligned(c, {.device = Device::cuda(), .dtype = dtype, .seed = seed}),
        unaligned(c, {.device = Device::cuda(), .dtype = dtype, .seed = seed, .shift = 1}, &aligned) {
    OpRun again(c, {.device = Device::cuda(), .dtype = dtype, .seed = seed}, &aligned);
    for (OpRun* run : {&aligned, &unaligned, &again}) run->run();
    expect_clean(aligned, where);
    expect_clean(unaligned, where + ", unaligned");
    expect_same_bits(aligned, again, where + ", twice");
  }
  OpRun aligned, unaligned;
};

// Checks that the GPU's lists equal the CPU's for the same inputs, except for ties within rounding.
void expect_same_lists(const GpuRuns& gpu, const OpRun& cpu, const std::string& where) {
  for (size_t s = 0; s < cpu.slots().size(); ++s) {
    if (!is_written(cpu.slots()[s]) || !is_list(cpu, s)) continue;
    for (const OpRun* run : {&gpu.aligned, &gpu.unaligned}) {
      const double mismatch = mismatched_rows(*run, cpu, s);
      expect(mismatch <= kListMismatch,
             fmt::format("{}{}: {} differs from the cpu's in {:.2f}% of its rows", where,
                         run == &gpu.aligned ? "" : ", unaligned", cpu.slots()[s].name, 100 * mismatch));
    }
  }
}

void check_gpu_f32(const OpCase& c) {
  const std::string where = label(c, "cuda f32");
  const GpuRuns gpu(c, DType::f32, where);
  OpRun cpu(c, {.dtype = DType::f32}, &gpu.aligned);
  cpu.run();
  expect_close(gpu.aligned, cpu, c.f32_tolerance, where + " against cpu");
  expect_close(gpu.unaligned, cpu, c.f32_tolerance, where + ", unaligned, against cpu");
  expect_same_lists(gpu, cpu, where);
}

// A tensor's bf16 errors against double: the CPU's, and the GPU's with aligned and with unaligned tensors.
struct Bf16Errors {
  std::string tensor;
  size_t elements;
  double cpu, aligned, unaligned;
  double limit() const { return kBf16Factor * cpu + kBf16Floor; }
  bool ok() const { return std::max(aligned, unaligned) <= limit(); }
};

// Runs a case in bf16. Returns the errors of each tensor that the op writes, by slot index.
std::map<size_t, Bf16Errors> bf16_errors(const OpCase& c, const std::string& where, uint64_t seed) {
  const GpuRuns gpu(c, DType::bf16, where, seed);
  OpRun cpu(c, {.dtype = DType::bf16, .seed = seed}, &gpu.aligned);
  OpRun exact(c, {.dtype = DType::f64, .precision = DType::bf16, .seed = seed}, &gpu.aligned);
  cpu.run();
  exact.run();
  // Only ops without a backward compare lists: whole NSA's lists depend on how intermediate results round.
  if (c.backward == nullptr) expect_same_lists(gpu, cpu, where);
  std::map<size_t, Bf16Errors> errors;
  for (size_t s = 0; s < gpu.aligned.slots().size(); ++s) {
    if (!is_written(gpu.aligned.slots()[s]) || is_list(gpu.aligned, s)) continue;
    const std::vector<double> want = exact.values(s);
    errors[s] = {gpu.aligned.slots()[s].name, want.size(), relative_error(cpu.values(s), want),
                 relative_error(gpu.aligned.values(s), want), relative_error(gpu.unaligned.values(s), want)};
  }
  return errors;
}

// Root mean square of a tensor's errors over several runs.
Bf16Errors pooled(const std::vector<Bf16Errors>& runs) {
  const auto rms = [&](double Bf16Errors::*error) {
    double sum = 0;
    for (const Bf16Errors& e : runs) sum += e.*error * (e.*error);
    return std::sqrt(sum / static_cast<double>(runs.size()));
  };
  return {runs[0].tensor, runs[0].elements, rms(&Bf16Errors::cpu), rms(&Bf16Errors::aligned),
          rms(&Bf16Errors::unaligned)};
}

void check_gpu_bf16(const OpCase& c) {
  const std::string where = label(c, "cuda bf16");
  const auto check = [&](const Bf16Errors& e, const std::string& of) {
    expect(e.ok(), fmt::format("{}: {} is {:.3g} off f64, unaligned {:.3g}, the cpu's bf16 {:.3g} (limit {:.3g}{})",
                               where, e.tensor, e.aligned, e.unaligned, e.cpu, e.limit(), of));
  };
  std::map<size_t, std::vector<Bf16Errors>>
      further;  // more errors, for small tensors beyond the bound in the first run
  for (const auto& [s, errors] : bf16_errors(c, where, 1)) {
    if (errors.ok() || errors.elements >= kFewElements)
      check(errors, "");
    else
      further[s] = {};
  }
  for (uint64_t seed = 2; !further.empty() && seed < 2 + kFurtherSeeds; ++seed) {
    const std::map<size_t, Bf16Errors> errors = bf16_errors(c, where, seed);
    for (auto& [s, runs] : further) runs.push_back(errors.at(s));
  }
  for (const auto& [s, runs] : further) check(pooled(runs), fmt::format(", {} further runs", runs.size()));
}

void check_gpu(const OpCase& c) {
  if (c.gpu_f32) check_gpu_f32(c);
  if (c.gpu_bf16) check_gpu_bf16(c);
}

// Checks a benchmark's size, which is too large for the CPU reference: results must be finite, within bounds and
// repeatable.
void check_bench_size(const OpCase& c) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    if (!(dtype == DType::f32 ? c.gpu_f32 : c.gpu_bf16)) continue;
    const std::string where = label(c, fmt::format("cuda {}", name_of(dtype)));
    OpRun run(c, {.device = Device::cuda(), .dtype = dtype}),
        again(c, {.device = Device::cuda(), .dtype = dtype}, &run);
    run.run();
    again.run();
    expect_clean(run, where);
    expect_same_bits(run, again, where + ", twice");
  }
}

struct OpTest {
  std::string name;
  std::vector<OpCase> cases;
  void (*check)(const OpCase&);
  bool needs_gpu;

  void run() const {
    if (needs_gpu && !require_gpu()) return;
    for (const OpCase& c : cases) {
      DYNAMIC_SECTION(c.name) {  // `triad_tests "nsa cuda" -c 2x33_l4` runs one case
        try {
          check(c);
        } catch (const Error& e) { FAIL_CHECK(label(c, "threw") << ": " << e.what()); }
      }
    }
  }
};

std::vector<OpTest>& op_tests() {
  static std::vector<OpTest> tests = [] {
    std::vector<std::string> ops;
    std::map<std::string, std::vector<OpCase>> checked, benched;
    for (OpCase& c : all_op_cases()) {
      if (std::find(ops.begin(), ops.end(), c.op) == ops.end()) ops.push_back(c.op);
      (c.bench ? benched : checked)[c.op].push_back(std::move(c));
    }
    std::vector<OpTest> all;
    const auto add = [&](std::string name, const std::vector<OpCase>& cases, void (*check)(const OpCase&),
                         bool needs_gpu = false) {
      if (!cases.empty()) all.push_back({std::move(name), cases, check, needs_gpu});
    };
    for (const std::string& op : ops) {
      std::vector<OpCase> on_cpu = checked[op];
      std::erase_if(on_cpu, [](const OpCase& c) { return !c.cpu; });
      std::vector<OpCase> differentiable = on_cpu;
      std::erase_if(differentiable, [](const OpCase& c) { return c.backward == nullptr || !c.differences; });
      add(op + " gradients", differentiable, check_gradients);
      add(op + " cpu", on_cpu, check_cpu);
      add(op + " cuda", checked[op], check_gpu, true);
      add(op + " cuda bench sizes", benched[op], check_bench_size, true);
    }
    return all;
  }();
  return tests;
}

// Catch2 registers plain functions only, so table entry I has its own function.
template <size_t I>
void run_op_test() {
  op_tests()[I].run();
}

constexpr size_t kMaxOpTests = 180;

// The tests that take longest: nsa_attend_selected cuda three minutes, the others a minute or two.
constexpr std::array<std::string_view, 8> kSlow = {"nsa_attend_selected cpu",
                                                   "nsa_attend_selected gradients",
                                                   "nsa_attend_selected cuda",
                                                   "nsa gradients",
                                                   "nsa cuda",
                                                   "nsa_attend_compressed cuda",
                                                   "nsa_attend_window cuda",
                                                   "linear_silu cuda"};

template <size_t... I>
constexpr std::array<void (*)(), sizeof...(I)> make_runners(std::index_sequence<I...>) {
  return {&run_op_test<I>...};
}

}  // namespace

void register_op_tests() {
  static constexpr auto kRunners = make_runners(std::make_index_sequence<kMaxOpTests>());
  TRIAD_CHECK(op_tests().size() <= kMaxOpTests, "{} tests of ops for {} runners", op_tests().size(), kMaxOpTests);
  size_t slow_tests = 0;
  for (size_t i = 0; i < op_tests().size(); ++i) {
    const std::string name = op_tests()[i].name;
    const bool slow = std::find(kSlow.begin(), kSlow.end(), name) != kSlow.end();
    slow_tests += slow;
    REGISTER_TEST_CASE(kRunners[i], name, slow ? "[ops][slow]" : "[ops]");
  }
  TRIAD_CHECK(slow_tests == kSlow.size(), "{} of the {} slow tests of ops exist", slow_tests, kSlow.size());
}

}  // namespace triad::test
