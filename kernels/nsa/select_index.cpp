// The selection by a taught index: checks, dispatch, and the CPU reference.
#include "kernels/nsa/select_index.h"

#include "engine/op_scope.h"
#include "kernels/nsa/cpu/select_index.h"
#include "kernels/nsa/route.h"

namespace triad {

namespace {

void check_select(const ConstTensor& block_index, const ConstTensor& iq, const ConstTensor& ik, const SelectOptions& o,
                  const Documents& documents) {
  const char* const op = "nsa_select_index";
  TRIAD_CHECK(iq.rank == 4 && ik.rank == 4 && is_float(iq.dtype), "{}: iq {} and ik {} need four axes of floats", op,
              iq.str(), ik.str());
  TRIAD_CHECK(o.l_sel >= 1, "{}: blocks of {} tokens", op, o.l_sel);
  TRIAD_CHECK(o.init_blocks >= 0 && o.local_blocks >= 1 && o.n_sel >= o.init_blocks + o.local_blocks,
              "{}: n_sel {} does not hold {} initial and {} local blocks", op, o.n_sel, o.init_blocks, o.local_blocks);
  TRIAD_CHECK(documents.part.first_key == 0, "{}: the keys begin at token {}", op, documents.part.first_key);
  check_tensor("nsa_select_index: ik", ik, {iq.size(0), ik.size(1), 1, iq.size(3)}, iq.dtype);
  check_keys_held(op, {iq, ik, ik, documents}, 0);
  check_tensor("nsa_select_index: block_index", block_index, {iq.size(0), iq.size(1), iq.size(2), o.n_sel}, DType::i32);
}

}  // namespace

void nsa_select_index(Context& ctx, Tensor block_index, ConstTensor iq, ConstTensor ik, const SelectOptions& o,
                      const Documents& documents) {
  const OpScope op_scope(ctx, "nsa_select_index");
  check_select(block_index, iq, ik, o, documents);
  check_every("nsa_select_index", o, documents);
  if (ctx.device.is_cuda()) {
    const auto run = [&](Context& on, ConstTensor rows, ConstTensor keys) {
      if constexpr (kBuiltWithCuda) cuda::nsa_select_index(on, block_index, rows, keys, o, documents);
    };
    ctx.routes.set_call(iq, ik);
    return dispatch_route(
        ctx, "nsa_select_index", iq.dtype, [&](Context& on) { run(on, iq, ik); },
        [&](Context& on) {
          Scratch::Scope scope(on.scratch);
          run(on, upcasted(on, scope, iq), upcasted(on, scope, ik));
        });
  }
  record_cpu(ctx, "nsa_select_index", iq, ik);
  const int64_t tokens = documents.part.first_query + iq.size(1);
  dispatch_float(iq.dtype, [&]<class T>() {
    select_cpu::select_by_index<T>(ctx, block_index, iq, ik, o, [&](int64_t b, int64_t i) -> select_cpu::IndexPosition {
      const DocumentRow<int64_t> row = host_row(documents, b, tokens);
      const int64_t t = documents.part.first_query + i, begin = row.begin(t);
      return {t - begin, begin, row.first_block(t)};
    });
  });
}

}  // namespace triad
