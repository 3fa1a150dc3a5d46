// Rotary position embedding, rotate-half layout: the pair (x[j], x[j + D/2]) at position t is rotated by the angle (t /
// scale) * theta^(-2j/D).
#pragma once
#include <array>

#include "engine/context.h"

namespace triad {

// cos, sin [T, D/2] acc overwritten, on either device: the angles are computed in double, then rounded. Called once, at
// startup.
void rope_table(Context&, Tensor cos, Tensor sin, int64_t head_dim, double theta, double scale);
// The keys of up to three attention branches, each [B,T,Hkv,D] T or absent. They are rotated in place, in the same
// launch as the queries.
using RopeKeys = std::array<Tensor, 3>;
// y [B,T,H,D] T overwritten, may be x itself  <-  x [B,T,H,D] T; cos, sin [>= T, D/2] acc. D is even.
void rope_forward(Context&, Tensor y, ConstTensor x, ConstTensor cos, ConstTensor sin, const RopeKeys& keys = {});
// dx [B,T,H,D] T overwritten, may be dy itself  <-  dy [B,T,H,D] T or acc: the rotation by the negative angle. dy_group
// [B,T,Hkv,D] acc, if given, is first added to dy for every head of its group; Hkv divides H.
void rope_backward(Context&, Tensor dx, ConstTensor dy, ConstTensor cos, ConstTensor sin, const RopeKeys& dkeys = {},
                   ConstTensor dy_group = {});

namespace cuda {
// direction: +1 forward, -1 backward. x_group: dy_group of backward, or absent.
void rope(Context&, Tensor y, ConstTensor x, ConstTensor x_group, const RopeKeys& keys, ConstTensor cos,
          ConstTensor sin, int direction);
}  // namespace cuda
}  // namespace triad
