// Backward of the attention branches on Hopper for bf16 heads of (128, 128): dq, dk and dv by one kernel
// (nsa/sm90/backward_d128.cu).
#pragma once
#include "kernels/nsa/sm90/backward.cuh"

namespace triad::cuda {

// The choice, a pure function of card and problem.
inline bool backward_d128_applies(const Context& ctx, const AttendGradOut& out, const AttendGradIn& grad,
                                  const AttendIn& in) {
  // dq is added to 16 bytes at a time; dk and dv are stored two columns at a time, both in one dtype.
  const auto aligned = [](const Tensor& t, int elements, int bytes) {
    bool fits = reinterpret_cast<uintptr_t>(t.data) % bytes == 0;
    for (int i = 0; i < 3; ++i) fits = fits && (t.size(i) <= 1 || t.stride[i] % elements == 0);
    return fits;
  };
  const bool rows =
      aligned(out.dq, 4, 16) && aligned(out.dk, 2, 8) && aligned(out.dv, 2, 8) && out.dk.dtype == out.dv.dtype;
  return rows && !grad.rounding_unit.empty() && backward_sm90_applies(ctx, out, grad, in) && in.q.size(3) == 128 &&
         in.v.size(3) == 128 && out.dq.size(1) * out.dq.stride[1] / 4 < (int64_t{1} << 31);
}

// The branches whose rows see one range of keys.
void backward_d128_range(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                         const KeyRange&);
// The rows of every block of keys listed, in pieces of at most kWorkTokens / 2 tokens.
void backward_d128_listed(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                          const KeyRange&, const KeyWorkList&);

}  // namespace triad::cuda
