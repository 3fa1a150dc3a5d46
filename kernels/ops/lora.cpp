// The low-rank products of LoRA. The scale is the factor of products with few columns, so no weight is scaled.
#include "kernels/ops/lora.h"

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/ops/matmul.h"

namespace triad {

namespace {

// Returns the rank.
int64_t check_lora(const ConstTensor& y, const ConstTensor& x, const ConstTensor& a, const ConstTensor& b,
                   std::span<const LoraPiece> pieces) {
  TRIAD_CHECK(b.rank == 2 && !pieces.empty(), "lora: B is {}, of {} pieces", b.str(), pieces.size());
  const int64_t m = static_cast<int64_t>(pieces.size()), r = b.size(1);
  check_tensor("lora's A", a, {m * r, x.size(1)}, x.dtype);
  int64_t rows = 0;
  for (const LoraPiece& piece : pieces) {
    TRIAD_CHECK(0 <= piece.begin && piece.begin < piece.end && piece.end <= y.size(1),
                "lora: the columns {} to {} of {}", piece.begin, piece.end, y.str());
    rows += piece.size();
  }
  check_tensor("lora's B", b, {rows, r}, b.dtype);
  TRIAD_CHECK(x.size(0) == y.size(0), "lora: x is {} and y {}", x.str(), y.str());
  return r;
}

// Calls f(i, piece, rows of B) for each piece i.
template <class F>
void for_each_piece(std::span<const LoraPiece> pieces, F&& f) {
  int64_t row = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    f(static_cast<int64_t>(i), pieces[i], LoraPiece{row, row + pieces[i].size()});
    row += pieces[i].size();
  }
}

template <class T>
T columns(const T& t, int64_t begin, int64_t end) {
  return t.slice(1, begin, end);
}

Tensor project(Context& ctx, Scratch::Scope& scope, ConstTensor x, ConstTensor a, double scale) {
  const Tensor u = scope.alloc(x.dtype, {x.size(0), a.size(0)}, "lora");
  matmul(ctx, u, x, a, {.trans_b = true, .alpha = scale});
  return u;
}

}  // namespace

void lora_forward(Context& ctx, Tensor y, ConstTensor x, ConstTensor a, ConstTensor b,
                  std::span<const LoraPiece> pieces, double scale) {
  const OpScope op_scope(ctx, "lora_forward");
  const int64_t r = check_lora(y, x, a, b, pieces);
  Scratch::Scope scope(ctx.scratch);
  const Tensor u = project(ctx, scope, x, a, scale);
  for_each_piece(pieces, [&](int64_t i, const LoraPiece& piece, const LoraPiece& rows) {
    matmul(ctx, columns(y, piece.begin, piece.end), columns(u, i * r, (i + 1) * r), b.slice(0, rows.begin, rows.end),
           {.trans_b = true, .accumulate = true});
  });
}

void lora_backward_input(Context& ctx, Tensor dx, Tensor du, ConstTensor dy, ConstTensor a, ConstTensor b,
                         std::span<const LoraPiece> pieces, double scale) {
  const OpScope op_scope(ctx, "lora_backward_input");
  const int64_t r = check_lora(dy, dx, a, b, pieces);
  check_tensor("lora's du", du, {dx.size(0), a.size(0)}, dx.dtype);
  for_each_piece(pieces, [&](int64_t i, const LoraPiece& piece, const LoraPiece& rows) {
    matmul(ctx, columns(du, i * r, (i + 1) * r), columns(dy, piece.begin, piece.end), b.slice(0, rows.begin, rows.end),
           {.alpha = scale});
  });
  matmul(ctx, dx, du, a, {.accumulate = true});
}

void lora_backward_weight(Context& ctx, Tensor da, Tensor db, ConstTensor du, ConstTensor dy, ConstTensor x,
                          ConstTensor a, std::span<const LoraPiece> pieces, double scale) {
  const OpScope op_scope(ctx, "lora_backward_weight");
  const int64_t r = check_lora(dy, x, a, db, pieces);
  check_tensor("lora's dA", da, a.shape(), acc_dtype(x.dtype));
  linear_backward_weight(ctx, da, du, x, /*add=*/true);
  Scratch::Scope scope(ctx.scratch);
  const Tensor u = project(ctx, scope, x, a, scale);
  for_each_piece(pieces, [&](int64_t i, const LoraPiece& piece, const LoraPiece& rows) {
    linear_backward_weight(ctx, db.slice(0, rows.begin, rows.end), columns(dy, piece.begin, piece.end),
                           columns(u, i * r, (i + 1) * r), /*add=*/true);
  });
}

}  // namespace triad
