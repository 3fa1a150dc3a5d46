// kernels/library's C functions on GPUs: streams, graph capture, repeated runs, several threads, misaligned inputs;
// and, without a GPU, that planning such a call passes.
#include <thread>

#include "engine/with_cuda.h"
#include "kernels/library/library.h"
#include "tests/support/library_problem.h"

namespace {

using namespace triad;
using namespace triad::test;

std::vector<LibraryCase> gpu_cases() {
  std::vector<LibraryCase> cases = {
      {.name = "64 G4", .B = 2, .T = 777, .Hkv = 2, .G = 4, .dk = 64, .dv = 64},
      {.name = "128 G16 shared", .B = 1, .T = 600, .Hkv = 1, .G = 16, .dk = 128, .dv = 128, .shared = true},
      {.name = "192x128 G1 learned", .B = 1, .T = 500, .Hkv = 2, .G = 1, .dk = 192, .dv = 128, .learned = true},
      {.name = "128 G2 per head", .B = 1, .T = 700, .Hkv = 2, .G = 2, .dk = 128, .dv = 128, .gates = Gates::per_head},
      {.name = "64 G6 documents", .B = 1, .T = 2048, .Hkv = 1, .G = 6, .dk = 64, .dv = 64, .bounds = {0, 781, 2048}},
      {.name = "64 G8 documents, per head, scale",
       .B = 1,
       .T = 333,
       .Hkv = 1,
       .G = 8,
       .dk = 64,
       .dv = 64,
       .gates = Gates::per_head,
       .negative = true,
       .bounds = {0, 3, 33, 70, 333},
       .scale = 0.2},
      {.name = "40x24", .B = 1, .T = 257, .Hkv = 2, .G = 2, .dk = 40, .dv = 24},
  };
  for (LibraryCase& n : cases) n.options = {32, 16, 64, 4, 100};
  return cases;
}

// The same, and one so large that the call gets its own main stream (kernels/library/README.md).
std::vector<LibraryCase> gpu_cases_and_large() {
  std::vector<LibraryCase> cases = gpu_cases();
  cases.push_back({.name = "large", .B = 2, .T = 4096, .Hkv = 2, .G = 8, .dk = 64, .dv = 64});
  cases.back().options = {32, 16, 64, 16, 512};
  return cases;
}

std::map<std::string, Values> results_of(const Setting& setting, const LibraryCase& n) {
  LibraryProblem p(setting, n);
  p.forward();
  p.backward();
  return p.results();
}

void check_finite(const std::map<std::string, Values>& results) {
  for (const auto& [name, values] : results) {
    INFO(name);
    CHECK(std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); }));
  }
}

}  // namespace

TEST_CASE("library: GPUs compute what the CPU computes") {
  if (!require_gpu()) return;
  for (LibraryCase n : gpu_cases()) {
    n.options[3] = 40;  // all blocks in every list, since roundings may change a list
    const std::map<std::string, Values> expected = results_of({Device::cpu(), DType::f32}, n);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const std::map<std::string, Values> results = results_of({Device::cuda(), dtype}, n);
      // bf16 inputs are rounded, so bf16 results are compared with the CPU's in bf16.
      const std::map<std::string, Values> on_cpu =
          dtype == DType::f32 ? expected : results_of({Device::cpu(), dtype}, n);
      for (const auto& [name, values] : results) {
        INFO(n.name << " " << name_of(dtype) << " " << name);
        CHECK(relative_error(values, on_cpu.at(name)) <= (dtype == DType::f32 ? 5e-5 : 2e-2));
      }
    }
  }
}

TEST_CASE("library: two runs give the same bits, on any stream") {
  on_gpu([](const Setting& setting) {
    for (const LibraryCase& n : gpu_cases_and_large()) {
      INFO(n.name << " " << name_of(setting.dtype));
      LibraryProblem p(setting, n);
      p.forward();
      p.backward();
      const std::map<std::string, Values> expected = p.results();
      check_finite(expected);
      p.forward();
      p.backward();
      CHECK(p.results() == expected);
      p.lab.ctx().stream.synchronize();
      p.forward(nullptr);  // the legacy default stream
      p.backward(nullptr);
      backend::synchronize(setting.device, nullptr);
      CHECK(p.results() == expected);
      p.options.flags |= TRIAD_NSA_UNCHECKED_POINTERS;
      Stream other(setting.device, "other");
      p.forward(other.handle());
      p.backward(other.handle());
      other.synchronize();
      CHECK(p.results() == expected);
    }
  });
}

