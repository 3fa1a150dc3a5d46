// The index of a taught selection: checks, and dispatch to the GPU. The CPU reference is in cpu/index.h.
#include "kernels/nsa/index.h"

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/route.h"
#include "kernels/ops/cast.h"

namespace triad {

namespace {

void check_in(const char* op, const IndexIn& index, const ConstTensor& lse, const AttendIn& in) {
  TRIAD_CHECK(index.q.rank == 4 && index.k.rank == 4, "{}: the index's q {} and k {} need four axes", op, index.q.str(),
              index.k.str());
  const int64_t B = in.q.size(0), T = in.q.size(1), Hkv = in.k.size(2), di = index.q.size(3);
  TRIAD_CHECK(di > 0 && di % 2 == 0, "{}: an index of width {}", op, di);
  check_tensor("the index's q", index.q, {B, T, Hkv, di}, in.q.dtype);
  check_tensor("the index's k", index.k, {B, in.k.size(1), 1, di}, in.q.dtype);
  check_tensor("the index's lse", lse, {B, T, Hkv}, acc_dtype(in.q.dtype));
}

// Calls run(q, k): on the reference route with copies in f32.
template <class Run>
void run_routed(Context& ctx, const char* op, const IndexIn& index, const AttendIn& in, const Run& run) {
  ctx.routes.set_call(index.q, index.k);
  dispatch_route(
      ctx, op, index.q.dtype, [&](Context& on) { run(on, index, in); },
      [&](Context& on) {
        Scratch::Scope scope(on.scratch);
        run(on, IndexIn{upcasted(on, scope, index.q), upcasted(on, scope, index.k)},
            AttendIn{upcasted(on, scope, in.q), upcasted(on, scope, in.k), in.v, in.documents});
      });
}

}  // namespace

void check_index(const char* op, const IndexForward& index, const AttendIn& in) {
  check_in(op, index.in, index.lse, in);
}

void check_index(const char* op, const IndexBackward& index, const AttendIn& in) {
  check_in(op, index.in, index.lse, in);
  const DType acc = acc_dtype(in.q.dtype);
  check_tensor("the index's dq", index.dq, index.in.q.shape(), acc);
  TRIAD_CHECK(index.dk.dtype == in.q.dtype || index.dk.dtype == acc, "{}: the index's dk is {}, not {} or {}", op,
              index.dk.str(), name_of(in.q.dtype), name_of(acc));
  check_tensor("the index's dk", index.dk, index.in.k.shape(), index.dk.dtype);
  check_tensor("the index's loss", index.loss, {1}, DType::f64);
  if (!index.padding_begin.empty())
    check_tensor("the rows' first padded tokens", index.padding_begin, {in.q.size(0)}, DType::i32);
}

void index_forward_routed(Context& ctx, const IndexForward& index, const AttendIn& in, ConstTensor block_index,
                          int64_t l_sel) {
  const OpScope op_scope(ctx, "nsa_index_forward");
  if constexpr (kBuiltWithCuda)
    run_routed(ctx, "nsa_index_forward", index.in, in, [&](Context& on, const IndexIn& from, const AttendIn& branch) {
      cuda::nsa_index_forward(on, {from, index.lse}, branch, block_index, l_sel);
    });
}

void index_backward_routed(Context& ctx, const IndexBackward& index, const AttendIn& in, ConstTensor lse,
                           ConstTensor block_index, int64_t l_sel) {
  const OpScope op_scope(ctx, "nsa_index_backward");
  if constexpr (kBuiltWithCuda)
    run_routed(ctx, "nsa_index_backward", index.in, in, [&](Context& on, const IndexIn& from, const AttendIn& branch) {
      IndexBackward call = index;
      call.in = from;
      if (from.k.dtype == index.in.k.dtype || index.dk.dtype == from.k.dtype)
        return cuda::nsa_index_backward(on, call, branch, lse, block_index, l_sel);
      Scratch::Scope scope(on.scratch);
      call.dk = scope.alloc(from.k.dtype, index.dk.shape());
      cuda::nsa_index_backward(on, call, branch, lse, block_index, l_sel);
      downcast(on, index.dk, call.dk);
    });
}

}  // namespace triad
