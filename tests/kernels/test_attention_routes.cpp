// Which kernels the attention ops choose, by call shape and runtime.kernels.
#include <string>
#include <utility>
#include <vector>

#include "kernels/nsa/attend_selected.h"
#include "kernels/nsa/attend_window.h"
#include "kernels/nsa/gate.h"
#include "kernels/nsa/index.h"
#include "kernels/nsa/select.h"
#include "kernels/nsa/select_index.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

// A call to the ops whose kernels are chosen by shape, with one group. documents: in a packed row; 0: the row is one
// document.
struct RouteProblem {
  int64_t T, heads, dk, dv, l_sel, n, documents = 0;
  DType dtype = DType::bf16;
  KernelChoice wanted = KernelChoice::automatic;  // runtime.kernels
};
// The kernels that the ops record for it.
struct RouteNames {
  std::string range, selected, backward, select;  // range: window branch's forward; backward: both branches
};

RouteNames planned_kernels(const RouteProblem& p) {
  Runtime plan({.device = Device::cuda(), .planning = true, .kernels = KernelChoices::all(p.wanted)});
  Context& ctx = plan.ctx();
  const auto alloc = [&](DType type, const Shape& shape) { return plan.arena().alloc(MemTag::io, "x", type, shape); };
  const Tensor q = alloc(p.dtype, {1, p.T, p.heads, p.dk}), k = alloc(p.dtype, {1, p.T, 1, p.dk}),
               v = alloc(p.dtype, {1, p.T, 1, p.dv}), o = alloc(p.dtype, {1, p.T, p.heads, p.dv}),
               lse = alloc(DType::f32, {1, p.T, p.heads}), dq = alloc(DType::f32, q.shape()),
               lists = alloc(DType::i32, {1, p.T, 1, p.n});
  Documents documents;
  if (p.documents > 0) {
    const auto table = [&](int64_t n) { return alloc(DType::i32, {1, n}); };
    documents = {table(p.T), table(p.T), table(p.T), table(block_ids(p.T, p.l_sel, p.documents))};
  }
  const SelectOptions options{{32, 16}, p.l_sel, p.n};
  const Tensor k_cmp = alloc(p.dtype, {1, compressed_length(p.T, options.l, options.d), 1, p.dk});
  const AttendIn in{q, k, v, documents};
  const AttendGradOut grads{dq, alloc(p.dtype, k.shape()), alloc(p.dtype, v.shape())};
  const AttendGradIn upstream{o, {}, lse, lse, lse};
  nsa_attend_window_forward(ctx, {o, lse}, in, 512);
  nsa_attend_selected_forward(ctx, {o, lse}, in, lists, p.l_sel);
  nsa_attend_window_backward(ctx, grads, upstream, in, 512);
  nsa_attend_selected_backward(ctx, grads, upstream, in, lists, p.l_sel);
  nsa_select(ctx, lists, q, k_cmp, lse, options, documents);
  const std::vector<Routes::Count>& counts = ctx.routes.counts();
  REQUIRE(counts.size() == 5);
  CHECK(counts[3].kernel == counts[2].kernel);
  return {counts[0].kernel, counts[1].kernel, counts[2].kernel, counts[4].kernel};
}

}  // namespace

