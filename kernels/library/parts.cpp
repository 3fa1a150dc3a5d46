// NSA part by part: compress, select, attend, combine, and each one's backward; the check of documents.
#include <algorithm>
#include <array>

#include "kernels/library/branch.h"
#include "kernels/library/outputs.h"
#include "kernels/nsa/compress.h"
#include "kernels/nsa/gate.h"
#include "kernels/nsa/gate_factors.h"

namespace triad::library {

namespace {

// Checks the tensors for compression or its backward: rows [B,T,H,D], and blocks [B,Tc,H,D] in that dtype or or_dtype.
void expect_blocks(const Call& call, const char* rows_name, const ConstTensor& rows, const char* blocks_name,
                   const ConstTensor& blocks, DType or_dtype) {
  call.expect_element(rows_name, rows);
  const int64_t Tc = compressed_length(rows.size(1), call.options.l, call.options.d);
  call.expect(blocks_name, blocks, {rows.size(0), Tc, rows.size(2), rows.size(3)}, rows.dtype, or_dtype);
}

// ---- combine ----

// The branches' outputs o and the gates, both as the ops take them.
struct Gated {
  std::array<ConstTensor, 3> o;
  ConstTensor factors;  // absent: 1/3 each
  Shape planes;         // the shape [3,B,T,H] in which the ops take the gates
};

Gated read_gated(const Call& call, const ConstTensor& like, const triad_nsa_tensor* o, const triad_nsa_tensor* gate) {
  need(o, "o");
  call.expect_element("out", like);
  Gated g;
  for (int i = 0; i < 3; ++i) {
    const std::string name = "o[" + std::to_string(i) + "]";
    g.o[i] = call.tensor(name, o[i], 4);
    call.expect(name, g.o[i], like.shape(), like.dtype);
  }
  const int64_t B = like.size(0), T = like.size(1), Hq = like.size(2);
  int64_t H = 1;
  if (present(gate)) {
    g.factors = call.tensor("gate", gate, 4, Call::Strides::any);
    H = g.factors.size(2);
    if (H < 1 || Hq % H != 0)
      reject(TRIAD_NSA_ERROR_ARGUMENT, "gate is {}: its third axis has to divide the {} query heads", g.factors.str(),
             Hq);
    call.expect("gate", g.factors, {B, T, H, 3}, like.dtype, acc_dtype(like.dtype));
  }
  g.planes = {3, B, T, H};
  return g;
}

void combine(Call& call, const triad_nsa_tensor* o, const triad_nsa_tensor* gate, const triad_nsa_tensor* out_from) {
  const Tensor out = call.tensor("out", out_from, 4, Call::Strides::heads, true);
  const Gated g = read_gated(call, out, o, gate);
  if (out.numel() == 0) return;
  Scratch::Scope scope(call.ctx.scratch);
  const Tensor gates = scope.alloc(acc_dtype(out.dtype), g.planes);
  nsa_gate_factors_forward(call.ctx, gates, g.factors);
  nsa_combine_forward(call.ctx, out, g.o, gates);
}

void combine_backward(Call& call, const triad_nsa_tensor* dout_from, const triad_nsa_tensor* o,
                      const triad_nsa_tensor* gate, const triad_nsa_tensor* d_o, const triad_nsa_tensor* dgate_from) {
  const Tensor dout = call.tensor("dout", dout_from, 4);
  const Gated g = read_gated(call, dout, o, gate);
  const DType acc = acc_dtype(dout.dtype);
  std::array<Tensor, 3> to;
  for (int i = 0; i < 3 && d_o != nullptr; ++i) {
    const std::string name = "d_o[" + std::to_string(i) + "]";
    if (d_o[i].rank == 0) continue;
    to[i] = call.tensor(name, d_o[i], 4, Call::Strides::heads, true);
    call.expect(name, to[i], dout.shape(), dout.dtype);
  }
  Tensor dfactors;
  if (present(dgate_from)) {
    if (g.factors.empty()) reject(TRIAD_NSA_ERROR_ARGUMENT, "dgate is given, and gate is NULL");
    dfactors = call.tensor("dgate", dgate_from, 4, Call::Strides::any, true);
    call.expect("dgate", dfactors, g.factors.shape(), dout.dtype, acc);
  }
  if (dout.numel() == 0) return;
  Context& ctx = call.ctx;
  Scratch::Scope scope(ctx.scratch);
  const Tensor gates = scope.alloc(acc, g.planes);
  nsa_gate_factors_forward(ctx, gates, g.factors);
  nsa_gate_dout(ctx, to, {}, dout, gates);
  if (dfactors.empty()) return;
  const Tensor dgates = scope.alloc(acc, g.planes);
  const Tensor delta = scope.alloc(acc, {3, dout.size(0), dout.size(1), dout.size(2)});
  nsa_combine_backward(ctx, dgates, delta, dout, g.o, gates);
  nsa_gate_factors_backward(ctx, dfactors, dgates);
}

}  // namespace

}  // namespace triad::library

