// Launchers for the branches' and dense attention's backward on Hopper. nsa/dispatch/choose.cu decides which calls they
// take.
#pragma once
#include "kernels/nsa/gpu/branch.cuh"

namespace triad::cuda {

// Compute dq, dk and dv by one kernel, for heads (64, 64) and (128, 128); the caller passes the rounding unit. _range:
// each row sees one key range. _listed: rows list blocks; every listed block's rows are processed in pieces of at most
// kWorkTokens (d128: kWorkTokens / 2) tokens.
void backward_d64_range(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                        const KeyRange&);
void backward_d64_listed(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                         const KeyRange&, const KeyWorkList&);
void backward_d128_range(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                         const KeyRange&);
void backward_d128_listed(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                          const KeyRange&, const KeyWorkList&);

// Compute the same by two kernels: dq, which is added to, then dk and dv, which are overwritten. row_stats is
// compute_row_stats's result for the same call.
void backward_dq_range_sm90(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                            const KeyRange&, const Tensor& row_stats);
void backward_dq_selected_sm90(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                               const SelectedKeys&, const Tensor& row_stats);
void backward_dkdv_sm90(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                        const KeyRange&, const KeyWorkList&, const Tensor& row_stats);

}  // namespace triad::cuda
