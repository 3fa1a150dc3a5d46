// DType: the element types. Floats are f64 (CPU reference), f32 and bf16 (storage only: arithmetic is in its
// accumulator type, f32).
#pragma once
#include <bit>
#include <cstdint>
#include <type_traits>

namespace triad {

enum class DType : uint8_t { f64, f32, bf16, i64, i32, u8 };

// bfloat16: the upper 16 bits of an IEEE 754 float, rounded to nearest even. The host's counterpart of __nv_bfloat16.
struct bf16 {
  uint16_t bits = 0;
  bf16() = default;
  explicit bf16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits = is_nan ? static_cast<uint16_t>((u >> 16) | 0x40u)
                  : static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

template <class T>
struct dtype_traits;  // ::value is the DType of the C++ type T; kernels/common/launch.cuh adds __nv_bfloat16
template <>
struct dtype_traits<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_traits<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_traits<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_traits<int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct dtype_traits<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_traits<uint8_t> {
  static constexpr DType value = DType::u8;
};
template <class T>
inline constexpr DType dtype_of = dtype_traits<std::remove_cv_t<T>>::value;

constexpr int64_t size_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
      return 2;
    case DType::u8:
      return 1;
  }
  return 0;
}

constexpr const char* name_of(DType t) {
  switch (t) {
    case DType::f64:
      return "f64";
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::i64:
      return "i64";
    case DType::i32:
      return "i32";
    case DType::u8:
      return "u8";
  }
  return "?";
}

constexpr bool is_float(DType t) { return t == DType::f64 || t == DType::f32 || t == DType::bf16; }

// The dtype of sums, statistics and parameter gradients for float dtype T: f64 for f64, else f32.
constexpr DType acc_dtype(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }
template <class T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace triad