// The table of kernels/nsa/dispatch/README.md, on a planning context for a Hopper card.
TEST_CASE("routes: the kernels of a table of problems", "[routes]") {
  if (!require_hopper_plan()) return;
  const std::pair<RouteProblem, RouteNames> table[] = {
      {{2048, 6, 64, 64, 64, 16}, {"sm90", "shared_tile", "sm90_d64", "sm90"}},
      {{65536, 6, 64, 64, 64, 16}, {"sm90", "kv_stationary or shared_tile", "sm90_d64", "sm90"}},
      {{2048, 16, 64, 64, 64, 16}, {"sm90", "query_stationary", "sm90_d64", "sm90"}},
      // 12 heads per group fill 3/4 of a 16-row unit, which is enough if the sequence has 6 blocks per list entry.
      {{8192, 12, 64, 64, 64, 16}, {"sm90", "query_stationary", "sm90_d64", "sm90"}},
      {{4096, 12, 64, 64, 64, 16}, {"sm90", "shared_tile", "sm90_d64", "sm90"}},
      {{2048, 16, 128, 128, 64, 16}, {"sm90", "query_stationary", "sm90_d128", "sm90"}},
      {{2048, 16, 192, 128, 64, 16}, {"sm90", "query_stationary", "sm90", "sm90"}},
      // With 16-token blocks, only the shared tile supports the call, and only up to 1,024 blocks.
      {{16384, 6, 64, 64, 16, 16}, {"sm90", "shared_tile", "sm90_d64", "general"}},
      {{16400, 6, 64, 64, 16, 16}, {"sm90", "general", "sm90_d64", "general"}},
      // 129 heads per group have more rows per token than a tile of Hopper's forward kernels.
      {{256, 129, 64, 64, 64, 16}, {"general", "general", "sm90_d64", "general"}},
      {{2048, 6, 60, 60, 64, 16}, {"general", "general", "general", "general"}},
      {{2048, 6, 64, 128, 64, 16}, {"general", "general", "general", "sm90"}},
      {{2048, 6, 64, 64, 64, 16, 0, DType::f32}, {"general", "general", "general", "general"}},
      // Packed rows: kv_stationary takes the long documents, the shared tile the others, whatever the row's length.
      // With 16-token blocks, which kv_stationary does not support, the shared tile takes up to 896 block ids.
      {{4096, 6, 64, 64, 64, 16, 4}, {"sm90", "shared_tile", "sm90_d64", "sm90"}},
      {{32768, 6, 64, 64, 64, 16, 4}, {"sm90", "kv_stationary or shared_tile", "sm90_d64", "sm90"}},
      {{131072, 6, 64, 64, 64, 16, 4}, {"sm90", "kv_stationary or shared_tile", "sm90_d64", "sm90"}},
      {{65536, 16, 64, 64, 64, 16, 4}, {"sm90", "query_stationary", "sm90_d64", "sm90"}},
      {{14272, 6, 64, 64, 16, 16, 4}, {"sm90", "shared_tile", "sm90_d64", "general"}},
      {{14304, 6, 64, 64, 16, 16, 4}, {"sm90", "general", "sm90_d64", "general"}},
      // The kernel with resident rows computes groups up to 8 heads. It is not chosen for short sequences, which have
      // few blocks for each list entry. It is not chosen for long ones either, if too few rows in a tile list a block,
      // or if the sequence has more than 512 blocks.
      {{8192, 4, 64, 64, 64, 16}, {"sm90", "resident_rows", "sm90_d64", "sm90"}},
      {{5120, 4, 64, 64, 64, 16}, {"sm90", "resident_rows", "sm90_d64", "sm90"}},
      {{5056, 4, 64, 64, 64, 16}, {"sm90", "shared_tile", "sm90_d64", "sm90"}},
      {{24576, 4, 64, 64, 64, 12}, {"sm90", "resident_rows", "sm90_d64", "sm90"}},
      {{24640, 4, 64, 64, 64, 12}, {"sm90", "kv_stationary or shared_tile", "sm90_d64", "sm90"}},
      {{16384, 8, 64, 64, 64, 16}, {"sm90", "resident_rows", "sm90_d64", "sm90"}},
      {{8128, 8, 64, 64, 64, 16}, {"sm90", "shared_tile", "sm90_d64", "sm90"}},
      {{8192, 2, 64, 64, 64, 16}, {"sm90", "resident_rows", "sm90_d64", "sm90"}},
      {{20480, 2, 64, 64, 64, 16}, {"sm90", "resident_rows", "sm90_d64", "sm90"}},
      {{24576, 2, 64, 64, 64, 16}, {"sm90", "kv_stationary or shared_tile", "sm90_d64", "sm90"}},
      {{32768, 4, 64, 64, 64, 64}, {"sm90", "resident_rows", "sm90_d64", "sm90"}},
      {{4096, 1, 64, 64, 64, 16}, {"sm90", "resident_rows", "sm90_d64", "sm90"}},
      {{4032, 1, 64, 64, 64, 16}, {"sm90", "shared_tile", "sm90_d64", "sm90"}},
      {{16384, 1, 64, 64, 64, 16}, {"sm90", "resident_rows", "sm90_d64", "sm90"}},
      {{16448, 1, 64, 64, 64, 16}, {"sm90", "kv_stationary or shared_tile", "sm90_d64", "sm90"}},
      {{8192, 4, 64, 64, 64, 16, 4}, {"sm90", "kv_stationary or shared_tile", "sm90_d64", "sm90"}},
      {{8300, 4, 64, 64, 64, 4}, {"sm90", "kv_stationary or shared_tile", "sm90_d64", "sm90"}},
      {{4500, 4, 128, 128, 64, 4}, {"sm90", "kv_stationary or shared_tile", "sm90_d128", "sm90"}},
      {{38400, 4, 64, 64, 64, 64}, {"sm90", "kv_stationary or shared_tile", "sm90_d64", "sm90"}},
      {{6144, 1, 128, 128, 64, 16}, {"sm90", "resident_rows", "sm90_d128", "sm90"}},
      {{8128, 8, 128, 128, 64, 16}, {"sm90", "kv_stationary or shared_tile", "sm90_d128", "sm90"}},
      {{6144, 4, 128, 128, 64, 16}, {"sm90", "resident_rows", "sm90_d128", "sm90"}},
      {{6080, 4, 128, 128, 64, 16}, {"sm90", "kv_stationary or shared_tile", "sm90_d128", "sm90"}},
      {{16384, 8, 128, 128, 64, 16}, {"sm90", "resident_rows", "sm90_d128", "sm90"}},
      {{16448, 4, 128, 128, 64, 16}, {"sm90", "kv_stationary or shared_tile", "sm90_d128", "sm90"}},
      // KernelChoice::candidate asks for the kernel with resident rows. Then it is chosen wherever it supports the
      // call, however few or many blocks there are per list entry: groups up to 8 heads, head widths 64 or 128, and up
      // to 512 blocks of 64 tokens.
      {{2048, 4, 64, 64, 64, 16, 0, DType::bf16, KernelChoice::candidate},
       {"sm90", "resident_rows", "sm90_d64", "sm90"}},
      {{2048, 4, 128, 128, 64, 16, 0, DType::bf16, KernelChoice::candidate},
       {"sm90", "resident_rows", "sm90_d128", "sm90"}},
      {{2048, 4, 192, 128, 64, 16, 0, DType::bf16, KernelChoice::candidate}, {"sm90", "shared_tile", "sm90", "sm90"}},
      {{32768, 1, 64, 64, 64, 16, 0, DType::bf16, KernelChoice::candidate},
       {"sm90", "resident_rows", "sm90_d64", "sm90"}},
      {{32769, 1, 64, 64, 64, 16, 0, DType::bf16, KernelChoice::candidate},
       {"sm90", "kv_stationary or shared_tile", "sm90_d64", "sm90"}},
      {{8192, 9, 64, 64, 64, 16, 0, DType::bf16, KernelChoice::candidate}, {"sm90", "shared_tile", "sm90_d64", "sm90"}},
      {{2048, 4, 64, 64, 32, 16, 0, DType::bf16, KernelChoice::candidate}, {"sm90", "shared_tile", "sm90_d64", "sm90"}},
      {{2048, 4, 64, 64, 64, 16, 4, DType::bf16, KernelChoice::candidate}, {"sm90", "shared_tile", "sm90_d64", "sm90"}},
  };
  for (const auto& [p, expected] : table) {
    const RouteNames got = planned_kernels(p);
    INFO("T " << p.T << ", " << p.heads << " heads of " << p.dk << " and " << p.dv << ", " << p.n << " blocks of "
              << p.l_sel << ", " << (p.wanted == KernelChoice::candidate ? "candidate, " : "") << p.documents
              << " documents, " << name_of(p.dtype));
    CHECK(got.range == expected.range);
    CHECK(got.selected == expected.selected);
    CHECK(got.backward == expected.backward);
    CHECK(got.select == expected.select);
  }
}

