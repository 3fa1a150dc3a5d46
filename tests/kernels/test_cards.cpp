// The portable kernels must fit into every card's shared memory. These tests check which tiles are chosen for a card,
// and every op's launches on a simulated card (tests/fault_injection/cuda_card.cpp). tests/checks/resources.py compares
// the same launches with the compiled kernels' registers and shared memory.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "engine/with_cuda.h"
#include "kernels/common/op_case_args.h"
#include "kernels/common/shared_limits.h"
#include "kernels/decode/decode.h"
#include "kernels/nsa/attend_selected.h"
#include "kernels/nsa/attend_window.h"
#include "kernels/nsa/gate.h"
#include "kernels/nsa/gpu/key_work_bounds.h"
#include "kernels/nsa/gpu/portable_tiles.h"
#include "kernels/nsa/select.h"
#include "kernels/ops/cross_entropy.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/rmsnorm.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

constexpr int kCards[] = {80, 86, 89, 90, 100, 120};
constexpr int64_t kListed = cuda::kWorkTokens, kDqListed = cuda::kDqWorkTokens;

}  // namespace

TEST_CASE("cards: the tile of the portable attention kernels, by shared memory and head widths", "[nsa]") {
  using enum PortableKernel;
  using enum TileShape;
  struct Row {
    int card;
    PortableKernel kernel;
    TileProblem problem;
    TileShape shape;
    int stages;
    int64_t bytes;
  };
  const Row table[] = {
      // Hopper: two pipeline stages where 113 KiB suffice, otherwise one CTA with up to 227 KiB.
      {90, forward, {2, 64, 64}, small_heads, 2, 46080},
      {90, forward, {4, 64, 64}, small_heads, 2, 87040},
      {90, dq, {2, 64, 64}, small_heads, 2, 55296},
      {90, dkdv, {2, 64, 64, kListed}, small_heads, 2, 66048},
      {90, dq_dk_dv, {2, 64, 64, kDqListed}, small_heads, 2, 69632},
      {90, dq_dk_dv, {2, 128, 128, kDqListed}, large_heads, 2, 78336},
      {90, dq, {2, 192, 128}, large_heads, 2, 102400},
      {90, dq, {4, 128, 128}, large_heads, 1, 101376},
      {90, dkdv, {4, 256, 256, kListed}, large_heads, 1, 208512},
      {100, dkdv, {4, 256, 256, kListed}, large_heads, 1, 208512},
      {80, dkdv, {4, 192, 128, kListed}, large_heads, 1, 159360},
      {80, dq, {4, 256, 256}, compact, 1, 99840},
      {86, forward, {2, 64, 64}, small_heads, 2, 46080},
      {86, dq, {2, 64, 64}, small_heads, 1, 36864},
      {86, dq_dk_dv, {2, 64, 64, kDqListed}, small_heads, 1, 49664},  // 49 KiB are 50,176 bytes: two CTAs per SM
      {86, dq_dk_dv, {2, 128, 128, kDqListed}, large_heads, 1, 60160},
      {86, dq, {2, 128, 128}, large_heads, 1, 52224},
      {86, dq, {4, 128, 128}, large_heads, 1, 101376},  // all 99 KiB
      {86, dkdv, {4, 128, 128}, compact, 1, 51008},
      {86, dkdv, {4, 65, 3, kListed}, compact, 1, 51008},  // padded to 128
      {89, dkdv, {2, 256, 256, kListed}, compact, 1, 51008},
      {120, dq, {4, 192, 128}, compact, 1, 75264},
      {120, dkdv, {4, 256, 256, kListed}, compact, 1, 100160},
  };
  for (const Row& row : table) {
    const TilePlan plan = choose_tile(row.kernel, row.problem, shared_limits(row.card));
    INFO("sm_" << row.card << ", kernel " << static_cast<int>(row.kernel) << ", heads of " << row.problem.dk << " and "
               << row.problem.dv << ", " << row.problem.element_bytes << " bytes");
    CHECK(plan.shape == row.shape);
    CHECK(plan.stages == row.stages);
    CHECK(plan.bytes == row.bytes);
  }
  // Every head width that a config allows fits on every card.
  for (const int card : kCards)
    for (const PortableKernel kernel : {forward, dq, dkdv})
      for (const int64_t bytes : {2, 4})
        for (int64_t dk = 1; dk <= 256; ++dk)
          for (const int64_t dv : {int64_t{1}, dk, int64_t{256}}) {
            const SharedLimits limits = shared_limits(card);
            const TilePlan plan = choose_tile(kernel, {bytes, dk, dv, kernel == dkdv ? kListed : 0}, limits);
            if (plan.bytes > limits.cta_bytes || (limits.cta_bytes == 227 * 1024 && plan.shape == compact))
              FAIL_CHECK("sm_" << card << ": " << plan.bytes << " bytes for heads of " << dk << " and " << dv);
          }
  for (const int card : kCards)  // dq_dk_dv has no CompactTile
    for (const int64_t width : {64, 128}) {
      const TilePlan plan = choose_tile(dq_dk_dv, {2, width, width, kDqListed}, shared_limits(card));
      CHECK(plan.bytes <= shared_limits(card).cta_bytes);
      CHECK(plan.shape != compact);
    }
  // WideTile runs where two CTAs with two pipeline stages fit on an SM, for bf16 heads up to 64 wide and many keys.
  constexpr int64_t kManyKeys = 1024;
  for (const int card : kCards) {
    const auto wide = plan_wide_tile({2, 64, 64}, kManyKeys, shared_limits(card));
    CHECK(wide.has_value() == (card == 90 || card == 100));
    if (wide) CHECK(wide->bytes == 107520);
  }
  CHECK(!plan_wide_tile({2, 64, 64}, kManyKeys - 1, shared_limits(90)));
  CHECK(!plan_wide_tile({2, 65, 64}, kManyKeys, shared_limits(90)));
  CHECK(!plan_wide_tile({4, 64, 64}, kManyKeys, shared_limits(90)));
  CHECK(shared_limits(75).cta_bytes == 99 * 1024);  // an unknown card
  for (const auto& [card, all, half] : {std::array{80, 163, 81}, {86, 99, 49}, {90, 227, 113}}) {
    CHECK(shared_limits(card).bytes_per_cta(1) == all * 1024);
    CHECK(shared_limits(card).bytes_per_cta(2) == half * 1024);
  }
}

