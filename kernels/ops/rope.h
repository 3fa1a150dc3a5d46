// Rotary position embedding, rotate-half layout: the pair (x[j], x[j + D/2]) of position t turns by the angle
// (t / scale) * theta^(-2j/D).
#pragma once
#include <array>

#include "engine/context.h"

namespace triad {

// cos, sin [T, D/2] acc: the angles computed in double, then rounded; on the tensors' device. Done once, at start.
void rope_table(Context&, Tensor cos, Tensor sin, int64_t head_dim, double theta, double scale);
// The keys of up to three branches, each [B,T,Hkv,D] T or absent: turned in place together with the queries, in one
// launch.
using RopeKeys = std::array<Tensor, 3>;
// y [B,T,H,D] T overwritten, may be x itself  <-  x [B,T,H,D] T; cos, sin [>= T, D/2] acc. D is even.
void rope_forward(Context&, Tensor y, ConstTensor x, ConstTensor cos, ConstTensor sin, const RopeKeys& keys = {});
// dx [B,T,H,D] T overwritten, may be dy itself  <-  dy [B,T,H,D] T or acc: the rotation by the negative angle.
// dy_group [B,T,Hkv,D] acc, where given, is first added to dy for every head of the group: Hkv divides H.
void rope_backward(Context&, Tensor dx, ConstTensor dy, ConstTensor cos, ConstTensor sin, const RopeKeys& dkeys = {},
                   ConstTensor dy_group = {});

namespace cuda {
// direction +1: forward, -1: backward
void rope(Context&, Tensor y, ConstTensor x, ConstTensor x_group, const RopeKeys& keys, ConstTensor cos,
          ConstTensor sin, int direction);
}  // namespace cuda
}  // namespace triad
