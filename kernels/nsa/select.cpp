// The selection: checks and dispatch (cpu/select.h is the CPU reference).
#include "kernels/nsa/select.h"

#include "engine/op_scope.h"
#include "kernels/nsa/cpu/select.h"
#include "kernels/nsa/route.h"

namespace triad {

namespace {

void check_select(const ConstTensor& block_index, const ConstTensor& q, const ConstTensor& k_cmp,
                  const ConstTensor& lse_cmp, const SelectOptions& o, const Documents& documents) {
  TRIAD_CHECK(q.rank == 4 && k_cmp.rank == 4, "nsa_select: q {} and k_cmp {} need four axes", q.str(), k_cmp.str());
  TRIAD_CHECK(o.l >= 1 && o.d >= 1 && o.l_sel >= 1, "nsa_select: l {}, d {} and l_sel {} have to be positive", o.l, o.d,
              o.l_sel);
  TRIAD_CHECK(o.init_blocks >= 0 && o.local_blocks >= 1 && o.n_sel >= o.init_blocks + o.local_blocks,
              "nsa_select: n_sel {} does not hold {} initial and {} local blocks", o.n_sel, o.init_blocks,
              o.local_blocks);
  const int64_t B = q.size(0), T = q.size(1), Hq = q.size(2), Hkv = k_cmp.size(2);
  TRIAD_CHECK(Hkv > 0 && Hq % Hkv == 0, "nsa_select: {} query heads are not a multiple of {} groups", Hq, Hkv);
  const int64_t blocks = compressed_length(documents.part.tokens_or(T), o.l, o.d);
  check_tensor("nsa_select: k_cmp", k_cmp, {B, blocks, Hkv, q.size(3)}, q.dtype);
  check_tensor("nsa_select: lse_cmp", lse_cmp, {B, T, Hq}, acc_dtype(q.dtype));
  check_tensor("nsa_select: block_index", block_index, {B, T, Hkv, o.n_sel}, DType::i32);
}

}  // namespace

void check_every(const char* op, const SelectOptions& o, const Documents& documents) {
  if (o.every == 1) return;
  TRIAD_CHECK(o.every >= 1 && o.l_sel % o.every == 0, "{}: lists for {} tokens in blocks of {}", op, o.every, o.l_sel);
  const int64_t first = documents.part.first_query;
  TRIAD_CHECK(first == 0 || (documents.empty() && first % o.every == 0),
              "{}: {} tokens share a list, and the queries begin at token {}{}", op, o.every, first,
              documents.empty() ? "" : " of packed rows");
}

void nsa_select(Context& ctx, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
                const SelectOptions& o, const Documents& documents) {
  const OpScope op_scope(ctx, "nsa_select");
  check_select(block_index, q, k_cmp, lse_cmp, o, documents);
  check_every("nsa_select", o, documents);
  if (ctx.device.is_cuda()) {
    const auto run = [&](Context& on, ConstTensor rows, ConstTensor keys) {
      if constexpr (kBuiltWithCuda) cuda::nsa_select(on, block_index, rows, keys, lse_cmp, o, documents);
    };
    ctx.routes.set_call(q, k_cmp);
    return dispatch_route(
        ctx, "nsa_select", q.dtype, [&](Context& on) { run(on, q, k_cmp); },
        [&](Context& on) {
          Scratch::Scope scope(on.scratch);
          run(on, upcasted(on, scope, q), upcasted(on, scope, k_cmp));
        });
  }
  record_cpu(ctx, "nsa_select", q, k_cmp);
  const int64_t tokens = documents.part.first_query + q.size(1);
  dispatch_float(q.dtype, [&]<class T>() {
    select_cpu::select<T>(ctx, block_index, q, k_cmp, lse_cmp, o, [&](int64_t b, int64_t i) -> select_cpu::Position {
      const DocumentRow<int64_t> row = host_row(documents, b, tokens);
      const int64_t t = documents.part.first_query + i;
      return {t - row.begin(t), row.first_key(t, o.d), row.first_block(t)};
    });
  });
}

}  // namespace triad
