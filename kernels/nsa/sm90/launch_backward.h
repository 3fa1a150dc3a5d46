// Launchers of the backward of the branches and of dense attention on Hopper. nsa/dispatch/choose.cu decides which
// calls they take.
#pragma once
#include "kernels/nsa/gpu/branch.cuh"

namespace triad::cuda {

// Compute dq, dk and dv by one kernel, for heads of (64, 64) and of (128, 128); the caller passes the rounding unit.
// _range: each row sees one range of keys. _listed: rows list blocks; the rows of every listed block are processed in
// pieces of at most kWorkTokens (d128: kWorkTokens / 2) tokens.
void backward_d64_range(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                        const KeyRange&);
void backward_d64_listed(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                         const KeyRange&, const KeyWorkList&);
void backward_d128_range(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                         const KeyRange&);
void backward_d128_listed(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                          const KeyRange&, const KeyWorkList&);

// Compute the same by two kernels: dq, which is added to, then dk and dv, which are overwritten. row_stats is the
// result of compute_row_stats for the same call.
void backward_dq_range_sm90(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                            const KeyRange&, const Tensor& row_stats);
void backward_dq_selected_sm90(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                               const SelectedKeys&, const Tensor& row_stats);
void backward_dkdv_sm90(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                        const KeyRange&, const KeyWorkList&, const Tensor& row_stats);

}  // namespace triad::cuda
