// Integer divisions that round up or down, for the host and the device.
#pragma once
#include <type_traits>

namespace triad {

// n / d rounded up, for n >= 0 and d > 0, in the common type of both.
template <class N, class D>
constexpr std::common_type_t<N, D> ceil_div(N n, D d) {
  return (n + d - 1) / d;
}

// The least multiple of d that is at least n, for n >= 0 and d > 0.
template <class N, class D>
constexpr std::common_type_t<N, D> round_up(N n, D d) {
  return ceil_div(n, d) * d;
}

// n / d rounded down, for any n and d > 0.
template <class N, class D>
constexpr std::common_type_t<N, D> floor_div(N n, D d) {
  return n >= 0 ? n / d : -ceil_div(-n, d);
}

}  // namespace triad
