// Initial parameter values, drawn where they are stored: normal numbers that depend only on (seed, stream, index), so
// any parameter range can be drawn alone, on any device, with the same bits; and constants. Values are computed in
// double, rounded to float and then to the dtype, so that a bf16 weight is its rounded fp32 master weight.
#pragma once
#include "engine/context.h"

namespace triad {

struct NormalValues {
  uint64_t seed = 0, stream = 0;  // Philox key (engine/rng.h)
  double std = 1;                 // standard deviation
};

// out [n] T (f64 on the CPU only), contiguous, overwritten: out[i] = std * Philox(seed, stream).normal(first + i)
void draw_normal(Context&, Tensor out, int64_t first, const NormalValues&);
// out, contiguous, overwritten: all elements become `value`
void fill_constant(Context&, Tensor out, double value);

namespace cuda {
void draw_normal(Context&, Tensor out, int64_t first, const NormalValues&);
void fill_constant(Context&, Tensor out, double value);
}  // namespace cuda
}  // namespace triad
