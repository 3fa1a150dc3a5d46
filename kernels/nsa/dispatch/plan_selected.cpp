// The selected branch's backward in a build without CUDA, which only plans it: reserves what grows with a sequence to a
// visible part of a run's memory, as build_inverse_index() in nsa/gpu/inverse_index.cu does.
#include "kernels/nsa/attend_selected.h"
#include "kernels/nsa/dispatch/choose.h"
#include "kernels/nsa/dispatch/plan_pieces.h"

namespace triad::cuda {

namespace {

// end: the row's tokens up to the call's last query, as in KeyWorkShape::T.
void reserve(Context& ctx, const ListedWork& work, int64_t end, const PiecePlan& plan, bool has_row_stats) {
  constexpr int64_t kKeyWorkInts = 4;
  const int64_t bgs = work.B * work.Hkv;
  const auto [pieces, slots] = key_work_bounds({end, work.n, work.block_keys, work.blocks, work.T}, plan);
  Scratch::Scope scope(ctx.scratch);
  if (has_row_stats) scope.alloc(DType::f32, {bgs, work.T * (work.Hq / work.Hkv), 2});
  scope.alloc(DType::i32, {bgs, plan.parts, work.blocks});
  scope.alloc(DType::i32, {bgs, work.T * work.n});
  scope.alloc(DType::i32, {pieces, bgs, kKeyWorkInts});
  scope.alloc(DType::i32, {bgs, work.blocks, 2});
  if (slots > 0) scope.alloc(DType::f32, {bgs * slots, work.block_keys, work.dk + work.dv});
}

}  // namespace

void plan_selected_backward(Context& ctx, const AttendIn& in, const ConstTensor& block_index, int64_t l_sel) {
  const RowPart& part = in.documents.part;
  const int64_t dk = in.q.size(3), dv = in.v.size(3), T = in.q.size(1), keys = part.first_query - part.first_key + T,
                block = std::min(l_sel, keys);
  const ListedWork work{.B = in.q.size(0),
                        .T = T,
                        .Hq = in.q.size(2),
                        .Hkv = in.k.size(2),
                        .dk = dk,
                        .dv = dv,
                        .n = block_index.size(3),
                        .blocks = in.documents.empty() ? ceil_div(keys, block) : in.documents.ids(),
                        .block_keys = block,
                        .is_part = !part.whole(),
                        .has_documents = !in.documents.empty()};
  const bool bf16 = in.q.dtype == DType::bf16, one_kernel = bf16 && dk == dv && (dk == 64 || dk == 128),
             hopper = bf16 && ctx.may_use_sm90();
  // As cuda::nsa_attend_selected_backward plans: without a rounding unit, and with one.
  const Backward two =
      hopper && part.whole() && (one_kernel || (dk == 192 && dv == 128)) ? Backward::sm90 : Backward::portable;
  reserve(ctx, work, keys, plan_pieces(work, two), /*has_row_stats=*/two == Backward::sm90);
  if (!one_kernel) return;
  const Backward one = !hopper ? Backward::portable_dq_dk_dv : dk == 64 ? Backward::sm90_d64 : Backward::sm90_d128;
  reserve(ctx, work, keys, plan_pieces(work, one), /*has_row_stats=*/false);
}

}  // namespace triad::cuda
