// Attention to a sliding window alone (model `nsa.branches: win`): one softmax over the w tokens t-w+1 .. t, no gate,
// no other branch. Shapes, dtypes and softmax: nsa/attend.h, with S = T. With w >= T it is dense attention.
#pragma once
#include "kernels/nsa/dense_attention.h"

namespace triad {

// Forward: overwrites saved.
void window_attention_forward(Context&, const DenseSaved& saved, const AttendIn&, int64_t w);
// Backward: overwrites grad  <-  dout [B,T,Hq,dv] T, the inputs and the saved results of forward.
void window_attention_backward(Context&, const DenseGrad& grad, ConstTensor dout, const AttendIn&,
                               const DenseSaved& saved, int64_t w);

}  // namespace triad
