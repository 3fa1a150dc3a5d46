// NSA part by part: compress, select, attend, combine, and each one's backward; the check of documents.
#include <algorithm>
#include <array>

#include "kernels/library/library.h"
#include "kernels/library/outputs.h"
#include "kernels/nsa/attend_compressed.h"
#include "kernels/nsa/attend_selected.h"
#include "kernels/nsa/attend_window.h"
#include "kernels/nsa/compress.h"
#include "kernels/nsa/gate.h"
#include "kernels/nsa/gate_factors.h"

namespace triad::library {

namespace {

void need(const void* pointer, const char* name) {
  if (pointer == nullptr) reject(TRIAD_NSA_ERROR_ARGUMENT, "{} is NULL", name);
}

bool present(const triad_nsa_tensor* t) { return t != nullptr && t->rank != 0; }

// Checks the tensors for compression or its backward: rows [B,T,H,D], and blocks [B,Tc,H,D] in that dtype or or_dtype.
void expect_blocks(const Call& call, const char* rows_name, const ConstTensor& rows, const char* blocks_name,
                   const ConstTensor& blocks, DType or_dtype) {
  call.expect_element(rows_name, rows);
  const int64_t Tc = compressed_length(rows.size(1), call.options.l, call.options.d);
  call.expect(blocks_name, blocks, {rows.size(0), Tc, rows.size(2), rows.size(3)}, rows.dtype, or_dtype);
}

// ---- attend ----

// A branch's inputs, checked.
struct Branch {
  int branch;
  ConstTensor q, k, v, block_index;
  DType type, acc;
  Shape o_shape, lse_shape;
};

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
  if (Hkv < 1 || Hq < 1 || Hq % Hkv != 0)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "q has {} heads, no multiple of the {} groups of k", Hq, Hkv);
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

struct AttendBackwardArguments {
  const triad_nsa_tensor *o, *lse, *d_o, *dq, *dk, *dv;
};

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
  zero(ctx, out.dq);
  const int64_t stride = b.branch == TRIAD_NSA_CMP ? call.options.d : 1;
  const Tensor unit =
      attend_rounding_unit(ctx, scope, out.dq, dout, in.q, {{in.k, in.v, {}, delta, stride}}, norm, {}, in.documents);
  const AttendGradIn upstream{dout, {}, delta, lse, unit};
  if (b.branch == TRIAD_NSA_CMP) nsa_attend_compressed_backward(ctx, out, upstream, in, call.options);
  if (b.branch == TRIAD_NSA_SEL)
    nsa_attend_selected_backward(ctx, out, upstream, in, b.block_index, call.options.l_sel);
  if (b.branch == TRIAD_NSA_WIN) nsa_attend_window_backward(ctx, out, upstream, in, call.options.w);
  to.finish();
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
    need(d->cu_seqlens, "documents.cu_seqlens");
    if (B < 1 || T < 1 || d->count < 0)
      reject(TRIAD_NSA_ERROR_ARGUMENT, "{} documents in {} rows of {} tokens", d->count, B, T);
    const int64_t most = max_documents(*d);
    if (!context->device.is_cuda()) return check_host_bounds(d->cu_seqlens, d->count, B, T, most);
    const CurrentDevice current(context->device);
    std::vector<int32_t> host(static_cast<size_t>(d->count + 1));
    try {
      backend::copy(reinterpret_cast<std::byte*>(host.data()), Device::cpu(),
                    reinterpret_cast<const std::byte*>(d->cu_seqlens), context->device,
                    static_cast<int64_t>(host.size() * sizeof(int32_t)), stream);
      backend::synchronize(context->device, stream);
    } catch (const Error& e) { reject(TRIAD_NSA_ERROR_CUDA, "{}", e.what()); }
    check_host_bounds(host.data(), d->count, B, T, most);
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
      if (Hkv < 1 || Hq < 1 || Hq % Hkv != 0)
        reject(TRIAD_NSA_ERROR_ARGUMENT, "q has {} heads, no multiple of the {} groups of k_cmp", Hq, Hkv);
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