namespace {

// A call to the ops whose shared memory depends on the head widths, with one group of G heads and T tokens.
struct HeadProblem {
  DType dtype;
  int64_t dk, dv, G, T;
};

// Allocates tensors on a runtime, planned or not.
struct Tensors {
  Arena& arena;
  Tensor operator()(DType type, const Shape& shape) const { return arena.alloc(MemTag::io, "x", type, shape); }
};

void run_heads(Context& ctx, const Tensors& make, const HeadProblem& p) {
  const int64_t T = p.T, n = 16, hidden = p.dk / 2;
  const auto like = [&](const Tensor& t) { return make(t.dtype, t.shape()); };
  const Tensor q = make(p.dtype, {1, T, p.G, p.dk}), k = make(p.dtype, {1, T, 1, p.dk}),
               v = make(p.dtype, {1, T, 1, p.dv}), o = make(p.dtype, {1, T, p.G, p.dv}),
               lse = make(DType::f32, {1, T, p.G}), dq = make(DType::f32, q.shape()),
               lists = make(DType::i32, {1, T, 1, n});
  NsaConfig config;
  const SelectOptions options{{config.l, config.d}, config.l_sel, n};
  const int64_t blocks = compressed_length(T, config.l, config.d);
  const Tensor k_cmp = make(p.dtype, {1, blocks, 1, p.dk}), v_cmp = make(p.dtype, {1, blocks, 1, p.dv});
  const AttendIn in{q, k, v};
  const AttendGradOut grads{dq, like(k), like(v)};
  const AttendGradIn upstream{o, {}, lse, lse};
  nsa_attend_window_forward(ctx, {o, lse}, in, config.w);
  nsa_attend_window_backward(ctx, grads, upstream, in, config.w);
  nsa_attend_selected_forward(ctx, {o, lse}, in, lists, config.l_sel);
  nsa_attend_selected_backward(ctx, grads, upstream, in, lists, config.l_sel);
  if (p.dk == p.dv) {  // given a rounding unit, head widths 64 and 128 have one kernel for dq, dk and dv
    const AttendGradIn rounded{o, {}, lse, lse, lse};
    nsa_attend_window_backward(ctx, grads, rounded, in, config.w);
    nsa_attend_selected_backward(ctx, grads, rounded, in, lists, config.l_sel);
  }
  nsa_select(ctx, lists, q, k_cmp, lse, options);
  if (p.dk % 2 != 0) return;  // the gate's MLP has dk/2 hidden units
  const GateWeights gate{make(p.dtype, {hidden, p.dk}), make(p.dtype, {hidden}), make(p.dtype, {3, hidden}),
                         make(p.dtype, {3})};
  const GateGrads dgate{make(DType::f32, {hidden, p.dk}), make(DType::f32, {hidden}), make(DType::f32, {3, hidden}),
                        make(DType::f32, {3})};
  const Tensor gates = make(DType::f32, {3, 1, T, 1});
  nsa_gate_forward(ctx, gates, q, gate, {});
  nsa_gate_backward(ctx, make(DType::f32, {1, T, 1, p.dk}), dgate, gates, gates, q, gate, {});
  const NsaCache cache{k,  v, k.slice(1, 0, std::min(T, config.w)), v.slice(1, 0, std::min(T, config.w)), k_cmp, v_cmp,
                       {}, {}};
  const Tensor one = make(p.dtype, {1, 1, p.G, p.dk}), position = make(DType::i32, {1}),
               out = make(p.dtype, {1, 1, p.G, p.dv});
  nsa_decode(ctx, out, {one, cache, position}, gate, config);
  dense_decode(ctx, out, {one, {k, v}, position});
}

// Calls RMSNorm and the cross-entropy on rows this wide.
void run_norm(Context& ctx, const Tensors& make, DType dtype, int64_t width) {
  const Tensor x = make(dtype, {512, width}), w = make(dtype, {width}), r = make(DType::f32, {512}),
               dw = make(DType::f32, {width});
  rmsnorm_forward(ctx, x, r, x, w, 1e-6);
  rmsnorm_backward(ctx, x, dw, x, x, w, r, {}, {});
}
void run_loss(Context& ctx, const Tensors& make, DType dtype, int64_t vocab) {
  const Tensor x = make(dtype, {512, vocab}), loss = make(DType::f32, {512}), targets = make(DType::i32, {512});
  cross_entropy_forward_backward(ctx, loss, x, x, targets, vocab, 1.0);
}

constexpr int64_t kHeadWidths[][2] = {{8, 8},     {60, 100},  {64, 64},   {80, 80},   {96, 96},   {112, 112},
                                      {128, 128}, {129, 127}, {160, 160}, {192, 128}, {224, 224}, {256, 256}};
constexpr int64_t kModelWidths[] = {768, 2048, 3200, 4096, 5120, 8192, 16384, 25344};
constexpr int64_t kVocabularies[] = {256, 16000, 25000, 32000, 50304, 58000, 128256};

// Prints what every op launches on TRIAD_CARD's card, at the OpCases' shapes and at those above:
//   case <TAB> op, shape and dtype
//   launch <TAB> ...        by tests/fault_injection/cuda_card.cpp
//   refused <TAB> message   that an op threw in that case
void print_launches() {
  constexpr int64_t kArena = int64_t{1} << 41, kScratch = int64_t{1} << 40;
  const auto run = [&](const std::string& label, auto&& body, bool portable_only = true) {
    std::printf("case\t%s\n", label.c_str());
    Runtime runtime({.device = Device::cuda(), .arena_bytes = kArena, .scratch_bytes = kScratch});
    runtime.ctx().portable_only = portable_only;
    try {
      body(runtime.ctx(), Tensors{runtime.arena()});
    } catch (const Error& e) { std::printf("refused\t%s\n", e.what()); }
  };
  for (const OpCase& c : all_op_cases())
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const int64_t shift : {0, 1}) {  // the second time with tensors that are not aligned
        const auto body = [&](Context& ctx, const Tensors& make) {
          Args args;
          for (const Slot& slot : slots_of(c)) {
            const DType type = dtype_in(slot.type, dtype);
            const Tensor memory = make(type, {slot.elements() + shift});
            args.set(slot.name, slot_view(slot, memory.data + shift * size_of(type), type, ctx.device));
          }
          c.forward(ctx, args);
          if (c.backward) c.backward(ctx, args);
        };
        const std::string label = c.op + " " + c.name + " " + name_of(dtype) + (shift != 0 ? " unaligned" : "");
        run(label, body);
        // On Hopper the portable decoding kernels also run as clusters.
        if (c.op.ends_with("_decode")) run(label + " on Hopper", body, false);
      }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& [dk, dv] : kHeadWidths)
      for (const int64_t G : {1, 4, 16})
        for (const int64_t T : {1000, 65536, 1 << 20})
          run("heads of " + std::to_string(dk) + " and " + std::to_string(dv) + " " + name_of(dtype) + ", G " +
                  std::to_string(G) + ", T " + std::to_string(T),
              [&](Context& ctx, const Tensors& make) {
                run_heads(ctx, make, {dtype, dk, dv, G, T});
              });
    for (const int64_t width : kModelWidths)
      run("rmsnorm of " + std::to_string(width) + " " + name_of(dtype),
          [&](Context& ctx, const Tensors& make) { run_norm(ctx, make, dtype, width); });
    for (const int64_t vocab : kVocabularies)
      run("cross_entropy of " + std::to_string(vocab) + " " + name_of(dtype),
          [&](Context& ctx, const Tensors& make) { run_loss(ctx, make, dtype, vocab); });
  }
}

}  // namespace

