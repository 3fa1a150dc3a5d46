// What kernels/library's C functions say about bad arguments: a status, and a message that names the argument and its
// value; never an exception or an abort.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <thread>
#include <tuple>

#include "engine/with_cuda.h"
#include "kernels/library/library.h"
#include "tests/support/library_problem.h"

namespace {

using namespace triad;
using namespace triad::test;

// Forward and backward arguments that a test changes.
struct Arguments {
  triad_nsa_options options;
  triad_nsa_inputs in;
  triad_nsa_saved saved;
  triad_nsa_tensor out, dout;
  triad_nsa_gradients gradients;
};
struct BadCase {
  std::string name;
  std::function<void(Arguments&)> change;
  triad_nsa_status status;
  std::vector<std::string> words;
  bool backward = false;
};

void check_message(triad_nsa_status status, triad_nsa_status expected, const std::vector<std::string>& words) {
  const std::string message = triad_nsa_last_error();
  INFO(triad_nsa_status_name(status) << ": " << message);
  CHECK(status == expected);
  for (const std::string& word : words) {
    INFO("expected: " << word);
    CHECK(message.find(word) != std::string::npos);
  }
}

const LibraryCase kCase{.name = "errors", .B = 2, .T = 33, .Hkv = 2, .G = 2, .dk = 8, .dv = 6};

// Each bad call must fail with its status and message, and leave the context usable.
void check_bad(const Setting& setting, const std::vector<BadCase>& cases) {
  LibraryProblem p(setting, kCase);
  void* const stream = p.lab.ctx().stream.handle();
  p.forward();
  const Tensor memory = p.lab.poisoned({int64_t{1} << 22}, DType::u8);
  for (const BadCase& bad : cases) {
    INFO(bad.name);
    Arguments a{p.options, p.inputs(), p.saved(), c_tensor(p.out), c_tensor(p.dout), p.gradients()};
    bad.change(a);
    size_t bytes = static_cast<size_t>(memory.bytes());
    const triad_nsa_status status =
        bad.backward
            ? triad_nsa_backward(p.context.get(), stream, &a.options, &a.in, &a.saved, &a.dout, &a.gradients,
                                 memory.data, &bytes)
            : triad_nsa_forward(p.context.get(), stream, &a.options, &a.in, &a.out, &a.saved, memory.data, &bytes);
    check_message(status, bad.status, bad.words);
  }
  p.forward();  // the context has survived
}

std::vector<BadCase> bad_cases() {
  constexpr auto kArgument = TRIAD_NSA_ERROR_ARGUMENT, kStride = TRIAD_NSA_ERROR_STRIDE;
  return {
      {"options size", [](Arguments& a) { a.options.struct_size = 8; }, kArgument, {"options.struct_size is 8"}},
      {"l", [](Arguments& a) { a.options.compress_length = 7; }, kArgument, {"compress_length is 7", "4"}},
      {"d", [](Arguments& a) { a.options.compress_stride = 0; }, kArgument, {"compress_stride is 0"}},
      {"block", [](Arguments& a) { a.options.block = 6; }, kArgument, {"block is 6"}},
      {"selected", [](Arguments& a) { a.options.selected = 2; }, kArgument, {"selected is 2", "3 to"}},
      {"window", [](Arguments& a) { a.options.window = -1; }, kArgument, {"window is -1"}},
      {"local", [](Arguments& a) { a.options.local_blocks = 0; }, kArgument, {"local_blocks is 0"}},
      {"scale", [](Arguments& a) { a.options.scale = NAN; }, kArgument, {"scale is nan"}},
      {"kernels", [](Arguments& a) { a.options.kernels = 9; }, kArgument, {"kernels is 9"}},
      {"flags", [](Arguments& a) { a.options.flags = 64; }, kArgument, {"flags is 64"}},
      {"inputs size", [](Arguments& a) { a.in.struct_size = 1; }, kArgument, {"inputs.struct_size is 1"}},
      {"no q", [](Arguments& a) { a.in.q = {}; }, kArgument, {"q has 0 axes", "absent"}},
      {"q NULL", [](Arguments& a) { a.in.q.data = nullptr; }, kArgument, {"q: data is NULL"}},
      {"q dtype", [](Arguments& a) { a.in.q.dtype = 17; }, kArgument, {"q: dtype 17"}},
      {"q i32", [](Arguments& a) { a.in.q.dtype = TRIAD_NSA_I32; }, kArgument, {"q is i32[2,33,4,8]"}},
      {"q rank", [](Arguments& a) { a.in.q.rank = 3; }, kArgument, {"q has 3 axes, not 4"}},
      {"q size", [](Arguments& a) { a.in.q.size[1] = -1; }, kArgument, {"q: sizes (2,-1,4,8)"}},
      {"q huge", [](Arguments& a) { a.in.q.size[0] = a.in.q.size[1] = int64_t{1} << 40; }, kArgument, {"q: sizes"}},
      {"q misaligned",
       [](Arguments& a) { a.in.q.data = static_cast<char*>(a.in.q.data) + 1; },
       kArgument,
       {"q: data is 0x", "no multiple of the 4 bytes"}},
      {"q last stride",
       [](Arguments& a) { a.in.q.stride[3] = 2; },
       kStride,
       {"q: strides", "last axis needs stride 1"}},
      {"q negative stride", [](Arguments& a) { a.in.q.stride[1] = -32; }, kStride, {"q: strides", "-32"}},
      {"q expanded", [](Arguments& a) { a.in.q.stride[0] = 0; }, kStride, {"q: strides (0,", "axis 0 has stride 0"}},
      {"q overlapping", [](Arguments& a) { a.in.q.stride[1] = 8; }, kStride, {"q: strides", "share memory"}},
      {"q far", [](Arguments& a) { a.in.q.stride[0] = int64_t{1} << 60; }, kStride, {"q: strides", "2^58"}},
      {"heads", [](Arguments& a) { a.in.q.size[2] = 3; }, kArgument, {"q has 3 heads", "2 groups"}},
      {"k width", [](Arguments& a) { a.in.k[1].size[3] = 7; }, kArgument, {"k[1] is f32[2,33,2,7]", "[2,33,2,8]"}},
      {"v tokens", [](Arguments& a) { a.in.v[2].size[1] = 32; }, kArgument, {"v[2] is f32[2,32,2,6]"}},
      {"k dtype", [](Arguments& a) { a.in.k[0].dtype = TRIAD_NSA_BF16; }, kArgument, {"k[0] is bf16", "not f32"}},
      {"two of three", [](Arguments& a) { a.in.k[2] = {}; }, kArgument, {"k[1] is present and k[2] is absent"}},
      {"half learned", [](Arguments& a) { a.in.k_cmp = a.in.k[0]; }, kArgument, {"k_cmp is present and v_cmp"}},
      {"learned width",
       [](Arguments& a) { a.in.k_cmp = a.in.k[0], a.in.v_cmp = a.in.v[0]; },
       kArgument,
       {"k_cmp is f32[2,33,2,8]", "not f32[2,7,2,8]"}},
      {"gate heads", [](Arguments& a) { a.in.gate.size[2] = 1; }, kArgument, {"gate is f32[2,33,1,3]", "2 groups"}},
      {"gate width", [](Arguments& a) { a.in.gate.size[3] = 2; }, kArgument, {"gate is f32[2,33,2,2]"}},
      {"gate far", [](Arguments& a) { a.in.gate.stride[0] = int64_t{1} << 60; }, kStride, {"gate: strides", "2^58"}},
      {"gate past 2^63",
       [](Arguments& a) { a.in.gate.stride[1] = a.in.gate.stride[2] = INT64_MAX; },
       kStride,
       {"gate: strides", "2^58"}},
      {"dgate far",
       [](Arguments& a) { a.gradients.gate.stride[0] = int64_t{1} << 60; },
       kStride,
       {"gradients.gate: strides", "2^58"},
       true},
      {"gradients size",
       [](Arguments& a) { a.gradients.struct_size = 2; },
       kArgument,
       {"gradients.struct_size is 2"},
       true},
      {"gate f64", [](Arguments& a) { a.in.gate.dtype = TRIAD_NSA_F64; }, kArgument, {"gate", "f64"}},
      {"out shape", [](Arguments& a) { a.out.size[3] = 5; }, kArgument, {"out is f32[2,33,4,5]", "[2,33,4,6]"}},
      {"out strides", [](Arguments& a) { a.out.stride[0] = 0; }, kStride, {"out: strides"}},
      {"no lists",
       [](Arguments& a) { a.options.flags |= TRIAD_NSA_GIVEN_LISTS, a.saved.block_index = nullptr; },
       kArgument,
       {"saved.block_index is NULL", "TRIAD_NSA_GIVEN_LISTS"}},
      {"saved size", [](Arguments& a) { a.saved.struct_size = 3; }, kArgument, {"saved.struct_size is 3"}},
      {"documents", [](Arguments& a) { a.in.documents.count = -2; }, kArgument, {"documents: count is -2"}},
      {"no bounds", [](Arguments& a) { a.in.documents.count = 2; }, kArgument, {"cu_seqlens: data is NULL"}},
      {"saved NULL", [](Arguments& a) { a.saved.lse[1] = nullptr; }, kArgument, {"saved.lse[1] is NULL"}, true},
      {"dout", [](Arguments& a) { a.dout.size[0] = 1; }, kArgument, {"dout is f32[1,33,4,6]"}, true},
      {"dq", [](Arguments& a) { a.gradients.q.size[3] = 6; }, kArgument, {"gradients.q is", "[2,33,4,8]"}, true},
      {"dk dtype", [](Arguments& a) { a.gradients.k[0].dtype = TRIAD_NSA_I32; }, kArgument, {"gradients.k[0]"}, true},
      {"dk_cmp",
       [](Arguments& a) { a.gradients.k_cmp = a.gradients.k[0]; },
       kArgument,
       {"gradients.k_cmp is present", "inputs.k_cmp is absent"},
       true},
      {"dgate", [](Arguments& a) { a.in.gate = {}; }, kArgument, {"gradients.gate is present"}, true},
      {"dgate expanded",
       [](Arguments& a) { a.gradients.gate.stride[2] = 0; },
       kStride,
       {"gradients.gate: strides"},
       true},
      {"shared dk",
       [](Arguments& a) { a.in.k[1] = a.in.k[2] = {}; },
       kArgument,
       {"gradients.k[1] is present", "share"},
       true},
  };
}

}  // namespace

