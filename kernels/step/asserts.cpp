// Tensor checks on the CPU: threads search tensor pieces for their first bad element, and the lowest key is kept.
#include "kernels/step/asserts.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

constexpr int64_t kPiece = 1 << 14;

void lower(const Tensor& first, int64_t key) {
  std::atomic_ref<int64_t> kept(*first.ptr<int64_t>());
  int64_t before = kept.load();
  while (key < before && !kept.compare_exchange_weak(before, key)) {}
}

// Finds the first bad element in each piece. wrong(i): what is wrong with element i, or -1.
template <class Wrong>
void find_first(Context& ctx, const Tensor& first, int64_t check, int64_t elements, Wrong&& wrong) {
  parallel_for(ctx, ceil_div(elements, kPiece), [&](int64_t piece) {
    for (int64_t i = piece * kPiece; i < std::min(elements, (piece + 1) * kPiece); ++i)
      if (const int64_t what = wrong(i); what >= 0) return lower(first, Violation::key(check, i, what));
  });
}

void check_arguments(const char* op, const ConstTensor& first, int64_t check, const ConstTensor& x) {
  check_tensor(op, first, {1}, DType::i64);
  TRIAD_CHECK(0 <= check && check < Violation::kMostChecks, "{}: check {} of at most {}", op, check,
              Violation::kMostChecks);
  TRIAD_CHECK(x.contiguous(), "{}: {} is strided", op, x.str());
}

}  // namespace

void assert_finite(Context& ctx, Tensor first, int64_t check, ConstTensor x) {
  const OpScope op_scope(ctx, "assert_finite");
  check_arguments("assert_finite", first, check, x);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::assert_finite(ctx, first, check, x);
  }
  dispatch_float(x.dtype, [&]<class T>() {
    const T* values = x.ptr<T>();
    find_first(ctx, first, check, x.numel(), [&](int64_t i) -> int64_t {
      const auto value = static_cast<acc_t<T>>(values[i]);
      if (std::isfinite(value)) return -1;
      return std::isnan(value) ? Violation::nan : value > 0 ? Violation::plus_infinity : Violation::minus_infinity;
    });
  });
}

void assert_lists(Context& ctx, Tensor first, int64_t check, ConstTensor lists, int64_t l_sel,
                  const Documents& documents) {
  const OpScope op_scope(ctx, "assert_lists");
  check_arguments("assert_lists", first, check, lists);
  TRIAD_CHECK(lists.rank == 4 && l_sel >= 1, "assert_lists: lists {} of blocks of {}", lists.str(), l_sel);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::assert_lists(ctx, first, check, lists, l_sel, documents);
  }
  const int32_t* entries = lists.ptr<int32_t>();
  const int64_t T = lists.size(1), groups = lists.size(2), n = lists.size(3);
  find_first(ctx, first, check, lists.numel(), [&](int64_t i) -> int64_t {
    const int64_t block = entries[i], t = documents.part.token(i / (n * groups) % T),
                  before = i % n == 0 ? -1 : entries[i - 1];
    const DocumentRow<int64_t> row = host_row(documents, i / (n * groups) / T, documents.part.tokens_or(T));
    const int64_t end = row.first_block(t) + ceil_div(row.end(t) - row.begin(t), l_sel);  // the document's ids end here
    if (block < -1 || block >= end || (block >= 0 && block < row.first_block(t))) return Violation::out_of_range;
    if (block < 0) return -1;
    if (i % n > 0 && before < 0) return Violation::not_ascending;  // an entry after the list's end
    if (block <= before) return Violation::not_ascending;
    return block > row.block_of(t, l_sel) ? static_cast<int64_t>(Violation::future) : -1;
  });
}

void assert_range(Context& ctx, Tensor first, int64_t check, Tensor ids, int64_t least, int64_t end) {
  const OpScope op_scope(ctx, "assert_range");
  check_arguments("assert_range", first, check, ids);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::assert_range(ctx, first, check, ids, least, end);
  }
  int32_t* values = ids.ptr<int32_t>();
  const auto wrong = [&](int64_t i) -> int64_t {
    return least <= values[i] && values[i] < end ? -1 : static_cast<int64_t>(Violation::out_of_range);
  };
  find_first(ctx, first, check, ids.numel(), wrong);
  parallel_for(ctx, ids.numel(), [&](int64_t i) {
    if (wrong(i) >= 0) values[i] = static_cast<int32_t>(least);
  });
}

}  // namespace triad
