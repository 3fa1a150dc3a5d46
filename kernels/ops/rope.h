// Rotary position embedding, rotate-half layout: rotates the pair (x[j], x[j + D/2]) at position t by the angle (t /
// scale) * theta^(-2j/D).
#pragma once
#include <array>

#include "engine/context.h"

namespace triad {

// Fills the table of angles. cos, sin [T, D/2] acc overwritten, on either device. Angles are computed in double, then
// rounded. Called once, at startup.
void rope_table(Context&, Tensor cos, Tensor sin, int64_t head_dim, double theta, double scale);
// The keys of up to three attention branches, each [B,T,Hkv,D] T or absent. rope_forward() and rope_backward() rotate
// them in place, in the same launch as the queries.
using RopeKeys = std::array<Tensor, 3>;
// y [B,T,H,D] T overwritten, may be x itself  <-  x [B,T,H,D] T; cos, sin [at least T, D/2] acc. D is even.
// begin [B,T] i32, optional: the position of token t is t - begin[t] (Documents::begin, common/documents.h).
void rope_forward(Context&, Tensor y, ConstTensor x, ConstTensor cos, ConstTensor sin, const RopeKeys& keys = {},
                  ConstTensor begin = {});
// dx [B,T,H,D] T overwritten, may be dy itself  <-  dy [B,T,H,D] T or acc, rotated by the negative angle. dy_group
// [B,T,Hkv,D] acc, if given, is first added to dy, its head g to all query heads of group g; Hkv divides H.
void rope_backward(Context&, Tensor dx, ConstTensor dy, ConstTensor cos, ConstTensor sin, const RopeKeys& dkeys = {},
                   ConstTensor dy_group = {}, ConstTensor begin = {});

namespace cuda {
// For both directions, +1 forward and -1 backward. x_group: dy_group of rope_backward(), or absent.
void rope(Context&, Tensor y, ConstTensor x, ConstTensor x_group, const RopeKeys& keys, ConstTensor cos,
          ConstTensor sin, ConstTensor begin, int direction);
}  // namespace cuda
}  // namespace triad