TEST_CASE("library errors: every bad argument has a status and a message") { check_bad(kCpu, bad_cases()); }

TEST_CASE("library errors: every bad argument has a status and a message, on a GPU") {
  if (!require_gpu()) return;
  const Setting setting{Device::cuda(), DType::f32};
  std::vector<BadCase> cases = bad_cases();
  static float host[2 * 33 * 4 * 8];
  cases.push_back({"host memory",
                   [](Arguments& a) { a.in.q.data = host; },
                   TRIAD_NSA_ERROR_DEVICE,
                   {"q: data is memory of the host", "cuda:0"}});
  cases.push_back({"f64",
                   [](Arguments& a) {
                     for (triad_nsa_tensor* t : {&a.in.q, &a.in.k[0], &a.in.k[1], &a.in.k[2]}) t->dtype = TRIAD_NSA_F64;
                   },
                   TRIAD_NSA_ERROR_UNSUPPORTED,
                   {"q is f64", "GPUs compute bf16 and f32"}});
  cases.push_back({"out misaligned",
                   [](Arguments& a) { a.out.data = static_cast<char*>(a.out.data) + 4; },
                   TRIAD_NSA_ERROR_ARGUMENT,
                   {"out: data is 0x", "16 bytes"}});
  check_bad(setting, cases);
  LibraryProblem cpu(kCpu, kCase), gpu(setting, kCase);
  triad_nsa_inputs in = cpu.inputs();
  in.k[0] = gpu.inputs().k[0];
  const triad_nsa_tensor out = c_tensor(cpu.out);
  std::vector<char> memory(1 << 20);
  size_t bytes = memory.size();
  check_message(triad_nsa_forward(cpu.context.get(), nullptr, &cpu.options, &in, &out, nullptr, memory.data(), &bytes),
                TRIAD_NSA_ERROR_DEVICE, {"k[0]: data is memory of cuda:0", "for cpu"});
}

