// Stores that round stochastically to bf16 (stochastic.h), for device code.
#pragma once
#include "kernels/common/bthd.cuh"
#include "kernels/common/stochastic.h"

namespace triad::cuda {

// Stores p[0..V) = x[0..V). f32 is stored as it is; bf16 is rounded with the random bits for [element, element + V). V
// is 1, or 8 if element is a multiple of 8; p as in load_vector().
template <int V, class T>
__device__ __forceinline__ void store_vector_stochastically(T* p, const float (&x)[V], const RoundingBits& bits,
                                                            int64_t element) {
  if constexpr (std::is_same_v<T, float>) {
    store_vector<V>(p, x);
  } else if constexpr (V == 1) {
    *p = __ushort_as_bfloat16(round_stochastically(__float_as_uint(x[0]), bits.of(element)));
  } else {
    static_assert(V == kVector<T> && V == RoundingBits::kGroup);
    const RoundingBits::Block block = bits.block(element / V);
    uint32_t words[V / 2];
#pragma unroll
    for (int i = 0; i < V / 2; ++i) {
      const uint32_t low = round_stochastically(__float_as_uint(x[2 * i]), block.lane(2 * i));
      const uint32_t high = round_stochastically(__float_as_uint(x[2 * i + 1]), block.lane(2 * i + 1));
      words[i] = high << 16 | low;
    }
    *reinterpret_cast<uint4*>(p) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace triad::cuda
