// Shape and dtype checks shared by all attention ops, on the CPU and the GPU; rounding unit dispatch.
#include "kernels/nsa/attend.h"

#include <algorithm>

#include "engine/backend.h"
#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/integer.h"

namespace triad {

namespace {

void check_argument(const char* op, const char* name, const ConstTensor& t, const Shape& shape, DType dtype) {
  TRIAD_CHECK(t.shape() == shape && t.dtype == dtype, "{}: {} is {}, not {}{}", op, name, t.str(), name_of(dtype),
              shape.str());
}

// The tables of a part of a row cover its keys up to the last query.
void check_tables(const char* op, const AttendIn& in) {
  const Documents& d = in.documents;
  if (d.empty() || d.part.whole()) return;
  const int64_t tokens = d.part.first_query - d.part.first_key + in.q.size(1);
  TRIAD_CHECK(d.begin.size(1) == tokens, "{}: tables {} of documents for the tokens {} to {}", op, d.begin.str(),
              d.part.first_key, d.part.first_key + tokens);
}

}  // namespace

void check_keys_held(const char* op, const AttendIn& in, int64_t first) {
  const RowPart& part = in.documents.part;
  const int64_t T = in.q.size(1), S = in.k.size(1);
  if (part.whole()) {
    TRIAD_CHECK(S == T, "{}: {} keys for {} tokens", op, S, T);
    return;
  }
  TRIAD_CHECK(part.split == 0 && part.first_key >= 0 && part.first_key <= std::max(first, int64_t{0}) &&
                  part.first_key + S >= part.first_query + T && part.first_key + S <= part.tokens,
              "{}: the keys are tokens {} to {} of {}, the queries {} to {} see them from {} on", op, part.first_key,
              part.first_key + S, part.tokens, part.first_query, part.first_query + T, first);
}

void check_attend(const char* op, const AttendIn& in, const AttendOut& out) {
  TRIAD_CHECK(in.q.rank == 4 && in.k.rank == 4 && in.v.rank == 4, "{}: q {}, k {} and v {} need four axes", op,
              in.q.str(), in.k.str(), in.v.str());
  const int64_t B = in.q.size(0), T = in.q.size(1), Hq = in.q.size(2), dk = in.q.size(3);
  const int64_t S = in.k.size(1), Hkv = in.k.size(2), dv = in.v.size(3);
  TRIAD_CHECK(is_float(in.q.dtype), "{}: q is {}, not floats", op, in.q.str());
  TRIAD_CHECK(Hkv > 0 && Hq % Hkv == 0, "{}: {} query heads are not a multiple of {} groups", op, Hq, Hkv);
  TRIAD_CHECK(dk > 0 && dv > 0, "{}: heads of width {} and {}", op, dk, dv);
  check_argument(op, "k", in.k, {B, S, Hkv, dk}, in.q.dtype);
  check_argument(op, "v", in.v, {B, S, Hkv, dv}, in.q.dtype);
  check_tables(op, in);
  check_argument(op, "o", out.o, {B, T, Hq, dv}, in.q.dtype);
  check_argument(op, "lse", out.lse, {B, T, Hq}, acc_dtype(in.q.dtype));
}

void check_attend_grad(const char* op, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in) {
  TRIAD_CHECK(in.q.rank == 4 && in.k.rank == 4 && in.v.rank == 4, "{}: q {}, k {} and v {} need four axes", op,
              in.q.str(), in.k.str(), in.v.str());
  const int64_t B = in.q.size(0), T = in.q.size(1), Hq = in.q.size(2), dv = in.v.size(3), Hkv = in.k.size(2);
  const DType dtype = in.q.dtype, acc = acc_dtype(dtype);
  TRIAD_CHECK(is_float(dtype), "{}: q is {}, not floats", op, in.q.str());
  TRIAD_CHECK(Hkv > 0 && Hq % Hkv == 0, "{}: {} query heads are not a multiple of {} groups", op, Hq, Hkv);
  check_argument(op, "k", in.k, {B, in.k.size(1), Hkv, in.q.size(3)}, dtype);
  check_argument(op, "v", in.v, {B, in.k.size(1), Hkv, dv}, dtype);
  check_tables(op, in);
  check_argument(op, "dout", grad.dout, {B, T, Hq, dv}, dtype);
  if (!grad.gate.empty()) check_argument(op, "gate", grad.gate, {B, T, Hkv}, acc);
  check_argument(op, "delta", grad.delta, {B, T, Hq}, acc);
  check_argument(op, "lse", grad.lse, {B, T, Hq}, acc);
  if (!grad.rounding_unit.empty()) check_argument(op, "rounding_unit", grad.rounding_unit, {B, T, Hq}, acc);
  check_argument(op, "dq", out.dq, in.q.shape(), acc);
  TRIAD_CHECK(out.dk.dtype == dtype || out.dk.dtype == acc, "{}: dk is {}, not {} or {}", op, out.dk.str(),
              name_of(dtype), name_of(acc));
  check_argument(op, "dk", out.dk, in.k.shape(), out.dk.dtype);
  check_argument(op, "dv", out.dv, in.v.shape(), out.dk.dtype);
}

Tensor attend_rounding_unit(Context& ctx, Scratch::Scope& scope, const Tensor& dq, ConstTensor dout, ConstTensor q,
                            const std::vector<RoundingUnitBranch>& branches, ConstTensor dout_norm,
                            ConstTensor key_norms, const Documents& documents) {
  const OpScope op_scope(ctx, "attend_rounding_unit");
  if (!dout_norm.empty())
    check_argument("attend_rounding_unit", "dout_norm", dout_norm, {q.size(0), q.size(1), q.size(2)},
                   acc_dtype(q.dtype));
  if (ctx.device.is_cuda()) {
    // The kernels of the reference route do not round, and all branches have a unit, or none.
    if constexpr (kBuiltWithCuda)
      if (!ctx.routes.wanted().any_branch_is_reference())
        return cuda::attend_rounding_unit(ctx, scope, dq, dout, q, branches, dout_norm, key_norms, documents);
  }
  return {};
}

Shape key_norms_shape(const std::vector<RoundingUnitBranch>& branches, const Documents& documents) {
  int64_t keys = 0;
  for (const RoundingUnitBranch& branch : branches) keys = std::max(keys, branch.k.size(1));
  const ConstTensor& k = branches.at(0).k;
  return {k.size(0) * k.size(2), 3, documents.empty() ? ceil_div(keys, kKeyNormsChunk) : documents.ids(), 2};
}

void attend_key_norms(Context& ctx, Tensor norms, const Tensor& dq, ConstTensor dout, ConstTensor q,
                      const std::vector<RoundingUnitBranch>& branches, const Documents& documents) {
  const OpScope op_scope(ctx, "attend_rounding_unit");
  check_argument("attend_key_norms", "norms", norms, key_norms_shape(branches, documents), acc_dtype(q.dtype));
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda)
      if (!ctx.routes.wanted().any_branch_is_reference())
        return cuda::attend_key_norms(ctx, norms, dq, dout, q, branches, documents);
  }
}

}  // namespace triad