TEST_CASE("library errors: contexts, workspaces and NULL", "[build]") {
  triad_nsa_context* context = nullptr;
  check_message(triad_nsa_context_create(nullptr, TRIAD_NSA_CPU), TRIAD_NSA_ERROR_ARGUMENT, {"context is NULL"});
  check_message(triad_nsa_context_create(&context, -7), TRIAD_NSA_ERROR_DEVICE, {"device is -7"});
  check_message(triad_nsa_context_create(&context, 4711),
                backend::built_with_cuda() ? TRIAD_NSA_ERROR_DEVICE : TRIAD_NSA_ERROR_UNSUPPORTED, {"4711"});
  CHECK(context == nullptr);
  triad_nsa_context_destroy(nullptr);

  LibraryProblem p(kCpu, kCase);
  triad_nsa_inputs in = p.inputs();
  const triad_nsa_tensor out = c_tensor(p.out);
  size_t bytes = 0;
  require_ok(triad_nsa_forward(p.context.get(), nullptr, &p.options, &in, &out, nullptr, nullptr, &bytes));
  CHECK(bytes > 0);
  const size_t needed = bytes;
  std::vector<char> memory(needed);
  bytes = needed - 1;
  check_message(triad_nsa_forward(p.context.get(), nullptr, &p.options, &in, &out, nullptr, memory.data(), &bytes),
                TRIAD_NSA_ERROR_WORKSPACE, {std::to_string(needed - 1), std::to_string(needed)});
  // The size is checked as well if it was never asked for.
  LibraryProblem fresh(kCpu, kCase);
  in = fresh.inputs();
  bytes = 16;
  const triad_nsa_tensor fresh_out = c_tensor(fresh.out);
  check_message(
      triad_nsa_forward(fresh.context.get(), nullptr, &fresh.options, &in, &fresh_out, nullptr, memory.data(), &bytes),
      TRIAD_NSA_ERROR_WORKSPACE, {"16 bytes"});
  const triad_nsa_options* const o = &p.options;
  triad_nsa_context* const c = p.context.get();
  const std::vector<std::string> null = {"is NULL"};
  constexpr auto kArgument = TRIAD_NSA_ERROR_ARGUMENT;
  check_message(triad_nsa_forward(nullptr, nullptr, o, &in, &out, nullptr, nullptr, &bytes), kArgument, null);
  check_message(triad_nsa_forward(c, nullptr, nullptr, &in, &out, nullptr, nullptr, &bytes), kArgument, null);
  check_message(triad_nsa_forward(c, nullptr, o, nullptr, &out, nullptr, nullptr, &bytes), kArgument, null);
  check_message(triad_nsa_forward(c, nullptr, o, &in, nullptr, nullptr, nullptr, &bytes), kArgument, null);
  check_message(triad_nsa_forward(c, nullptr, o, &in, &out, nullptr, nullptr, nullptr), kArgument, null);
  check_message(triad_nsa_backward(c, nullptr, o, &in, nullptr, nullptr, nullptr, nullptr, &bytes), kArgument, null);
  check_message(triad_nsa_combine(c, nullptr, o, nullptr, nullptr, &out, nullptr, &bytes), kArgument, null);
  check_message(triad_nsa_attend(c, nullptr, o, nullptr, 5, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                 nullptr, &bytes),
                kArgument, {"branch is 5"});
  check_message(triad_nsa_attend(c, nullptr, o, nullptr, TRIAD_NSA_SEL, &in.q, &in.k[1], &in.v[1], nullptr, nullptr,
                                 nullptr, nullptr, &bytes),
                kArgument, {"block_index is NULL"});
  check_message(triad_nsa_compress(c, nullptr, o, nullptr, nullptr, nullptr, nullptr, &bytes), kArgument, null);
  check_message(triad_nsa_context_set_threads(c, 0), kArgument, {"threads is 0"});
  CHECK(std::string(triad_nsa_status_name(99)).find("unknown") != std::string::npos);
  CHECK(triad_nsa_version() == TRIAD_NSA_VERSION);
  CHECK(std::string(triad_nsa_build_info()).find(TRIAD_VERSION ", ") == 0);
  CHECK(triad_nsa_context_device(c) == TRIAD_NSA_CPU);
}

