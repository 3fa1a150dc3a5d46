// Backward of the attention branches on Hopper for bf16 heads of (64, 64): dq, dk and dv by one kernel
// (nsa/sm90/backward_d64.cu), where the caller gives the quantum that makes the order of additions to dq irrelevant.
#pragma once
#include "kernels/nsa/sm90/backward.cuh"

namespace triad::cuda {

// The choice, a pure function of card and problem.
inline bool backward_d64_applies(const Context& ctx, const AttendGradOut& out, const AttendGradIn& grad,
                                 const AttendIn& in) {
  bool fours = reinterpret_cast<uintptr_t>(out.dq.data) % 16 == 0;  // dq is added to four columns at a time
  for (int i = 0; i < 3; ++i) fours = fours && out.dq.stride[i] % 4 == 0;
  return fours && !grad.rounding_unit.empty() && backward_sm90_applies(ctx, out, grad, in) && in.q.size(3) == 64 &&
         in.v.size(3) == 64 && out.dq.size(1) * out.dq.stride[1] / 4 < (int64_t{1} << 31);
}

// The branches whose rows see one range of keys.
void backward_d64_range(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                        const KeyRange&);
// The rows of every block of keys listed, in pieces of at most kWorkTokens tokens.
void backward_d64_listed(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                         const KeyRange&, const KeyWorkList&);

}  // namespace triad::cuda
