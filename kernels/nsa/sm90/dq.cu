// dq on Hopper, for the branches whose rows see one range of keys and for the selected one.
#include "kernels/nsa/sm90/dq.cuh"

#include "kernels/nsa/gpu/selected_walk.cuh"
#include "kernels/nsa/sm90/launch_backward.h"

namespace triad::cuda {

void backward_dq_range_sm90(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                            const AttendIn& in, const KeyRange& range, const Tensor& facts) {
  backward_dq_sm90(ctx, op, out, grad, in, RangeKeys{range}, facts);
}
void backward_dq_selected_sm90(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                               const AttendIn& in, const SelectedKeys& keys, const Tensor& facts) {
  backward_dq_sm90(ctx, op, out, grad, in, keys, facts);
}

}  // namespace triad::cuda
