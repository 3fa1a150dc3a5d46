// CPU access to an update's part of the flat buffers: StoredState for a moment, StoredMaster for parameters and the
// weights that follow from them. Values are read as they are stored. A bf16 value is rounded stochastically when it is
// written, for Muon too with random numbers from AdamW's streams (adamw_stream).
#pragma once
#include <atomic>
#include <bit>
#include <cstdint>

#include "engine/check.h"
#include "engine/tensor.h"
#include "kernels/common/stochastic.h"
#include "kernels/update/adamw.h"
#include "kernels/update/split_master.h"

namespace triad {

// Calls f.template operator()<T>() with T = float or bf16, the dtypes a state tensor can have. what: its name in
// errors.
template <class F>
void dispatch_state(const char* what, DType dtype, F&& f) {
  if (dtype == DType::f32) return f.template operator()<float>();
  TRIAD_CHECK(dtype == DType::bf16, "{} is {}: f32 and bf16 are possible", what, name_of(dtype));
  f.template operator()<bf16>();
}

// Options: has members seed, step and first_element, like AdamWOptions and MuonOptions.
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

// P: f32, f64, bf16 for parameters that are themselves the weights, or uint16_t for split masters.
template <class P>
struct StoredMaster {
  StoredState<P> param;
  bf16* weights;  // null if the model computes with param itself
  template <class Options>
  StoredMaster(const Tensor& param, const Tensor& weights, const TieBits&, const Options& o)
      : param(param, o, AdamWTensor::param), weights(weights.empty() ? nullptr : weights.ptr<bf16>()) {}
  auto get(int64_t i) const { return param.get(i); }
  void set(int64_t i, acc_t<P> x) {
    param.set(i, x);
    if (weights != nullptr) weights[i] = bf16(static_cast<float>(x));
  }
};

template <>
struct StoredMaster<uint16_t> {
  uint16_t* remainder;
  bf16* weights;
  uint32_t* ties;
  int64_t first_tie;
  explicit StoredMaster(const SplitMaster& s)
      : remainder(remainder_bits(s.remainder)),
        weights(s.weights.ptr<bf16>()),
        ties(tie_words(s.ties)),
        first_tie(s.ties.first) {}
  template <class Options>
  StoredMaster(const Tensor& param, const Tensor& weights, const TieBits& ties, const Options&)
      : StoredMaster(SplitMaster{param, weights, ties}) {}
  float get(int64_t i) const {
    return std::bit_cast<float>(join_bits(weights[i].bits, remainder[i], tie(first_tie + i)));
  }
  void set(int64_t i, float x) const {
    const auto bits = std::bit_cast<uint32_t>(x);
    weights[i] = bf16(x);
    remainder[i] = remainder_of(bits);
    const int64_t bit = first_tie + i;
    // Another thread may change other bits of the word at the same time.
    if (tie(bit) != has_tie_bit(bits)) word(bit).fetch_xor(1u << bit % TieBits::kPerWord, std::memory_order_relaxed);
  }

 private:
  std::atomic_ref<uint32_t> word(int64_t bit) const { return std::atomic_ref(ties[bit / TieBits::kPerWord]); }
  bool tie(int64_t bit) const { return word(bit).load(std::memory_order_relaxed) >> bit % TieBits::kPerWord & 1u; }
};

}  // namespace triad
