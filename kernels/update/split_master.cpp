// Split masters on the CPU.
#include "kernels/update/split_master.h"

#include <algorithm>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"
#include "kernels/update/stored_state.h"

namespace triad {

namespace {

void check(const char* op, const ConstTensor& master, const SplitMaster& s) {
  TRIAD_CHECK(master.rank == 1, "{}: master is {}, not a vector", op, master.str());
  check_tensor(op, master, master.shape(), DType::f32);
  check_split_master(op, s, master.size(0));
}

template <class F>
void for_each_element(Context& ctx, int64_t n, F&& f) {
  constexpr int64_t kPiece = 1 << 12;
  parallel_for(ctx, ceil_div(n, kPiece), [&](int64_t piece) {
    for (int64_t i = piece * kPiece; i < std::min((piece + 1) * kPiece, n); ++i) f(i);
  });
}

}  // namespace

void check_split_master(const char* op, const SplitMaster& s, int64_t n) {
  check_tensor(op, s.remainder, {n, 2}, DType::u8);
  check_tensor(op, s.weights, {n}, DType::bf16);
  const TieBits& ties = s.ties;
  TRIAD_CHECK(ties.words.dtype == DType::i32 && ties.words.rank == 1 && ties.first >= 0 &&
                  TieBits::words_for(ties.first + n) <= ties.words.size(0),
              "{}: {} tie bits from bit {} on in {}", op, n, ties.first, ties.words.str());
}

void join_master(Context& ctx, Tensor master, const SplitMaster& s) {
  const OpScope op_scope(ctx, "join_master");
  check("join_master", master, s);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::join_master(ctx, master, s);
  }
  const StoredMaster<uint16_t> stored(s);
  for_each_element(ctx, master.numel(), [&](int64_t i) { master.ptr<float>()[i] = stored.get(i); });
}

void split_master(Context& ctx, const SplitMaster& s, ConstTensor master) {
  const OpScope op_scope(ctx, "split_master");
  check("split_master", master, s);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::split_master(ctx, s, master);
  }
  const StoredMaster<uint16_t> stored(s);
  for_each_element(ctx, master.numel(), [&](int64_t i) { stored.set(i, master.ptr<float>()[i]); });
}

}  // namespace triad
