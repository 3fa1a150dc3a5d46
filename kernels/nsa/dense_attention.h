// Dense causal attention, the control that NSA is compared with: row t sees the tokens [0, t]. It shares the kernels
// with NSA's branches that see one key range; shapes, dtypes and softmax: nsa/attend.h, with S = T.
#pragma once
#include "kernels/nsa/index.h"

namespace triad {

// What forward saves for backward; o is also the op's result.
struct DenseSaved {
  Tensor o, lse;  // [B,T,Hq,dv] T, [B,T,Hq] acc
};
// Backward's results, all overwritten.
struct DenseGrad {
  Tensor dq;      // [B,T,Hq,dk] acc
  Tensor dk, dv;  // shaped like k and v; T, or acc
};

// Forward: overwrites saved. index: what is computed for the index that dense attention teaches (nsa/index.h); null:
// nothing.
void dense_attention_forward(Context&, const DenseSaved& saved, const AttendIn&, const IndexForward* index = nullptr);
// Backward: overwrites grad  <-  dout [B,T,Hq,dv] T, forward's inputs and saved results
void dense_attention_backward(Context&, const DenseGrad& grad, ConstTensor dout, const AttendIn&,
                              const DenseSaved& saved, const IndexBackward* index = nullptr);

// Before the backward of attention with one softmax (here, selected_attention.h, window_attention.h): checks shapes,
// sets grad.dq to zero, and returns what the branch's backward reads, with delta and rounding unit in the scope.
AttendGradIn one_softmax_upstream(Context&, Scratch::Scope&, const char* op, const DenseGrad& grad, ConstTensor dout,
                                  const AttendIn&, const DenseSaved&);

namespace cuda {
void dense_attention_forward(Context&, const AttendOut&, const AttendIn&);
// Unlike above, AttendGradOut::dq is added to.
void dense_attention_backward(Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&);
}  // namespace cuda
}  // namespace triad
