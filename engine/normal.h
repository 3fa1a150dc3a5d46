// The standard normal number made from 128 random bits (Box-Muller), with the same bits on every device: a C library
// and CUDA round log and cos differently, so these are written out here. Every product that is added to something is an
// explicit fma, so a compiler has nothing left to contract, whatever its flags; and there is no branch, so loops over
// numbers vectorise. Errors are below one unit in the last place. The polynomials are fdlibm's (Sun Microsystems, 1993:
// e_log.c, k_sin.c, k_cos.c).
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define TRIAD_HOST_DEVICE __host__ __device__
#else
#define TRIAD_HOST_DEVICE
#endif

namespace triad {

namespace portable {

// The natural logarithm of a normal number u > 0. u = m 2^k with m in [sqrt(1/2), sqrt(2)), f = m - 1, s = f / (2 + f);
// log m = f - f^2 / 2 + s (f^2 / 2 + a polynomial in s^2).
TRIAD_HOST_DEVICE inline double log(double u) {
  constexpr uint64_t kOne = 0x3ff0000000000000, kSqrtHalf = 0x3fe6a09e667f3bcd;  // the bits of 1 and sqrt(1/2)
  constexpr double kLn2High = 6.93147180369123816490e-01;  // its last bits are 0, so that k times it is exact
  constexpr double kLn2Low = 1.90821492927058770002e-10;
  const uint64_t bits = std::bit_cast<uint64_t>(u), exponent = (bits + (kOne - kSqrtHalf)) >> 52;  // k + 1023
  const double k = std::bit_cast<double>(0x4330000000000000 | exponent) - (0x1p52 + 1023);
  const double f = std::bit_cast<double>(bits + kOne - (exponent << 52)) - 1;
  const double s = f / (2 + f), z = s * s;
  double p = 1.479819860511658591e-01;
  p = std::fma(z, p, 1.531383769920937332e-01);
  p = std::fma(z, p, 1.818357216161805012e-01);
  p = std::fma(z, p, 2.222219843214978396e-01);
  p = std::fma(z, p, 2.857142874366239149e-01);
  p = std::fma(z, p, 3.999999999940941908e-01);
  p = std::fma(z, p, 6.666666666666735130e-01);
  const double half = 0.5 * f, t = std::fma(s, std::fma(half, f, z * p), k * kLn2Low);
  return std::fma(k, kLn2High, f - std::fma(half, f, -t));
}

// The cosine of an angle in [0, 2 pi]. angle = q pi/2 + r + tail with |r| <= pi/4; tail is what r's rounding left out.
TRIAD_HOST_DEVICE inline double cos(double angle) {
  constexpr double kRound = 0x1.8p52;  // adding it rounds a double to an integer, which its last bits then hold
  constexpr double kHalfPi = 1.5707963267948966, kHalfPiLow = 6.123233995736766e-17;  // pi/2 to 106 bits
  const double shifted = std::fma(angle, 0.6366197723675814, kRound), q = shifted - kRound;
  const uint64_t quadrant = std::bit_cast<uint64_t>(shifted);
  const double most = std::fma(-q, kHalfPi, angle);  // exact
  const double r = std::fma(-q, kHalfPiLow, most), tail = std::fma(-q, kHalfPiLow, most - r);
  const double z = r * r, half = -0.5 * z;
  double a = 1.58969099521155010221e-10;  // sin r = r + r^3 a
  a = std::fma(z, a, -2.50507602534068634195e-08);
  a = std::fma(z, a, 2.75573137070700676789e-06);
  a = std::fma(z, a, -1.98412698298579493134e-04);
  a = std::fma(z, a, 8.33333333332248946124e-03);
  a = std::fma(z, a, -1.66666666666666324348e-01);
  const double sine = r + std::fma(z * r, a, std::fma(half, tail, tail));
  double b = -1.13596475577881948265e-11;  // cos r = 1 - r^2 / 2 + r^4 b
  b = std::fma(z, b, 2.08757232129817482790e-09);
  b = std::fma(z, b, -2.75573143513906633035e-07);
  b = std::fma(z, b, 2.48015872894767294178e-05);
  b = std::fma(z, b, -1.38888888888741095749e-03);
  b = std::fma(z, b, 4.16666666666666019037e-02);
  const double near = std::fma(z, -0.5, 1.0), lost = std::fma(z, -0.5, 1.0 - near);
  const double cosine = near + std::fma(z * z, b, std::fma(-r, tail, lost));
  // cos r, -sin r, -cos r, sin r
  const uint64_t is_sine = uint64_t{0} - (quadrant & 1);
  const uint64_t value = (std::bit_cast<uint64_t>(sine) & is_sine) | (std::bit_cast<uint64_t>(cosine) & ~is_sine);
  return std::bit_cast<double>(value ^ ((quadrant + 1) & 2) << 62);
}

// The upper 53 of 64 random bits as a number in [0, 1), a multiple of 2^-53. Each half of the bits becomes an exact
// double by the exponent put before it.
TRIAD_HOST_DEVICE inline double uniform(uint64_t bits) {
  const double high = std::bit_cast<double>(0x4530000000000000 | bits >> 43) - (0x1p84 + 0x1p52);
  const double low = std::bit_cast<double>(0x4330000000000000 | (bits >> 11 & 0xffffffff));
  return (high + low) * 0x1p-53;
}

}  // namespace portable

// a and b: 64 random bits each.
TRIAD_HOST_DEVICE inline double normal_from_bits(uint64_t a, uint64_t b) {
  const double u = 1.0 - portable::uniform(a), angle = 6.283185307179586 * portable::uniform(b);
  return std::sqrt(-2.0 * portable::log(u)) * portable::cos(angle);
}

}  // namespace triad
