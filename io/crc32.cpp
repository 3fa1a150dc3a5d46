#include "io/crc32.h"

#include <zlib.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace triad {

namespace {

uint32_t crc32_by_zlib(std::span<const std::byte> bytes, uint32_t crc) {
  if (bytes.empty()) return crc;  // zlib would return its initial value for a null pointer, instead of crc
  return static_cast<uint32_t>(crc32_z(crc, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

#ifdef __x86_64__

constexpr size_t kStep = 64, kLane = 16;  // bytes per iteration (four lanes), and per lane

// Replaces x by x times the polynomials of `by`, plus `next`: x moved over the bytes between it and next.
[[gnu::target("pclmul,sse4.1")]] __m128i folded(__m128i x, __m128i by, __m128i next) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11)), next);
}

// bytes.size() must be a multiple of kLane, at least kStep. Folds four lanes over the bytes, then reduces them to 32
// bits (V. Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009,
// with the paper's constants for gzip's bit-reflected polynomial).
[[gnu::target("pclmul,sse4.1")]] uint32_t crc32_by_multiplication(std::span<const std::byte> bytes, uint32_t crc) {
  const __m128i by_four_lanes = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4),
                by_one_lane = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0), by_64_bits = _mm_set_epi64x(0, 0x0163cd6124),
                polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641), low_halves = _mm_setr_epi32(~0, 0, ~0, 0);
  const std::byte* at = bytes.data();
  const std::byte* const end = at + bytes.size();
  const auto load = [](const std::byte* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); };
  __m128i a = _mm_xor_si128(load(at), _mm_cvtsi32_si128(static_cast<int>(~crc))), b = load(at + kLane),
          c = load(at + 2 * kLane), d = load(at + 3 * kLane);
  for (at += kStep; end - at >= static_cast<std::ptrdiff_t>(kStep); at += kStep) {
    a = folded(a, by_four_lanes, load(at));
    b = folded(b, by_four_lanes, load(at + kLane));
    c = folded(c, by_four_lanes, load(at + 2 * kLane));
    d = folded(d, by_four_lanes, load(at + 3 * kLane));
  }
  __m128i x = folded(folded(folded(a, by_one_lane, b), by_one_lane, c), by_one_lane, d);
  for (; at < end; at += kLane) x = folded(x, by_one_lane, load(at));
  // 128 bits to 64, then Barrett's reduction to 32.
  x = _mm_xor_si128(_mm_srli_si128(x, 8), _mm_clmulepi64_si128(x, by_one_lane, 0x10));
  x = _mm_xor_si128(_mm_srli_si128(x, 4), _mm_clmulepi64_si128(_mm_and_si128(x, low_halves), by_64_bits, 0x00));
  const __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(x, low_halves), polynomial, 0x10);
  x = _mm_xor_si128(x, _mm_clmulepi64_si128(_mm_and_si128(quotient, low_halves), polynomial, 0x00));
  return ~static_cast<uint32_t>(_mm_extract_epi32(x, 1));
}

#endif

}  // namespace

uint32_t crc32_of(std::span<const std::byte> bytes, uint32_t crc) {
#ifdef __x86_64__
  static const bool multiplies = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (multiplies && bytes.size() >= kStep) {
    const size_t whole = bytes.size() / kLane * kLane;
    crc = crc32_by_multiplication(bytes.first(whole), crc);
    bytes = bytes.subspan(whole);
  }
#endif
  return crc32_by_zlib(bytes, crc);
}

uint32_t crc32_shifted(uint32_t crc, int64_t bytes_after) {
  return static_cast<uint32_t>(crc32_combine(crc, 0, static_cast<z_off_t>(bytes_after)));
}

}  // namespace triad