TEST_CASE("library: calls in a graph capture") {
  on_gpu([](const Setting& setting) {
    for (const LibraryCase& n : gpu_cases_and_large()) {
      INFO(n.name << " " << name_of(setting.dtype));
      LibraryProblem p(setting, n);
      p.forward();
      p.backward();
      const std::map<std::string, Values> expected = p.results();
      const Stream& stream = p.lab.ctx().stream;
      backend::begin_recording(setting.device, stream.handle());
      p.forward();
      p.backward();
      void* const graph = backend::end_recording(setting.device, stream.handle());
      const Values q = p.lab.values(p.in["q"]);
      for (int run = 0; run < 2; ++run) {
        for (auto& [name, t] : p.grad) backend::fill(t.data, t.device, 0xff, t.bytes(), stream.handle());
        backend::fill(p.out.data, p.out.device, 0xff, p.out.bytes(), stream.handle());
        backend::launch_graph(setting.device, graph, stream.handle());
        CHECK(p.results() == expected);
      }
      Values half = q;
      for (double& x : half) x /= 2;
      p.lab.assign(p.in["q"], half);  // a replay reads the tensors as they are then
      backend::launch_graph(setting.device, graph, stream.handle());
      const std::map<std::string, Values> replayed = p.results();
      CHECK(replayed != expected);
      p.forward();
      p.backward();
      CHECK(p.results() == replayed);
      stream.synchronize();
      backend::destroy_graph(setting.device, graph);
    }
  });
}

TEST_CASE("library: a call beside a capture") {
  on_gpu([](const Setting& setting) {
    LibraryProblem captured(setting, gpu_cases()[0]), beside(setting, gpu_cases()[0]);
    captured.forward();
    beside.forward();
    const std::map<std::string, Values> expected = beside.results();
    beside.context.reset(captured.context.get());  // both use one context from here on
    const Stream& stream = captured.lab.ctx().stream;
    backend::begin_recording(setting.device, stream.handle());
    captured.forward();
    beside.forward();  // stream not captured, between two captured calls
    captured.forward();
    void* const graph = backend::end_recording(setting.device, stream.handle());
    CHECK(beside.results().at("out") == expected.at("out"));
    backend::launch_graph(setting.device, graph, stream.handle());
    CHECK(captured.lab.values(captured.out) == expected.at("out"));
    backend::destroy_graph(setting.device, graph);
    (void)beside.context.release();
  });
}

TEST_CASE("library: several threads and streams on one context") {
  const auto check = [](const Setting& setting, const LibraryCase& n) {
    const std::map<std::string, Values> expected = results_of(setting, n);
    triad_nsa_context* shared = nullptr;
    require_ok(triad_nsa_context_create(&shared, setting.device.is_cuda() ? 0 : TRIAD_NSA_CPU));
    constexpr int kThreads = 6;  // more than a context has slots for side streams
    std::vector<std::map<std::string, Values>> results(kThreads);
    std::vector<std::unique_ptr<LibraryProblem>> problems;
    for (int i = 0; i < kThreads; ++i) problems.push_back(std::make_unique<LibraryProblem>(setting, n));
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i)
      threads.emplace_back([&, i] {
        LibraryProblem& p = *problems[i];
        p.context.reset(shared);
        const triad_nsa_inputs in = p.inputs();
        const triad_nsa_saved saved = p.saved();
        const triad_nsa_tensor out = c_tensor(p.out), dout = c_tensor(p.dout);
        const triad_nsa_gradients grad = p.gradients();
        void* const stream = p.lab.ctx().stream.handle();
        size_t f = 0, b = 0;
        triad_nsa_forward(shared, stream, &p.options, &in, &out, &saved, nullptr, &f);
        triad_nsa_backward(shared, stream, &p.options, &in, &saved, &dout, &grad, nullptr, &b);
        const Tensor memory = p.lab.poisoned({static_cast<int64_t>(std::max(f, b))}, DType::u8);
        for (int run = 0; run < 5; ++run) {
          triad_nsa_forward(shared, stream, &p.options, &in, &out, &saved, memory.data, &f);
          triad_nsa_backward(shared, stream, &p.options, &in, &saved, &dout, &grad, memory.data, &b);
        }
        p.lab.ctx().stream.synchronize();
        (void)p.context.release();
      });
    for (std::thread& t : threads) t.join();
    for (const auto& p : problems) CHECK(p->results() == expected);
    triad_nsa_context_destroy(shared);
  };
  LibraryCase small{.name = "threads", .B = 1, .T = 70, .Hkv = 1, .G = 2, .dk = 8, .dv = 8};
  check(kCpu, small);
  if (backend::cuda_device_count() == 0) return;
  check({Device::cuda(), DType::bf16}, gpu_cases()[0]);
  check({Device::cuda(), DType::bf16}, gpu_cases()[3]);
  check({Device::cuda(), DType::bf16}, gpu_cases_and_large().back());
}