TEST_CASE("cards: what does not fit names the op, the value and the limit", "[nsa][build]") {
  if (!backend::built_with_cuda()) return void(skip("built without CUDA"));
  Runtime plan({.device = Device::cuda(), .planning = true});
  plan.ctx().compute_capability = 86;
  const Tensors make{plan.arena()};
  run_heads(plan.ctx(), make, {DType::f32, 256, 256, 4, 1024});
  check_error(
      [&] {
        run_heads(plan.ctx(), make, {DType::f32, 640, 640, 1, 1024});
      },
      {"nsa_attend_window", "dk = 640, dv = 640 in f32", "101376", "8.6"});
  const Tensor x = make(DType::bf16, {4, 30000}), w = make(DType::bf16, {30000}), r = make(DType::f32, {4}),
               dw = make(DType::f32, {30000});
  check_error([&] { rmsnorm_backward(plan.ctx(), x, dw, x, x, w, r, {}, {}); },
              {"rmsnorm_backward", "rows of 30000 elements", "120000", "101376", "8.6"});
  plan.ctx().compute_capability = 90;
  rmsnorm_backward(plan.ctx(), x, dw, x, x, w, r, {}, {});
}

// The smallest cards have 99 KiB shared memory per CTA. tests/checks/resources.py runs this test on each card.
TEST_CASE("cards: no op launches more shared memory than the smallest card has", "[nsa][card][build]") {
  if (std::getenv("TRIAD_CARD") != nullptr) return print_launches();  // the program started below
  if (!backend::built_with_cuda()) return void(skip("built without CUDA"));
  const std::string tests = std::filesystem::path(TRIAD_PROGRAM).replace_filename("triad_tests").string();
  const Outcome outcome = run_command("LD_PRELOAD=" TRIAD_CARD_LIBRARY " TRIAD_CARD=86 " + tests + " '[card]'");
  CHECK(outcome.exit_code == 0);
  std::istringstream lines(outcome.standard_output);
  std::string line, label;
  int64_t launches = 0, most = 0;
  while (std::getline(lines, line)) {
    if (line.starts_with("case\t")) label = line;
    if (line.starts_with("refused\t")) FAIL_CHECK(label << ": " << line);
    if (!line.starts_with("launch\t")) continue;
    const int64_t bytes = std::stoll(line.substr(line.rfind('\t')));
    if (bytes > 99 * 1024) FAIL_CHECK(label << ": " << line);
    ++launches, most = std::max(most, bytes);
  }
  CHECK(launches > 500);
  CHECK(most > 90 * 1024);
}

TEST_CASE("matmul: cuBLASLt is loaded when it is first used, and has every function that products need",
          "[matmul][build]") {
  CHECK_FALSE(has(run_command("ldd " TRIAD_PROGRAM).output, "cublasLt"));
  if (backend::built_with_cuda()) CHECK(has(matmul_libraries(Device::cuda()), "cuBLASLt "));
}
