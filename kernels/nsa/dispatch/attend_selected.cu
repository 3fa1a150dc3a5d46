// The selected branch on the GPU: the choice of its kernels, and for backward the plan of the work of dk and dv.
#include "kernels/nsa/attend_selected.h"

#include <algorithm>

#include "kernels/common/launch.cuh"
#include "kernels/nsa/dispatch/choose.h"
#include "kernels/nsa/gpu/branch.cuh"
#include "kernels/nsa/gpu/combine.cuh"
#include "kernels/nsa/sm90/launch_backward.h"
#include "kernels/nsa/sm90/launch_forward.h"

namespace triad::cuda {
namespace {

// Decides how the work of dk and dv is cut into pieces (PiecePlan). A kernel that also computes dq reads q and dout of
// a piece's tokens, and adds to their dq. For such a kernel the tokens are divided into runs whose q, dout and dq fit
// into L2 (kRunBytes), and every piece belongs to one run. Each run is then read from memory once, but a block has a
// partial sum for each run. A short sequence is one run. If ranks share a row, a call has few queries but sees all
// blocks before them, and the partial sums could need more memory than all else. Runs are then made longer, until a run
// has kLeastOfBlock queries per block on average and the partial sums of all runs fit into kMostPartial bytes.
PiecePlan plan_pieces(const AttendIn& in, const SelectedKeys& keys, Backward kernels) {
  constexpr int64_t kParts = 8, kMostParts = 32, kRunBytes = 48 << 20, kLeastOfBlock = 16,
                    kMostPartial = int64_t{32} << 30;
  const bool with_dq = kernels == Backward::sm90_d64 || kernels == Backward::sm90_d128;
  if (!with_dq) return {kParts, kParts, kWorkTokens};
  const int64_t T = in.q.size(1);
  const int64_t row_bytes = in.q.size(2) / in.k.size(2) * (6 * in.q.size(3) + 2 * in.v.size(3));
  int64_t parts = kParts, cut = kParts;
  while (cut > 1 && T * row_bytes * cut > kRunBytes * parts) cut /= 2;
  if (cut == 1) parts = std::clamp(ceil_div(T * row_bytes, kRunBytes), kParts, kMostParts);
  const int64_t blocks = keys.lists.blocks, queries = T * keys.lists.n;
  const int64_t partial_bytes =
      in.q.size(0) * in.k.size(2) * blocks * keys.block_keys * (in.k.size(3) + in.v.size(3)) * int64_t{4};
  const auto too_short = [&] {
    return queries * cut < kLeastOfBlock * blocks * parts || partial_bytes * parts > kMostPartial * cut;
  };
  if (!in.documents.part.whole())
    while (cut < parts && too_short()) parts > kParts ? parts = std::max(kParts, parts / 2) : cut *= 2;
  const int64_t most_tokens = cut < parts                     ? kWorkTokens / 4
                              : kernels == Backward::sm90_d64 ? kWorkTokens * 3 / 4
                                                              : kWorkTokens / 2;
  if (!in.documents.empty()) {
    // The documents' lengths are known on the GPU alone. Most are shorter than a row, so there are fewer and longer
    // runs (measured, tests/baselines/notes/documents.md).
    return {kParts, std::max<int64_t>(cut, 2), kernels == Backward::sm90_d64 ? kWorkTokens * 3 / 4 : kWorkTokens / 2,
            /*merges=*/kernels == Backward::sm90_d64};
  }
  return {parts, cut, most_tokens};
}

void run_backward(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                  const SelectedKeys& keys, Backward kernels) {
  Scratch::Scope scope(ctx.scratch);
  Tensor row_stats;
  if (kernels == Backward::sm90) {
    row_stats = compute_row_stats(ctx, scope, grad, in);
    backward_dq_selected_sm90(ctx, op, out, grad, in, keys, row_stats);
  } else if (kernels == Backward::portable) {
    dq_selected_portable(ctx, op, out, grad, in, keys);
  }
  const KeyWorkList list = build_inverse_index(ctx, scope, op, in, keys, plan_pieces(in, keys, kernels));
  switch (kernels) {
    case Backward::sm90_d64:
      return backward_d64_listed(ctx, op, out, grad, in, keys.range, list);
    case Backward::sm90_d128:
      return backward_d128_listed(ctx, op, out, grad, in, keys.range, list);
    case Backward::sm90:
      return backward_dkdv_sm90(ctx, op, out, grad, in, keys.range, list, row_stats);
    case Backward::portable:
      return dkdv_portable(ctx, op, out, grad, in, keys.range, list);
  }
}

}  // namespace

bool nsa_attend_selected_combines(const Context& ctx, const AttendOut& out, const AttendIn& in, ConstTensor block_index,
                                  int64_t l_sel, const CombineAlong& combine) {
  return combine_rows_fit(combine) &&
         choose_forward(ctx, out, in, block_index, l_sel).kernel != SelectedForward::portable;
}

void nsa_attend_selected_forward(Context& ctx, const AttendOut& out, const AttendIn& in, ConstTensor block_index,
                                 int64_t l_sel, const CombineAlong* combine) {
  const char* op = "nsa_attend_selected_forward";
  TRIAD_CHECK(combine == nullptr || cuda::nsa_attend_selected_combines(ctx, out, in, block_index, l_sel, *combine),
              "{}: nothing here combines along", op);
  const SelectedKeys keys = make_selected_keys(op, in, block_index, l_sel);
  const SelectedForwardChoice choice = choose_forward(ctx, out, in, block_index, l_sel);
  record_route(ctx, op, in.q.dtype, fused_name(choice),
               "head widths, alignment or a block length that the fused kernels lack");
  // Queues the kernel for lists that are alike (choice.where_alike).
  const bool tile_where_alike = choice.where_alike == SelectedForward::shared_tile;
  const auto forward_alike = [&](Context& on, const KvStationaryShare& elsewhere) {
    if (tile_where_alike)
      forward_shared_tile(on, op, out, in, keys, nullptr, &elsewhere);
    else
      forward_query_stationary(on, op, out, in, block_index, l_sel, nullptr, &elsewhere);
  };
  switch (choice.kernel) {
    case SelectedForward::portable:
      return forward_selected_portable(ctx, op, out, in, keys);
    case SelectedForward::query_stationary:
      return forward_query_stationary(ctx, op, out, in, block_index, l_sel, combine);
    case SelectedForward::kv_stationary:
      return forward_kv_stationary(ctx, op, out, in, keys,
                                   tile_where_alike ? shared_tile_longest(in, l_sel) : in.q.size(1), forward_alike,
                                   combine);
    case SelectedForward::shared_tile:
      return forward_shared_tile(ctx, op, out, in, keys, combine);
  }
}

void nsa_attend_selected_backward(Context& ctx, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                                  ConstTensor block_index, int64_t l_sel) {
  const char* op = "nsa_attend_selected_backward";
  const SelectedKeys keys = make_selected_keys(op, in, block_index, l_sel);
  const Backward kernels = choose_backward(ctx, out, grad, in);
  record_route(ctx, op, in.q.dtype, fused_name(kernels), kNotFusedHeads);
  if (ctx.planning && !grad.rounding_unit.empty()) {
    const AttendGradIn without = without_rounding_unit(grad);
    run_backward(ctx, op, out, without, in, keys, choose_backward(ctx, out, without, in));
  }
  run_backward(ctx, op, out, grad, in, keys, kernels);
}

}  // namespace triad::cuda