TEST_CASE("library errors: of a struct of another size only struct_size is read") {
  // A struct_size that ends a page, before one that cannot be read.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const pages = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(pages != MAP_FAILED);
  REQUIRE(mprotect(static_cast<char*>(pages) + page, page, PROT_NONE) == 0);
  void* const last = static_cast<char*>(pages) + page - sizeof(size_t);
  const size_t size = sizeof(size_t);
  std::memcpy(last, &size, sizeof size);
  LibraryProblem p(kCpu, kCase);
  const triad_nsa_inputs in = p.inputs();
  const triad_nsa_tensor out = c_tensor(p.out), dout = c_tensor(p.dout);
  const triad_nsa_saved saved = p.saved();
  const triad_nsa_gradients gradients = p.gradients();
  triad_nsa_context* const c = p.context.get();
  const auto* options = static_cast<const triad_nsa_options*>(last);
  const auto* small_in = static_cast<const triad_nsa_inputs*>(last);
  const auto* small_saved = static_cast<const triad_nsa_saved*>(last);
  size_t bytes = 0;
  const auto check = [](triad_nsa_status status, const char* name) {
    check_message(status, TRIAD_NSA_ERROR_ARGUMENT, {std::string(name) + ".struct_size is 8"});
  };
  check(triad_nsa_forward(c, nullptr, options, &in, &out, nullptr, nullptr, &bytes), "options");
  check(triad_nsa_forward(c, nullptr, &p.options, small_in, &out, nullptr, nullptr, &bytes), "inputs");
  check(triad_nsa_forward(c, nullptr, &p.options, &in, &out, small_saved, nullptr, &bytes), "saved");
  check(triad_nsa_backward(c, nullptr, &p.options, small_in, &saved, &dout, &gradients, nullptr, &bytes), "inputs");
  check(triad_nsa_backward(c, nullptr, &p.options, &in, small_saved, &dout, &gradients, nullptr, &bytes), "saved");
  check(triad_nsa_backward(c, nullptr, &p.options, &in, &saved, &dout, static_cast<const triad_nsa_gradients*>(last),
                           nullptr, &bytes),
        "gradients");
  REQUIRE(munmap(pages, 2 * page) == 0);
}

