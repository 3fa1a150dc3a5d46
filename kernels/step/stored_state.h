// StoredState: access on the CPU to an update's part of a parameter or moment in the flat buffers. Values are read as
// they are stored; bf16 is rounded stochastically when it is written (AdamW and Muon draw the same random bits).
#pragma once
#include <cstdint>

#include "engine/tensor.h"
#include "kernels/common/stochastic.h"
#include "kernels/step/adamw.h"

namespace triad {

// Options: has the members seed, step and first_element, as AdamWOptions and MuonOptions have.
template <class T>
struct StoredState {
  T* data;
  template <class Options>
  StoredState(const Tensor& t, const Options&, AdamWTensor) : data(t.ptr<T>()) {}
  T get(int64_t i) const { return data[i]; }
  void set(int64_t i, T x) { data[i] = x; }
};

// Elements must be written in ascending order.
template <>
struct StoredState<bf16> {
  bf16* data;
  StochasticRounder round;
  int64_t first;
  template <class Options>
  StoredState(const Tensor& t, const Options& o, AdamWTensor which)
      : data(t.ptr<bf16>()), round(o.seed, adamw_stream(o.step, which)), first(o.first_element) {}
  float get(int64_t i) const { return data[i]; }
  void set(int64_t i, float x) { data[i] = round(x, first + i); }
};

}  // namespace triad
