// Portable forward and dq kernels (nsa/gpu/fwd_dq.cuh), instantiated for branches whose rows see one key range, and for
// the selected branch.
#include "kernels/nsa/gpu/fwd_dq.cuh"

#include "kernels/nsa/gpu/selected_walk.cuh"

namespace triad::cuda {

void forward_range_portable(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                            const KeyRange& range) {
  launch_forward(ctx, op, out, in, RangeKeys{range});
}
void forward_selected_portable(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                               const SelectedKeys& keys) {
  launch_forward(ctx, op, out, in, keys);
}

void dq_range_portable(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                       const AttendIn& in, const KeyRange& range) {
  launch_dq(ctx, op, out, grad, in, RangeKeys{range});
}
void dq_selected_portable(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad,
                          const AttendIn& in, const SelectedKeys& keys) {
  launch_dq(ctx, op, out, grad, in, keys);
}

}  // namespace triad::cuda