TEST_CASE("library: misaligned and strided tensors on a GPU") {
  on_gpu([](const Setting& setting) {
    LibraryCase n = gpu_cases()[0];
    n.options[3] = 40;  // all blocks in every list: other kernels round differently
    LibraryProblem p(setting, n);
    p.forward();
    p.backward();
    const std::map<std::string, Values> expected = p.results();
    const auto move = [&](const Tensor& t, bool shift) {  // rows one element longer, the first one element further
      const Shape s = t.shape();
      const Tensor room = p.lab.poisoned({s[0], s[1], s[2], s[3] + 1}, t.dtype);
      Tensor to = room;
      to.dim[3] = s[3];
      if (shift) to.data += size_of(t.dtype);
      copy(p.lab.ctx(), to, t);
      return to;
    };
    for (auto& [name, t] : p.in) t = move(t, true);
    for (auto& [name, t] : p.grad) t = move(t, false);
    p.out = move(p.out, false), p.dout = move(p.dout, true);
    p.forward();
    p.backward();
    const auto values_of = [&](const Tensor& t) {
      const Tensor dense = p.lab.poisoned(t.shape(), t.dtype);
      copy(p.lab.ctx(), dense, t);
      return p.lab.values(dense);
    };
    CHECK(relative_error(values_of(p.out), expected.at("out")) <= setting.tolerance());
    for (auto& [name, t] : p.grad) {
      INFO(name);
      CHECK(relative_error(values_of(t), expected.at("d" + name)) <= setting.tolerance());
    }
  });
}

TEST_CASE("library: two devices") {
  if (!require_gpus(2)) return;
  const LibraryCase n = gpu_cases()[0];
  CHECK(results_of({Device::cuda(0), DType::bf16}, n) == results_of({Device::cuda(1), DType::bf16}, n));
  LibraryProblem first({Device::cuda(0), DType::bf16}, n), second({Device::cuda(1), DType::bf16}, n);
  triad_nsa_inputs in = first.inputs();
  in.v[1] = second.inputs().v[1];
  const triad_nsa_tensor out = c_tensor(first.out);
  size_t bytes = 0;
  require_ok(triad_nsa_forward(first.context.get(), nullptr, &first.options, &in, &out, nullptr, nullptr, &bytes));
  const Tensor memory = first.lab.poisoned({static_cast<int64_t>(bytes)}, DType::u8);
  CHECK(triad_nsa_forward(first.context.get(), nullptr, &first.options, &in, &out, nullptr, memory.data, &bytes) ==
        TRIAD_NSA_ERROR_DEVICE);
  CHECK(std::string(triad_nsa_last_error()).find("v[1]: data is memory of cuda:1") != std::string::npos);
}

// Without a GPU, calls are planned for a Hopper GPU: all op checks and kernel choices pass.
TEST_CASE("library: the plan of a call on a GPU", "[build]") {
  if (!backend::built_with_cuda()) return void(skip("built without CUDA"));
  for (const int capability : {80, 90, 100})
    for (const LibraryCase& n : gpu_cases())
      for (const DType dtype : {DType::bf16, DType::f32}) {
        INFO(n.name << " " << capability << " " << name_of(dtype));
        LibraryProblem p({Device::cpu(), dtype}, n);
        triad_nsa_context planned(Device::cuda(), false);
        planned.traits = {132, capability};
        const triad_nsa_inputs in = p.inputs();
        const triad_nsa_saved saved = p.saved();
        const triad_nsa_tensor out = c_tensor(p.out), dout = c_tensor(p.dout);
        const triad_nsa_gradients grad = p.gradients();
        size_t forward = 0, backward = 0;
        require_ok(triad_nsa_forward(&planned, nullptr, &p.options, &in, &out, &saved, nullptr, &forward));
        require_ok(triad_nsa_backward(&planned, nullptr, &p.options, &in, &saved, &dout, &grad, nullptr, &backward));
        CHECK(forward > 0);
        CHECK(backward > static_cast<size_t>(p.in["q"].numel()));
      }
}
