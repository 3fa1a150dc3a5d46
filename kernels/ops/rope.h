// Rotary position embedding, rotate-half layout: rotates the pair (x[j], x[j + D/2]) at position t by the angle t * f_j
// and multiplies it by a factor. Without scaling f_j = theta^(-2j/D) / scale and the factor is 1.
#pragma once
#include <array>
#include <limits>
#include <vector>

#include "engine/context.h"

namespace triad {

// How the frequencies f_j of a model trained on original_len tokens are changed for longer texts, as by the rope
// functions with these names in transformers.
enum class RopeScaling {
  none,
  // Pairs that turn fewer than low_freq times within original_len tokens are slowed down by `factor`, those that turn
  // more than high_freq times keep their frequency, and between them the two are mixed linearly in the turns.
  llama3,
  // Likewise with beta_slow and beta_fast turns, but mixed linearly in the pair index j, between whole indices. cos and
  // sin are multiplied by 0.1 ln(factor) + 1.
  yarn
};
struct RopeOptions {
  double theta = 10000, scale = 1;  // scale: positions are divided by it
  RopeScaling scaling = RopeScaling::none;
  double factor = 8;            // scaling only: this and the next fields
  int64_t original_len = 8192;  // tokens
  double low_freq = 1, high_freq = 4, beta_fast = 32, beta_slow = 1;
};
// Positions that are all 0: cos is 1 and sin 0, so that layers without rotation need no path of their own.
inline constexpr RopeOptions kNoRotation = {.scale = std::numeric_limits<double>::infinity()};
struct RopeFrequencies {
  std::vector<double> radians;  // [D/2]: the angle of each pair at position `scale`
  double factor = 1;            // multiplies cos and sin
};
RopeFrequencies rope_frequencies(int64_t head_dim, const RopeOptions&);

// Fills the angle table. cos, sin [T, D/2] acc overwritten, on either device. Angles are computed in double, then
// rounded; yarn's factor is in the table, so that both rotation directions multiply by it. Called once, at startup.
void rope_table(Context&, Tensor cos, Tensor sin, int64_t head_dim, const RopeOptions&);
struct RopeTables {
  ConstTensor cos = {}, sin = {};  // [positions, D/2] acc; absent where nothing is rotated
};
// Keys for up to three attention branches, each [B,T,Hkv,D] T or absent. rope_forward() and rope_backward() rotate them
// in place, in the same launch as the queries.
using RopeKeys = std::array<Tensor, 3>;
// y [B,T,H,D] T overwritten, may be x itself  <-  x [B,T,H,D] T; cos, sin [at least T, D/2] acc. D is even.
// begin [B,T] i32, optional: the position of token t is t - begin[t] (Documents::begin, common/documents.h), which may
// be negative; else the position is t, and cos and sin may begin with a later table row.
void rope_forward(Context&, Tensor y, ConstTensor x, ConstTensor cos, ConstTensor sin, const RopeKeys& keys = {},
                  ConstTensor begin = {});
// dx [B,T,H,D] T overwritten, may be dy itself  <-  dy [B,T,H,D] T or acc, rotated by the negative angle and multiplied
// by the same factor. dy_group [B,T,Hkv,D] acc, if given, is first added to dy, its head g to all query heads of group
// g; Hkv divides H.
void rope_backward(Context&, Tensor dx, ConstTensor dy, ConstTensor cos, ConstTensor sin, const RopeKeys& dkeys = {},
                   ConstTensor dy_group = {}, ConstTensor begin = {});

namespace cuda {
// For both directions, +1 forward and -1 backward. x_group: rope_backward()'s dy_group, or absent.
void rope(Context&, Tensor y, ConstTensor x, ConstTensor x_group, const RopeKeys& keys, ConstTensor cos,
          ConstTensor sin, ConstTensor begin, int direction);
}  // namespace cuda
}  // namespace triad
