#include "kernels/nsa/dispatch/attend_range.h"

#include "kernels/common/launch.cuh"
#include "kernels/nsa/dispatch/choose.h"
#include "kernels/nsa/gpu/row_stats.cuh"
#include "kernels/nsa/sm90/launch_backward.h"
#include "kernels/nsa/sm90/launch_forward.h"

namespace triad::cuda {
namespace {

void run_backward(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                  const KeyRange& range, Backward kernels) {
  Scratch::Scope scope(ctx.scratch);
  switch (kernels) {
    case Backward::sm90_d64:
      return backward_d64_range(ctx, op, out, grad, in, range);
    case Backward::sm90_d128:
      return backward_d128_range(ctx, op, out, grad, in, range);
    case Backward::sm90: {
      const Tensor row_stats = compute_row_stats(ctx, scope, grad, in);
      backward_dq_range_sm90(ctx, op, out, grad, in, range, row_stats);
      const KeyWorkList list = contiguous_work(scope, in, range);
      if (list.blocks > 0) backward_dkdv_sm90(ctx, op, out, grad, in, range, list, row_stats);
      return;
    }
    case Backward::portable_dq_dk_dv:
      return backward_range_portable(ctx, op, out, grad, in, range);
    case Backward::portable: {
      dq_range_portable(ctx, op, out, grad, in, range);
      const KeyWorkList list = contiguous_work(scope, in, range);
      if (list.blocks > 0) dkdv_portable(ctx, op, out, grad, in, range, list);
      return;
    }
  }
}

}  // namespace

void attend_range_forward(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                          const KeyRange& range) {
  const RangeForward kernel = choose_forward(ctx, out, in);
  record_route(ctx, op, in.q.dtype, fused_name(kernel), kNotFusedHeads);
  switch (kernel) {
    case RangeForward::sm90:
      return forward_range_sm90(ctx, op, out, in, range);
    case RangeForward::portable:
      return forward_range_portable(ctx, op, out, in, range);
  }
}

void attend_range_backward(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                           const AttendIn& in, const KeyRange& range) {
  const Backward kernels = choose_backward(ctx, out, grad, in);
  record_route(ctx, op, in.q.dtype, fused_name(kernels), kNotFusedHeads);
  if (ctx.planning && !grad.rounding_unit.empty()) {
    const AttendGradIn without = without_rounding_unit(grad);
    run_backward(ctx, op, out, without, in, range, choose_backward(ctx, out, without, in));
  }
  run_backward(ctx, op, out, grad, in, range, kernels);
}

}  // namespace triad::cuda
