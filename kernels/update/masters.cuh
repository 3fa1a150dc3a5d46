// Masters: the parameters that an update reads and writes, and the weights that follow from them, for device code. P is
// float; __nv_bfloat16 for parameters that are themselves the weights; or uint16_t for split masters (split_master.h).
#pragma once
#include "kernels/common/stochastic.cuh"
#include "kernels/update/split_master.h"

namespace triad::cuda {

// Calls f.template operator()<P>().
template <class F>
void dispatch_masters(const Tensor& param, F&& f) {
  if (is_remainder(param)) return f.template operator()<uint16_t>();
  dispatch_gpu_float(param.dtype, f);
}
// Whether masters can be accessed as vectors of 8.
inline bool has_master_vectors(const Tensor& param, const Tensor& weights, const TieBits& ties) {
  return is_aligned(param) && (weights.empty() || is_aligned(weights)) && ties.first % 8 == 0;
}

// V is 1, or 8 if tensors are aligned and i is a multiple of 8.
template <class P>
class Masters {
 public:
  Masters(const Tensor& param, const Tensor& weights, const TieBits&)
      : param_(param.ptr<P>()), weights_(weights.empty() ? nullptr : weights.ptr<__nv_bfloat16>()) {}
  // Loads x[0..V) from element i on. Returns what store() needs.
  template <int V>
  __device__ __forceinline__ uint32_t load(float (&x)[V], int64_t i) const {
    load_vector<V>(x, param_ + i);
    return 0;
  }
  // Stores x[0..V), in bf16 rounded with the random bits for [element, element + V).
  template <int V>
  __device__ __forceinline__ void store(int64_t i, const float (&x)[V], uint32_t, const RoundingBits& bits,
                                        int64_t element) const {
    store_vector_stochastically<V>(param_ + i, x, bits, element);
    if constexpr (std::is_same_v<P, float>)
      if (weights_ != nullptr) store_vector<V>(weights_ + i, x);
  }

 private:
  P* param_;
  __nv_bfloat16* weights_;  // null if the model computes with param itself
};

template <>
class Masters<uint16_t> {
 public:
  Masters(const Tensor& remainder, const Tensor& weights, const TieBits& ties)
      : remainder_(remainder_bits(remainder)),
        weights_(weights.ptr<__nv_bfloat16>()),
        ties_(tie_words(ties)),
        first_tie_(ties.first) {}
  template <int V>
  __device__ __forceinline__ uint32_t load(float (&x)[V], int64_t i) const {
    const uint32_t ties = tie_bits<V>(i);
    if constexpr (V == 1) {
      x[0] = __uint_as_float(join_bits(__bfloat16_as_ushort(weights_[i]), remainder_[i], ties));
    } else {
      static_assert(V == 8);
      const uint4 weights = *reinterpret_cast<const uint4*>(weights_ + i);
      const uint4 remainders = *reinterpret_cast<const uint4*>(remainder_ + i);
      const uint32_t w[4] = {weights.x, weights.y, weights.z, weights.w};
      const uint32_t r[4] = {remainders.x, remainders.y, remainders.z, remainders.w};
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const int shift = k % 2 * 16;
        x[k] = __uint_as_float(join_bits(static_cast<uint16_t>(w[k / 2] >> shift),
                                         static_cast<uint16_t>(r[k / 2] >> shift), ties >> k & 1u));
      }
    }
    return ties;
  }
  // ties: from load(), or tie_bits().
  template <int V>
  __device__ __forceinline__ void store(int64_t i, const float (&x)[V], uint32_t ties, const RoundingBits&,
                                        int64_t) const {
    store<V>(i, x, ties);
  }
  template <int V>
  __device__ __forceinline__ void store(int64_t i, const float (&x)[V], uint32_t ties) const {
    store_vector<V>(weights_ + i, x);
    uint32_t now = 0;
#pragma unroll
    for (int k = 0; k < V; ++k) now |= (has_tie_bit(__float_as_uint(x[k])) ? 1u : 0u) << k;
    if constexpr (V == 1) {
      remainder_[i] = remainder_of(__float_as_uint(x[0]));
    } else {
      uint32_t words[V / 2];
#pragma unroll
      for (int k = 0; k < V / 2; ++k)
        words[k] = __byte_perm(__float_as_uint(x[2 * k]), __float_as_uint(x[2 * k + 1]), 0x5410);  // the lower halves
      *reinterpret_cast<uint4*>(remainder_ + i) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    // Other threads may change other bits of the word. Bits rarely change: about one in 2^17 masters has its bit set.
    const int64_t bit = first_tie_ + i;
    if (now != ties) atomicXor(ties_ + bit / TieBits::kPerWord, (now ^ ties) << bit % TieBits::kPerWord);
  }
  // The tie bits for [i, i + V): 8 are one byte.
  template <int V>
  __device__ __forceinline__ uint32_t tie_bits(int64_t i) const {
    const int64_t bit = first_tie_ + i;
    const uint32_t byte = reinterpret_cast<const uint8_t*>(ties_)[bit / 8];
    return V == 8 ? byte : byte >> bit % 8 & 1u;
  }

 private:
  uint16_t* remainder_;
  __nv_bfloat16* weights_;
  uint32_t* ties_;
  int64_t first_tie_;
};

}  // namespace triad::cuda