using namespace triad;
using namespace triad::library;

extern "C" {

triad_nsa_status triad_nsa_check_documents(triad_nsa_context* context, void* stream, int64_t B, int64_t T,
                                           const triad_nsa_documents* d) {
  return guarded([&] {
    need(context, "context");
    if (d == nullptr || d->count == 0) return;
    if (B < 1 || T < 1 || d->count < 0)
      reject(TRIAD_NSA_ERROR_ARGUMENT, "{} documents in {} rows of {} tokens", d->count, B, T);
    host_bounds(*context, stream, B, T, *d);
  });
}

triad_nsa_status triad_nsa_compress(triad_nsa_context* context, void* stream, const triad_nsa_options* options_from,
                                    const triad_nsa_documents* documents, const triad_nsa_tensor* x_from,
                                    const triad_nsa_tensor* y_from, void* workspace, size_t* workspace_bytes) {
  return guarded([&] {
    need(context, "context");
    const Options options = read_options(options_from);
    const Key key = Key("compress").add(*options_from).add(documents).add(x_from).add(y_from);
    run(context, stream, options, key, workspace, workspace_bytes, [&](Call& call) {
      const Tensor x = call.tensor("x", x_from, 4), y = call.tensor("y", y_from, 4, Call::Strides::heads, true);
      expect_blocks(call, "x", x, "y", y, x.dtype);
      if (y.numel() == 0) return;
      Scratch::Scope scope(call.ctx.scratch);
      nsa_compress_linear_forward(call.ctx, y, x, {}, {call.options, Phi::avg},
                                  call.documents(documents, x.size(0), x.size(1), scope));
    });
  });
}

triad_nsa_status triad_nsa_compress_backward(triad_nsa_context* context, void* stream,
                                             const triad_nsa_options* options_from,
                                             const triad_nsa_documents* documents, const triad_nsa_tensor* dy_from,
                                             const triad_nsa_tensor* dx_from, void* workspace,
                                             size_t* workspace_bytes) {
  return guarded([&] {
    need(context, "context");
    const Options options = read_options(options_from);
    const Key key = Key("compress_backward").add(*options_from).add(documents).add(dy_from).add(dx_from);
    run(context, stream, options, key, workspace, workspace_bytes, [&](Call& call) {
      const Tensor dx = call.tensor("dx", dx_from, 4, Call::Strides::heads, true);
      const Tensor dy = call.tensor("dy", dy_from, 4);
      const DType acc = acc_dtype(dx.dtype);
      expect_blocks(call, "dx", dx, "dy", dy, acc);
      if (dx.numel() == 0) return;
      Scratch::Scope scope(call.ctx.scratch);
      Tensor dy_acc = dy;
      if (dy.dtype != acc) {
        dy_acc = scope.alloc(acc, dy.shape());
        if (dy.numel() > 0) scale(call.ctx, dy_acc, dy, 1);
      }
      // Averages have no weights, so x is read for its shape only.
      nsa_compress_linear_backward(call.ctx, dx, {}, dy_acc, dx, {}, {call.options, Phi::avg},
                                   call.documents(documents, dx.size(0), dx.size(1), scope));
    });
  });
}

triad_nsa_status triad_nsa_select(triad_nsa_context* context, void* stream, const triad_nsa_options* options_from,
                                  const triad_nsa_documents* documents, const triad_nsa_tensor* q_from,
                                  const triad_nsa_tensor* k_from, const triad_nsa_tensor* lse_from,
                                  const triad_nsa_tensor* index_from, void* workspace, size_t* workspace_bytes) {
  return guarded([&] {
    need(context, "context");
    const Options options = read_options(options_from);
    const Key key =
        Key("select").add(*options_from).add(documents).add(q_from).add(k_from).add(lse_from).add(index_from);
    run(context, stream, options, key, workspace, workspace_bytes, [&](Call& call) {
      const Tensor q = call.tensor("q", q_from, 4), k_cmp = call.tensor("k_cmp", k_from, 4);
      const Tensor lse = call.tensor("lse_cmp", lse_from, 3, Call::Strides::contiguous);
      const Tensor index = call.tensor("block_index", index_from, 4, Call::Strides::contiguous, true);
      call.expect_element("q", q);
      const int64_t B = q.size(0), T = q.size(1), Hq = q.size(2), Hkv = k_cmp.size(2);
      expect_groups("k_cmp", Hq, Hkv);
      const int64_t Tc = compressed_length(T, call.options.l, call.options.d);
      call.expect("k_cmp", k_cmp, {B, Tc, Hkv, q.size(3)}, q.dtype);
      call.expect("lse_cmp", lse, {B, T, Hq}, acc_dtype(q.dtype));
      call.expect("block_index", index, {B, T, Hkv, call.options.n_sel}, DType::i32);
      if (index.numel() == 0) return;
      Scratch::Scope scope(call.ctx.scratch);
      const ConstTensor q_scaled = scaled(call, q, scope);
      nsa_select(call.ctx, index, q_scaled, k_cmp, lse, call.options, call.documents(documents, B, T, scope));
    });
  });
}

triad_nsa_status triad_nsa_attend(triad_nsa_context* context, void* stream, const triad_nsa_options* options_from,
                                  const triad_nsa_documents* documents, int branch, const triad_nsa_tensor* q,
                                  const triad_nsa_tensor* k, const triad_nsa_tensor* v,
                                  const triad_nsa_tensor* block_index, const triad_nsa_tensor* o,
                                  const triad_nsa_tensor* lse, void* workspace, size_t* workspace_bytes) {
  return guarded([&] {
    need(context, "context");
    const Options options = read_options(options_from);
    Key key("attend");
    key.add(*options_from).add(documents).add(branch).add(q).add(k).add(v).add(block_index).add(o).add(lse);
    run(context, stream, options, key, workspace, workspace_bytes,
        [&](Call& call) { attend(call, documents, read_branch(call, branch, q, k, v, block_index), o, lse); });
  });
}

triad_nsa_status triad_nsa_attend_backward(triad_nsa_context* context, void* stream,
                                           const triad_nsa_options* options_from, const triad_nsa_documents* documents,
                                           int branch, const triad_nsa_tensor* q, const triad_nsa_tensor* k,
                                           const triad_nsa_tensor* v, const triad_nsa_tensor* block_index,
                                           const triad_nsa_tensor* o, const triad_nsa_tensor* lse,
                                           const triad_nsa_tensor* d_o, const triad_nsa_tensor* dq,
                                           const triad_nsa_tensor* dk, const triad_nsa_tensor* dv, void* workspace,
                                           size_t* workspace_bytes) {
  return guarded([&] {
    need(context, "context");
    const Options options = read_options(options_from);
    Key key("attend_backward");
    key.add(*options_from).add(documents).add(branch).add(q).add(k).add(v).add(block_index).add(o).add(lse);
    key.add(d_o).add(dq).add(dk).add(dv);
    run(context, stream, options, key, workspace, workspace_bytes, [&](Call& call) {
      attend_backward(call, documents, read_branch(call, branch, q, k, v, block_index), {o, lse, d_o, dq, dk, dv});
    });
  });
}

triad_nsa_status triad_nsa_combine(triad_nsa_context* context, void* stream, const triad_nsa_options* options_from,
                                   const triad_nsa_tensor o[3], const triad_nsa_tensor* gate,
                                   const triad_nsa_tensor* out, void* workspace, size_t* workspace_bytes) {
  return guarded([&] {
    need(context, "context");
    need(o, "o");
    const Options options = read_options(options_from);
    Key key("combine");
    key.add(*options_from).add(o[0]).add(o[1]).add(o[2]).add(gate).add(out);
    run(context, stream, options, key, workspace, workspace_bytes, [&](Call& call) { combine(call, o, gate, out); });
  });
}

triad_nsa_status triad_nsa_combine_backward(triad_nsa_context* context, void* stream,
                                            const triad_nsa_options* options_from, const triad_nsa_tensor* dout,
                                            const triad_nsa_tensor o[3], const triad_nsa_tensor* gate,
                                            const triad_nsa_tensor d_o[3], const triad_nsa_tensor* dgate,
                                            void* workspace, size_t* workspace_bytes) {
  return guarded([&] {
    need(context, "context");
    need(o, "o");
    const Options options = read_options(options_from);
    Key key("combine_backward");
    key.add(*options_from).add(dout).add(o[0]).add(o[1]).add(o[2]).add(gate).add(dgate);
    for (int i = 0; i < 3; ++i) key.add(d_o == nullptr ? nullptr : &d_o[i]);
    run(context, stream, options, key, workspace, workspace_bytes,
        [&](Call& call) { combine_backward(call, dout, o, gate, d_o, dgate); });
  });
}

}  // extern "C"
