// Checks of tensors on their device (runtime.asserts). The device keeps the first violation; the host reads it later.
// Checks are numbered in the order in which they are queued. A violation is one number,
//   check << 44 | element << 2 | what,
// and the lowest is kept: the first bad element of the first failing check, independent of the order of threads.
#pragma once
#include "engine/context.h"

namespace triad {

struct Violation {
  // The first three are for floats, the last three for entries of a list.
  enum What : int64_t {
    nan = 0,
    plus_infinity = 1,
    minus_infinity = 2,
    out_of_range = 0,
    not_ascending = 1,
    future = 2
  };
  int64_t check, element;
  int64_t what;

  static constexpr int kElementBits = 42, kWhatBits = 2;
  static constexpr int64_t kMostChecks = int64_t{1} << 18;
  static constexpr int64_t key(int64_t check, int64_t element, int64_t what) {
    return check << (kElementBits + kWhatBits) | element << kWhatBits | what;
  }
  static constexpr Violation of(int64_t key) {
    return {key >> (kElementBits + kWhatBits), key >> kWhatBits & ((int64_t{1} << kElementBits) - 1),
            key & ((1 << kWhatBits) - 1)};
  }
};
// Initial value of the kept violation, above every key. All of its bytes are equal, so a byte fill can write it.
inline constexpr int kNoViolationByte = 0x7f;
inline constexpr int64_t kNoViolation = 0x7f7f7f7f7f7f7f7f;

// first [1] i64, lowered to the key of the first element that is not finite  <-  x: contiguous floats.
void assert_finite(Context&, Tensor first, int64_t check, ConstTensor x);
// first [1] i64, lowered to the key of the first bad entry  <-  lists [B,T,Hkv,n] i32: the selected blocks of each
// token t, strictly ascending, within [0, t / l_sel], padded with -1 at the end.
void assert_lists(Context&, Tensor first, int64_t check, ConstTensor lists, int64_t l_sel);
// first [1] i64, lowered to the key of the first id outside [least, end)  <-  ids: contiguous i32. Bad ids are replaced
// by `least`, so that later ops stay within their memory until the host reports the violation.
void assert_range(Context&, Tensor first, int64_t check, Tensor ids, int64_t least, int64_t end);

namespace cuda {
void assert_finite(Context&, Tensor first, int64_t check, ConstTensor x);
void assert_lists(Context&, Tensor first, int64_t check, ConstTensor lists, int64_t l_sel);
void assert_range(Context&, Tensor first, int64_t check, Tensor ids, int64_t least, int64_t end);
}  // namespace cuda
}  // namespace triad
