// The selection by a taught index: checks, dispatch, and the CPU reference.
#include "kernels/nsa/select_index.h"

#include <cmath>
#include <limits>

#include "engine/op_scope.h"
#include "kernels/nsa/cpu/select.h"
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

// A work item is one token and group.
template <class T>
void select_cpu_by_index(Context& ctx, Tensor block_index, ConstTensor iq, ConstTensor ik, const SelectOptions& o,
                         const Documents& documents) {
  using A = acc_t<T>;
  using namespace attend_cpu;
  const int64_t B = iq.size(0), N = iq.size(1), groups = iq.size(2), di = iq.size(3), q_row = round_up<A>(di);
  const int64_t tokens = documents.part.first_query + N;
  const A scale = A{1} / std::sqrt(static_cast<A>(di));
  Scratch::Scope scope(ctx.scratch);
  const Tensor k_tiles = pack_tiles<T>(ctx, scope, ik);
  const Rows<const T> q_rows(iq);
  const Rows<int32_t> lists(block_index);
  parallel_for(ctx, B * N * groups, [&](int64_t i) {
    const int64_t g = i % groups, n = i / groups % N, b = i / groups / N, token = documents.part.first_query + n;
    const DocumentRow<int64_t> row = host_row(documents, b, tokens);
    const int64_t begin = row.begin(token), t = token - begin;
    ThreadBuffer<A> buffer(q_row + kChunk);
    A *q = buffer.take(q_row), *s = buffer.take(kChunk);
    load_row(q, q_rows(b, n, g), di, scale);
    const Right<A> k = tiles_of<A>(k_tiles, b, 0);
    const bool any_score = !o.rule(t).lists_all();
    select_cpu::list_blocks<A>(lists(b, n, g), t, row.first_block(token), o, [&](int64_t j) {
      A best = -std::numeric_limits<A>::infinity();
      if (!any_score) return best;
      const int64_t first_token = begin + j * o.l_sel;
      for_each_chunk<A>(first_token, first_token + o.l_sel, [&](int64_t c0, int64_t c1, int64_t first, int64_t last) {
        scores(s, kChunk, 1, q, q_row, di, k, c0, c1);
        for (int64_t key = first; key < last; ++key) best = s[key - c0] > best ? s[key - c0] : best;
      });
      return best;
    });
  });
}

}  // namespace

void nsa_select_index(Context& ctx, Tensor block_index, ConstTensor iq, ConstTensor ik, const SelectOptions& o,
                      const Documents& documents) {
  const OpScope op_scope(ctx, "nsa_select_index");
  check_select(block_index, iq, ik, o, documents);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) {
      ctx.routes.set_call(iq, ik);
      return dispatch_route(
          ctx, "nsa_select_index", iq.dtype,
          [&](Context& on) { cuda::nsa_select_index(on, block_index, iq, ik, o, documents); },
          [&](Context& on) {
            Scratch::Scope scope(on.scratch);
            cuda::nsa_select_index(on, block_index, upcasted(on, scope, iq), upcasted(on, scope, ik), o, documents);
          });
    }
  }
  record_cpu(ctx, "nsa_select_index", iq, ik);
  dispatch_float(iq.dtype, [&]<class T>() { select_cpu_by_index<T>(ctx, block_index, iq, ik, o, documents); });
}

}  // namespace triad
