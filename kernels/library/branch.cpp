// Attention over the keys of one branch, forward and backward.
#include "kernels/library/branch.h"

#include <algorithm>

#include "kernels/library/outputs.h"
#include "kernels/nsa/attend_compressed.h"
#include "kernels/nsa/attend_selected.h"
#include "kernels/nsa/attend_window.h"
#include "kernels/nsa/gate.h"

namespace triad::library {

void expect_groups(const char* k_name, int64_t Hq, int64_t Hkv) {
  if (Hkv < 1 || Hq < 1 || Hq % Hkv != 0)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "q has {} heads, no multiple of the {} groups of {}", Hq, Hkv, k_name);
}

Branch read_branch(const Call& call, int branch, const triad_nsa_tensor* q, const triad_nsa_tensor* k,
                   const triad_nsa_tensor* v, const triad_nsa_tensor* block_index) {
  if (branch < TRIAD_NSA_CMP || branch > TRIAD_NSA_WIN)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "branch is {}: 0 (cmp), 1 (sel) or 2 (win) is allowed", branch);
  Branch b{};
  b.branch = branch;
  b.q = call.tensor("q", q, 4), b.k = call.tensor("k", k, 4), b.v = call.tensor("v", v, 4);
  call.expect_element("q", b.q);
  b.type = b.q.dtype, b.acc = acc_dtype(b.type);
  const int64_t B = b.q.size(0), T = b.q.size(1), Hq = b.q.size(2), Hkv = b.k.size(2), dk = b.q.size(3),
                dv = b.v.size(3);
  expect_groups("k", Hq, Hkv);
  if (dk < 1 || dv < 1) reject(TRIAD_NSA_ERROR_ARGUMENT, "q is {} and v {}: heads need a width", b.q.str(), b.v.str());
  call.expect_count(B, T, Hq, std::max(dk, dv));
  const int64_t S = branch == TRIAD_NSA_CMP ? compressed_length(T, call.options.l, call.options.d) : T;
  call.expect("k", b.k, {B, S, Hkv, dk}, b.type);
  call.expect("v", b.v, {B, S, Hkv, dv}, b.type);
  if (branch == TRIAD_NSA_SEL) {
    b.block_index = call.tensor("block_index", block_index, 4, Call::Strides::contiguous);
    call.expect("block_index", b.block_index, {B, T, Hkv, call.options.n_sel}, DType::i32);
  } else if (present(block_index)) {
    reject(TRIAD_NSA_ERROR_ARGUMENT, "block_index is given, and branch is {}", branch);
  }
  b.o_shape = {B, T, Hq, dv}, b.lse_shape = {B, T, Hq};
  return b;
}

void attend(Call& call, const triad_nsa_documents* documents, const Branch& b, const triad_nsa_tensor* o_from,
            const triad_nsa_tensor* lse_from) {
  const Tensor o = call.tensor("o", o_from, 4, Call::Strides::heads, true);
  const Tensor lse = call.tensor("lse", lse_from, 3, Call::Strides::contiguous, true);
  call.expect("o", o, b.o_shape, b.type);
  call.expect("lse", lse, b.lse_shape, b.acc);
  if (o.numel() == 0) return;
  Scratch::Scope scope(call.ctx.scratch);
  Outputs to(call, scope);
  const AttendOut out{to.target(o, b.type, b.o_shape), lse};
  const AttendIn in{scaled(call, b.q, scope), b.k, b.v, call.documents(documents, b.q.size(0), b.q.size(1), scope)};
  if (b.branch == TRIAD_NSA_CMP) nsa_attend_compressed_forward(call.ctx, out, in, call.options);
  if (b.branch == TRIAD_NSA_SEL) nsa_attend_selected_forward(call.ctx, out, in, b.block_index, call.options.l_sel);
  if (b.branch == TRIAD_NSA_WIN) nsa_attend_window_forward(call.ctx, out, in, call.options.w);
  to.finish();
}

void attend_backward(Call& call, const triad_nsa_documents* documents, const Branch& b,
                     const AttendBackwardArguments& from) {
  Context& ctx = call.ctx;
  const Tensor o = call.tensor("o", from.o, 4), dout = call.tensor("d_o", from.d_o, 4);
  const Tensor lse = call.tensor("lse", from.lse, 3, Call::Strides::contiguous);
  call.expect("o", o, b.o_shape, b.type);
  call.expect("d_o", dout, b.o_shape, b.type);
  call.expect("lse", lse, b.lse_shape, b.acc);
  const auto wanted = [&](const char* name, const triad_nsa_tensor* t, const Shape& shape) {
    if (!present(t)) return Tensor{};
    const Tensor to = call.tensor(name, t, 4, Call::Strides::heads, true);
    call.expect(name, to, shape, b.type, b.acc);
    return to;
  };
  Tensor dlse;
  if (present(from.dlse)) {
    dlse = call.tensor("dlse", from.dlse, 3, Call::Strides::contiguous);
    call.expect("dlse", dlse, b.lse_shape, b.acc);
  }
  const Tensor dq = wanted("dq", from.dq, b.q.shape());
  const Tensor dk = wanted("dk", from.dk, b.k.shape()), dv = wanted("dv", from.dv, b.v.shape());
  if (b.q.numel() == 0) return;
  Scratch::Scope scope(ctx.scratch);
  Outputs to(call, scope);
  const double factor = call.options.factor(b.q.size(3));
  const bool in_acc = (!dk.empty() && dk.dtype == b.acc) || (!dv.empty() && dv.dtype == b.acc);
  const DType key_type = in_acc ? b.acc : b.type;
  const AttendGradOut out{to.target_dq(dq, b.acc, b.q.shape(), factor), to.target(dk, key_type, b.k.shape()),
                          to.target(dv, key_type, b.v.shape())};
  const AttendIn in{scaled(call, b.q, scope), b.k, b.v, call.documents(documents, b.q.size(0), b.q.size(1), scope)};
  const Tensor delta = scope.alloc(b.acc, b.lse_shape), norm = scope.alloc(b.acc, b.lse_shape);
  attention_delta(ctx, delta, dout, o, norm);
  // lse's gradient is the scores' probabilities times dlse: ds = p * (dout.v - delta + dlse).
  if (!dlse.empty()) {
    const Shape one_row{1, b.lse_shape[0], b.lse_shape[1], b.lse_shape[2]};
    scale(ctx, delta.view(one_row), dlse.view(one_row), -1, /*add=*/true);
  }
  zero(ctx, out.dq);
  const int64_t stride = b.branch == TRIAD_NSA_CMP ? call.options.d : 1;
  const Tensor unit =
      attend_rounding_unit(ctx, scope, out.dq, dout, in.q, {{in.k, in.v, {}, delta, stride}}, norm, {}, in.documents);
  const AttendGradIn upstream{dout, {}, delta, lse, unit, !dlse.empty()};
  if (b.branch == TRIAD_NSA_CMP) nsa_attend_compressed_backward(ctx, out, upstream, in, call.options);
  if (b.branch == TRIAD_NSA_SEL)
    nsa_attend_selected_backward(ctx, out, upstream, in, b.block_index, call.options.l_sel);
  if (b.branch == TRIAD_NSA_WIN) nsa_attend_window_backward(ctx, out, upstream, in, call.options.w);
  to.finish();
}

}  // namespace triad::library
