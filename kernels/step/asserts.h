// Checks of values where they are (runtime.asserts): what is wrong first is kept on the device, and the host looks when
// it comes by. Checks are numbered in the order in which they are queued, and a violation is one number,
//   check << 44 | element << 2 | what,
// of which the lowest is kept: the first bad element of the first check that met one, whichever thread came first.
#pragma once
#include "engine/context.h"

namespace triad {

struct Violation {
  // Of a float; of an entry of a list.
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
// A number of equal bytes, which a fill can write, above every key.
inline constexpr int kNoViolationByte = 0x7f;
inline constexpr int64_t kNoViolation = 0x7f7f7f7f7f7f7f7f;

// first [1] i64 lowered to the key of the first element that is wrong, if there is one  <-
// x: contiguous floats, all to be finite.
void assert_finite(Context&, Tensor first, int64_t check, ConstTensor x);
// lists [B,T,Hkv,n] i32: of token t the blocks ascend, each once, within [0, t / l_sel], and -1 stands behind them
// only.
void assert_lists(Context&, Tensor first, int64_t check, ConstTensor lists, int64_t l_sel);
// ids: contiguous i32, to be in [least, end). Those that are not become `least`, so that what follows reads no memory
// that is not its own and the message can still be told.
void assert_range(Context&, Tensor first, int64_t check, Tensor ids, int64_t least, int64_t end);

namespace cuda {
void assert_finite(Context&, Tensor first, int64_t check, ConstTensor x);
void assert_lists(Context&, Tensor first, int64_t check, ConstTensor lists, int64_t l_sel);
void assert_range(Context&, Tensor first, int64_t check, Tensor ids, int64_t least, int64_t end);
}  // namespace cuda
}  // namespace triad