TEST_CASE("library errors: arguments of random bytes are refused or planned", "[build]") {
  LibraryProblem p({Device::cpu(), DType::bf16}, kCase);
  const Philox random(7, 0);
  uint64_t at = 0;
  int planned = 0;
  triad_nsa_context gpu(Device::cuda(), false);  // plans for Hopper, with or without a GPU
  gpu.traits = {132, 90};
  for (int run = 0; run < 20000; ++run) {
    Arguments a{p.options, p.inputs(), p.saved(), c_tensor(p.out), c_tensor(p.dout), p.gradients()};
    const auto spoil = [&](auto& value) {  // overwrites random 8-byte words with small, large or negative numbers
      for (int i = 0; i < 2; ++i) {
        const size_t word = static_cast<size_t>(random.uniform(at++) * static_cast<double>(sizeof value / 8));
        const double kind = random.uniform(at++), x = random.uniform(at++);
        const int64_t number = static_cast<int64_t>(kind < 0.5   ? x * 70
                                                    : kind < 0.7 ? x * 0x1p62
                                                    : kind < 0.8 ? -x * 100
                                                                 : std::exp2(x * 40));
        std::memcpy(reinterpret_cast<char*>(&value) + 8 * word, &number, 8);
      }
    };
    const double which = random.uniform(at++);
    if (which < 0.2)
      spoil(a.options);
    else if (which < 0.6)
      spoil(a.in);
    else if (which < 0.8)
      spoil(a.gradients);
    else
      spoil(a.out), spoil(a.dout);
    size_t bytes = 0;
    triad_nsa_context* const context = run % 2 == 0 || !backend::built_with_cuda() ? p.context.get() : &gpu;
    const auto fine = [&](triad_nsa_status status) {
      planned += status == TRIAD_NSA_OK;
      return status == TRIAD_NSA_OK || (status != TRIAD_NSA_ERROR_INTERNAL && *triad_nsa_last_error() != '\0');
    };
    const bool forward =
        fine(triad_nsa_forward(context, nullptr, &a.options, &a.in, &a.out, &a.saved, nullptr, &bytes));
    const bool backward =
        fine(triad_nsa_backward(context, nullptr, &a.options, &a.in, &a.saved, &a.dout, &a.gradients, nullptr, &bytes));
    INFO(run << ": " << triad_nsa_last_error());
    REQUIRE((forward && backward));
  }
  CHECK(planned > 1000);
}

