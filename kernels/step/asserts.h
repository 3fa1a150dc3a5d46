// Tensor checks on the device (runtime.asserts). The device keeps the first violation, and the host reads it later, so
// a check does not block. Checks are numbered in the order in which they are queued. A violation is one number, its
// key:
//   check << 44 | element << 2 | what
// The lowest key is kept: the first failing check's first bad element, in any thread order.
#pragma once
#include "engine/context.h"
#include "kernels/common/documents.h"

namespace triad {

struct Violation {
  // The first three are for floats, the last three for ids and for entries in selected-block lists.
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
// The initial value of `first`, above every key. All its bytes are equal, so a byte fill can write it.
inline constexpr int kNoViolationByte = 0x7f;
inline constexpr int64_t kNoViolation = 0x7f7f7f7f7f7f7f7f;

// first [1] i64, lowered to the first nonfinite element's key  <-  x: contiguous, any float dtype.
void assert_finite(Context&, Tensor first, int64_t check, ConstTensor x);
// first [1] i64, lowered to the first bad entry's key  <-  lists [B,T,Hkv,n] i32: for each token t its selected blocks,
// strictly ascending, from the first block in t's document to t's own block, then -1 up to the end.
void assert_lists(Context&, Tensor first, int64_t check, ConstTensor lists, int64_t l_sel,
                  const Documents& documents = {});
// first [1] i64, lowered to the key for the first id outside [least, end)  <-  ids: contiguous i32. A bad id is
// replaced by `least`, so that later ops stay within their memory until the host reports the violation.
void assert_range(Context&, Tensor first, int64_t check, Tensor ids, int64_t least, int64_t end);

namespace cuda {
void assert_finite(Context&, Tensor first, int64_t check, ConstTensor x);
void assert_lists(Context&, Tensor first, int64_t check, ConstTensor lists, int64_t l_sel, const Documents&);
void assert_range(Context&, Tensor first, int64_t check, Tensor ids, int64_t least, int64_t end);
}  // namespace cuda
}  // namespace triad