// The taught index's rows of that table.
TEST_CASE("routes: the kernels of a taught index", "[routes]") {
  if (!require_hopper_plan()) return;
  struct Problem {
    int64_t di, l_sel, n, dk;
    std::string select, forward, backward;
  };
  const Problem table[] = {
      {64, 128, 16, 128, "sm90", "sm90", "sm90"},        {128, 64, 16, 64, "sm90", "sm90", "sm90"},
      {16, 128, 33, 64, "sm90", "sm90", "sm90"},         {64, 64, 34, 64, "general", "sm90", "sm90"},
      {64, 64, 16, 192, "sm90", "sm90", "general"},      {64, 32, 16, 64, "general", "general", "general"},
      {40, 64, 16, 64, "general", "general", "general"}, {144, 64, 16, 64, "general", "general", "general"},
  };
  for (const Problem& p : table) {
    Runtime plan({.device = Device::cuda(), .planning = true});
    Context& ctx = plan.ctx();
    const auto alloc = [&](DType type, const Shape& shape) { return plan.arena().alloc(MemTag::io, "x", type, shape); };
    const int64_t T = 8192, G = 4;
    const DType bf16 = DType::bf16, acc = DType::f32;
    const Tensor q = alloc(bf16, {1, T, G, p.dk}), k = alloc(bf16, {1, T, 1, p.dk}), v = alloc(bf16, {1, T, 1, p.dk}),
                 lse = alloc(acc, {1, T, G}), iq = alloc(bf16, {1, T, 1, p.di}), ik = alloc(bf16, {1, T, 1, p.di}),
                 index_lse = alloc(acc, {1, T, 1}), lists = alloc(DType::i32, {1, T, 1, p.n});
    const AttendIn in{q, k, v};
    SelectOptions options;
    options.l_sel = p.l_sel, options.n_sel = p.n, options.init_blocks = 0, options.local_blocks = 1;
    nsa_select_index(ctx, lists, iq, ik, options);
    index_forward_routed(ctx, {{iq, ik}, index_lse}, in, lists, p.l_sel);
    index_backward_routed(
        ctx, {{iq, ik}, index_lse, alloc(acc, iq.shape()), alloc(bf16, ik.shape()), alloc(DType::f64, {1}), 1.0}, in,
        lse, lists, p.l_sel);
    const std::vector<Routes::Count>& counts = ctx.routes.counts();
    REQUIRE(counts.size() == 3);
    INFO("an index of " << p.di << ", " << p.n << " blocks of " << p.l_sel << ", heads of " << p.dk);
    CHECK(counts[0].kernel == p.select);
    CHECK(counts[1].kernel == p.forward);
    CHECK(counts[2].kernel == p.backward);
  }
}

