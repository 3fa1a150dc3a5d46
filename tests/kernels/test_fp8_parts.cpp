// Activations in e4m3 of rows so wide and many that they are computed and cast in several parts.
#include <algorithm>
#include <vector>

#include "kernels/ops/activation.h"
#include "tests/support/device_lab.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

// Each row has the bytes that it has alone. N: enough rows for two parts in forward.
template <class T>
void check_parts(Device device, int64_t N) {
  constexpr int64_t C = kFusedCastColumns + 16;
  Lab lab(device, int64_t{320} << 20, int64_t{34} << 20);
  Context& ctx = lab.ctx();
  const auto filled = [&](int64_t columns) {
    const Tensor t = lab.alloc(dtype_of<T>, {N, columns});
    std::vector<T> row(static_cast<size_t>(columns));
    for (int64_t i = 0; i < N; ++i) {
      for (size_t k = 0; k < row.size(); ++k)
        row[k] = static_cast<T>(static_cast<float>((k * 7919 + static_cast<size_t>(i) * 104729) % 2003) / 500 - 2);
      write(ctx, t.slice(0, i, i + 1), row.data());
    }
    return t;
  };
  const auto alloc = [&](int64_t rows, int64_t columns) {
    return E4m3Rows{lab.alloc(DType::u8, {rows, columns}), lab.alloc(DType::f32, {rows})};
  };
  const Tensor pre = filled(2 * C), dy = filled(C), gate = pre.slice(1, 0, C), up = pre.slice(1, C, 2 * C);
  // call(grad, y, rows): grad: the gradient's rows, with `width` columns, which a forward does not write.
  const auto check = [&](const char* op, int64_t width, auto&& call) {
    INFO(device.str() << " " << op);
    const E4m3Rows grad = alloc(N, width), y = alloc(N, C), grad_alone = alloc(1, width), y_alone = alloc(1, C);
    const auto rows_from = [](int64_t begin, int64_t end) {
      return [begin, end](const Tensor& t) { return t.slice(0, begin, end); };
    };
    call(grad, y, rows_from(0, N));
    int64_t differ = 0;
    const auto compare = [&](const E4m3Rows& all, const E4m3Rows& alone, int64_t i) {
      differ += lab.values<uint8_t>(all.q.slice(0, i, i + 1)) != lab.values<uint8_t>(alone.q) ||
                lab.values<float>(all.scale.slice(0, i, i + 1)) != lab.values<float>(alone.scale);
    };
    for (int64_t i = 0; i < N; ++i) {
      call(grad_alone, y_alone, rows_from(i, i + 1));
      compare(y, y_alone, i);
      if (width > 0) compare(grad, grad_alone, i);
    }
    CHECK(differ == 0);
  };
  check("silu", 0, [&](const E4m3Rows&, const E4m3Rows& y, auto&& rows) { silu_forward_e4m3(ctx, y, rows(gate)); });
  check("swiglu", 0,
        [&](const E4m3Rows&, const E4m3Rows& y, auto&& rows) { swiglu_forward_e4m3(ctx, y, rows(gate), rows(up)); });
  check("silu backward", C, [&](const E4m3Rows& grad, const E4m3Rows& y, auto&& rows) {
    silu_backward_e4m3(ctx, grad, y, rows(dy), rows(gate));
  });
  check("swiglu backward", 2 * C, [&](const E4m3Rows& grad, const E4m3Rows& y, auto&& rows) {
    swiglu_backward_e4m3(ctx, grad, y, rows(dy), rows(pre));
  });
  // The model writes both results over the rows that they come from.
  const E4m3Rows grad = alloc(N, 2 * C), y = alloc(N, C);
  swiglu_backward_e4m3(ctx, grad, y, dy, pre);
  const Tensor bytes(pre.data, DType::u8, {N, 2 * C * size_of(pre.dtype)}, pre.device);
  const E4m3Rows grad_over{bytes.slice(1, 0, 2 * C), grad.scale}, y_over{bytes.slice(1, 2 * C, 3 * C), y.scale};
  swiglu_backward_e4m3(ctx, grad_over, y_over, dy, pre);
  int64_t differ = 0;
  for (int64_t i = 0; i < N; ++i) {
    const auto row = [&](const E4m3Rows& rows) { return lab.values<uint8_t>(rows.q.slice(0, i, i + 1)); };
    differ += row(grad_over) != row(grad) || row(y_over) != row(y);
  }
  CHECK(differ == 0);
}

}  // namespace

TEST_CASE("fp8: activations that are cast in parts have the bytes of each row alone", "[fp8]") {
  check_parts<float>(Device::cpu(), 520);
}

TEST_CASE("fp8: activations that are cast in parts have the bytes of each row alone on the GPU", "[fp8][gpu]") {
  if (!require_gpu()) return;
  check_parts<bf16>(Device::cuda(), 1040);
}
