// e^x and the logistic function for CPU loops. double uses the C library; float uses a polynomial, because compilers do
// not vectorise loops that call expf.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace triad {

inline double exp_of(double x) { return std::exp(x); }
// e^x = 2^n e^r with |r| <= ln(2)/2, and e^r by the Cephes library's polynomial: error within 2 ulp, no branch. Returns
// 0 below -87, where floats become denormal, and infinity above 88.4, so the logistic function is 0 for very negative
// x.
inline float exp_of(float x) {
  constexpr float kRound = 12582912.0f;         // 1.5 * 2^23: adding it rounds a float to an integer
  const float clamped = x > 89.0f ? 89.0f : x;  // e^89 has n = 128, the exponent of infinity
  const float shifted = clamped * 1.44269504f + kRound, n = shifted - kRound;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound) + 127u) << 23;
  return x < -87.0f ? 0.0f : p * std::bit_cast<float>(exponent);
}

template <class A>
inline A sigmoid_of(A x) {
  return A{1} / (A{1} + exp_of(-x));
}

}  // namespace triad