TEST_CASE("routes: dq has a rounding unit on every route but the reference's", "[routes]") {
  if (!require_hopper_plan()) return;
  const auto has_unit = [](const KernelChoices& kernels, bool portable_only, DType dtype, int64_t dv) {
    Runtime plan({.device = Device::cuda(), .planning = true, .kernels = kernels});
    plan.ctx().portable_only = portable_only;
    const auto alloc = [&](DType type, const Shape& shape) { return plan.arena().alloc(MemTag::io, "x", type, shape); };
    const Tensor q = alloc(dtype, {1, 300, 4, 64}), k = alloc(dtype, {1, 300, 2, 64}),
                 v = alloc(dtype, {1, 300, 2, dv}), o = alloc(dtype, {1, 300, 4, dv}),
                 delta = alloc(DType::f32, {1, 300, 4}), dq = alloc(DType::f32, q.shape());
    Scratch::Scope scope(plan.ctx().scratch);
    return !attend_rounding_unit(plan.ctx(), scope, dq, o, q, {{k, v, {}, delta}}).empty();
  };
  KernelChoices selected_general = {}, window_reference = {};
  selected_general.sel = KernelChoice::general, window_reference.win = KernelChoice::reference;
  CHECK(has_unit({}, false, DType::bf16, 64));
  CHECK(has_unit({}, true, DType::bf16, 64));
  CHECK(has_unit(KernelChoices::all(KernelChoice::general), false, DType::bf16, 64));
  CHECK(has_unit(selected_general, false, DType::bf16, 64));
  CHECK(!has_unit(window_reference, false, DType::bf16, 64));
  CHECK(!has_unit(KernelChoices::all(KernelChoice::reference), false, DType::bf16, 64));
  CHECK(!has_unit({}, true, DType::f32, 64));
  CHECK(!has_unit({}, true, DType::bf16, 48));
}
