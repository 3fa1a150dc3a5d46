// The selected branch on the GPU: which kernels run.
#include "kernels/nsa/attend_selected.h"

#include "kernels/common/launch.cuh"
#include "kernels/nsa/dispatch/choose.h"
#include "kernels/nsa/dispatch/plan_pieces.h"
#include "kernels/nsa/gpu/branch.cuh"
#include "kernels/nsa/gpu/combine.cuh"
#include "kernels/nsa/gpu/row_stats.cuh"
#include "kernels/nsa/sm90/launch_backward.h"
#include "kernels/nsa/sm90/launch_forward.h"

namespace triad::cuda {
namespace {

ListedWork work_of(const AttendIn& in, const SelectedKeys& keys) {
  return {.B = in.q.size(0),
          .T = in.q.size(1),
          .Hq = in.q.size(2),
          .Hkv = in.k.size(2),
          .dk = in.q.size(3),
          .dv = in.v.size(3),
          .n = keys.lists.n,
          .blocks = keys.lists.blocks,
          .block_keys = keys.block_keys,
          .is_part = !in.documents.part.whole(),
          .has_documents = !in.documents.empty()};
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
  const KeyWorkList list = build_inverse_index(ctx, scope, op, in, keys, plan_pieces(work_of(in, keys), kernels));
  switch (kernels) {
    case Backward::sm90_d64:
      return backward_d64_listed(ctx, op, out, grad, in, keys.range, list);
    case Backward::sm90_d128:
      return backward_d128_listed(ctx, op, out, grad, in, keys.range, list);
    case Backward::sm90:
      return backward_dkdv_sm90(ctx, op, out, grad, in, keys.range, list, row_stats);
    case Backward::portable_dq_dk_dv:
      return backward_listed_portable(ctx, op, out, grad, in, keys.range, list);
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
    case SelectedForward::resident_rows:
      return forward_resident_rows(ctx, op, out, in, keys, combine);
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
