// Initial parameter values, drawn where they are stored: normal and uniform numbers that depend only on (seed, stream,
// index), so any parameter range can be drawn alone, on any device, with the same bits; and constants. Values are
// computed in double, rounded to float and then to the dtype, so that a bf16 weight is its rounded fp32 master weight.
#pragma once
#include "engine/context.h"

namespace triad {

struct NormalValues {
  uint64_t seed = 0, stream = 0;  // Philox key (engine/rng.h)
  double std = 1;                 // standard deviation
};

// out [n] T (f64 on the CPU only), contiguous, overwritten: out[i] = std * Philox(seed, stream).normal(first + i)
void draw_normal(Context&, Tensor out, int64_t first, const NormalValues&);

struct UniformValues {
  uint64_t seed = 0, stream = 0;  // Philox key
  double bound = 1;               // values are in [-bound, bound)
};

// The same with out[i] = bound * (2 Philox(seed, stream).uniform(first + i) - 1)
void draw_uniform(Context&, Tensor out, int64_t first, const UniformValues&);
// out, contiguous, overwritten: all elements become `value`
void fill_constant(Context&, Tensor out, double value);

namespace cuda {
void draw_uniform(Context&, Tensor out, int64_t first, const UniformValues&);
void draw_normal(Context&, Tensor out, int64_t first, const NormalValues&);
void fill_constant(Context&, Tensor out, double value);
}  // namespace cuda
}  // namespace triad
