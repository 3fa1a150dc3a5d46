// The loss of a taught index by itself: checks, and the student's lse before loss and gradients.
#include "kernels/nsa/index_loss.h"

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/nsa/route.h"

namespace triad {

void nsa_index_loss(Context& ctx, IndexBackward index, const AttendIn& in, ConstTensor lse, ConstTensor block_index,
                    int64_t l_sel) {
  const OpScope op_scope(ctx, "nsa_index_loss");
  const char* const op = "nsa_index_loss";
  TRIAD_CHECK(in.q.rank == 4 && in.k.rank == 4, "{}: q {} and k {} need four axes", op, in.q.str(), in.k.str());
  const int64_t B = in.q.size(0), T = in.q.size(1), Hkv = in.k.size(2);
  const DType acc = acc_dtype(in.q.dtype);
  check_tensor("nsa_index_loss: lse", lse, {B, T, in.q.size(2)}, acc);
  Scratch::Scope scope(ctx.scratch);
  const Tensor student = scope.alloc(acc, {B, T, Hkv}, "student's lse");
  const IndexForward forward{index.in, student};
  index.lse = student;
  check_index(op, forward, in);
  check_index(op, index, in);
  if (ctx.device.is_cuda()) {
    check_keys_held(op, in, 0);
    if (!block_index.empty()) check_tensor("block_index", block_index, {B, T, Hkv, block_index.size(3)}, DType::i32);
    index_forward_routed(ctx, forward, in, block_index, l_sel);
    index_backward_routed(ctx, index, in, lse, block_index, l_sel);
    return;
  }
  record_cpu(ctx, op, in.q, in.k);
  if (block_index.empty())
    index_cpu::dense_loss(ctx, forward, index, in, lse);
  else
    index_cpu::selected_loss(ctx, forward, index, in, lse, block_index, l_sel);
}

}  // namespace triad