TEST_CASE("library errors: the message belongs to the thread") {
  CHECK(triad_nsa_context_set_threads(nullptr, 1) == TRIAD_NSA_ERROR_ARGUMENT);
  const std::string mine = triad_nsa_last_error();
  std::string other = "?";
  std::thread([&] { other = triad_nsa_last_error(); }).join();
  CHECK(other.empty());
  CHECK(triad_nsa_last_error() == mine);
}

namespace {

void check_bounds_of(const Setting& setting) {
  constexpr auto kBounds = TRIAD_NSA_ERROR_BOUNDS;
  const std::vector<std::tuple<std::vector<int32_t>, triad_nsa_status, std::vector<std::string>>> cases = {
      {{0, 3, 33, 70}, TRIAD_NSA_OK, {}},
      {{0, 3, 70, 70, 70}, TRIAD_NSA_OK, {}},  // padded
      {{1, 3, 33, 70}, kBounds, {"begin with 1"}},
      {{0, 33, 3, 70}, kBounds, {"bound 1 is 33", "bound 2 is 3"}},
      {{0, 3, 3, 70}, kBounds, {"bound 1 is 3", "bound 2 is 3"}},
      {{0, 3, 71}, kBounds, {"bound 2 is 71", "beyond the end"}},
      {{0, 3, 33}, kBounds, {"last bound is 33", "70"}},
  };
  LibraryCase n{.name = "bounds", .B = 1, .T = 70, .Hkv = 1, .G = 1, .dk = 8, .dv = 8};
  for (const auto& [bounds, status, words] : cases) {
    n.bounds = bounds;
    LibraryProblem p(setting, n);
    const triad_nsa_documents documents = p.documents();
    const auto check = [&](triad_nsa_status result) {
      if (status == TRIAD_NSA_OK)
        require_ok(result);
      else
        check_message(result, status, words);
    };
    check(triad_nsa_check_documents(p.context.get(), p.lab.ctx().stream.handle(), 1, 70, &documents));
    if (setting.device.is_cuda()) continue;
    const triad_nsa_inputs in = p.inputs();
    const triad_nsa_tensor out = c_tensor(p.out);
    std::vector<char> memory(1 << 20);
    size_t bytes = memory.size();
    check(triad_nsa_forward(p.context.get(), nullptr, &p.options, &in, &out, nullptr, memory.data(), &bytes));
  }
}

}  // namespace

TEST_CASE("library errors: bounds of documents") { check_bounds_of(kCpu); }

TEST_CASE("library errors: bounds of documents, on a GPU") {
  if (require_gpu()) check_bounds_of({Device::cuda(), DType::f32});
}
