// Views of [B,T,H,D] tensors for device code, and row loads and stores as floats, 16 bytes at a time.
#pragma once
#include <cstdint>
#include <type_traits>

#include "kernels/common/launch.cuh"

namespace triad::cuda {

// A [B,T,H,D] tensor; strides in elements, innermost stride 1. The outer axes may be strided, since q may be a slice of
// a q|k|v projection's rows. T may be const.
template <class T>
struct Bthd {
  T* data;
  int64_t stride_b, stride_t, stride_h;
  __device__ T* row(int64_t b, int64_t t, int64_t h) const { return data + b * stride_b + t * stride_t + h * stride_h; }
};
template <class T>
Bthd<T> bthd(const Tensor& t) {
  return {t.ptr<T>(), t.stride[0], t.stride[1], t.stride[2]};
}
template <class T>
Bthd<const T> bthd(const ConstTensor& t) {
  return {t.ptr<T>(), t.stride[0], t.stride[1], t.stride[2]};
}

// How many T fit in 16 bytes, the most that one thread can fetch with one load.
template <class T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

// Whether t's first element is aligned to 16 bytes.
inline bool is_aligned(const ConstTensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }
// Whether every row of t is aligned to 16 bytes and is a whole number of V-element (16-byte) vectors.
inline bool has_vectors(const ConstTensor& t, int V) {
  if (!is_aligned(t) || t.size(-1) % V != 0) return false;
  for (int i = 0; i + 1 < t.rank; ++i)
    if (t.dim[i] > 1 && t.stride[i] * size_of(t.dtype) % 16 != 0) return false;
  return true;
}
template <class... Tensors>
bool all_have_vectors(int V, const Tensors&... tensors) {
  return (has_vectors(tensors, V) && ...);
}
// Calls f.template operator()<V>() with V = kVector<T> if `vectors` is true, otherwise with V = 1.
template <class T, class F>
void dispatch_vector(bool vectors, F&& f) {
  if (vectors)
    f.template operator()<kVector<T>>();
  else
    f.template operator()<1>();
}

// Loads x[0..V) = p[0..V). V is 1, or p is aligned to 16 bytes and V elements are whole 16-byte vectors.
template <int V, class T>
__device__ __forceinline__ void load_vector(float (&x)[V], const T* p) {
  if constexpr (V == 1) {
    x[0] = to_float(*p);
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      const float4 f = *reinterpret_cast<const float4*>(p + i);
      x[i] = f.x, x[i + 1] = f.y, x[i + 2] = f.z, x[i + 3] = f.w;
    }
  } else {
    static_assert(V == kVector<T>);
    const uint4 u = *reinterpret_cast<const uint4*>(p);
    const uint32_t words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // a bf16 is the upper half of the float of equal value
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
}

// Unpacks a 16-byte vector to V floats. A packed bf16 vector takes half as many registers.
template <class T, int V>
__device__ __forceinline__ void as_floats(float (&x)[V], const uint4& vector) {
  static_assert(V == kVector<T>);
  load_vector<V>(x, reinterpret_cast<const T*>(&vector));
}

// Loads 16 read-only bytes from global memory that won't be read again soon: it bypasses L1 and fetches a 128-byte line
// into L2. In most ops it is slower than an ordinary load, so measure before using it.
__device__ __forceinline__ uint4 load_streamed(const void* p) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

// Stores p[0..V) = x[0..V), each rounded to T. V and p as in load_vector().
template <int V, class T>
__device__ __forceinline__ void store_vector(T* p, const float (&x)[V]) {
  if constexpr (V == 1) {
    *p = from_float<T>(x[0]);
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < V; i += 4) *reinterpret_cast<float4*>(p + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  } else {
    static_assert(V == kVector<T>);
    __nv_bfloat162 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(pairs);
  }
}

}  // namespace triad::cuda
