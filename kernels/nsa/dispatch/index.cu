// The index of a taught selection on the GPU: checks the limits of the kernels, chooses them (choose.h) and queues
// them.
#include "kernels/nsa/index.h"

#include "kernels/common/launch.cuh"
#include "kernels/nsa/dispatch/choose.h"
#include "kernels/nsa/gpu/index.cuh"
#include "kernels/nsa/gpu/select.h"
#include "kernels/nsa/gpu/select_index.h"
#include "kernels/nsa/gpu/share_lists.h"
#include "kernels/nsa/sm90/launch_index.h"

namespace triad::cuda {
namespace {

constexpr const char* kNotFused = "widths, alignment or a block length that the fused kernels lack";

// Calls run(kernel). A planning context does not know how tensors will be aligned, and plans the portable kernels too.
template <class Run>
void run_index(Context& ctx, const char* op, DType dtype, Index kernel, const Run& run) {
  record_route(ctx, op, dtype, fused_name(kernel), kNotFused);
  run(kernel);
  if (ctx.planning && kernel != Index::portable) run(Index::portable);
}

}  // namespace

void nsa_select_index(Context& ctx, Tensor block_index, ConstTensor iq, ConstTensor ik, const SelectOptions& o,
                      const Documents& documents) {
  for (int64_t length : {documents.part.first_query + iq.size(1), o.l_sel})
    TRIAD_CHECK(length < kMaxSelectLength, "nsa_select_index: a length of {} is past the {} that the GPU counts to",
                length, kMaxSelectLength);
  run_index(ctx, "nsa_select_index", iq.dtype, choose_select_index(ctx, iq, ik, o), [&](Index kernel) {
    const auto select = [&](Tensor lists, ConstTensor iq_rows, const SelectOptions& of_rows, const Documents& held) {
      switch (kernel) {
        case Index::sm90:
          return select_index_sm90(ctx, lists, iq_rows, ik, of_rows, held);
        case Index::portable:
          return select_index_portable(ctx, lists, iq_rows, ik, of_rows, held);
      }
    };
    select_shared(ctx, block_index, o, documents, select, iq);
  });
}

void nsa_index_forward(Context& ctx, const IndexForward& index, const AttendIn& in, ConstTensor block_index,
                       int64_t l_sel) {
  const Index choice = choose_index_forward(ctx, index, block_index, l_sel);
  run_index(ctx, "nsa_index_forward", in.q.dtype, choice, [&](Index kernel) {
    switch (kernel) {
      case Index::sm90:
        return index_forward_sm90(ctx, index, in, block_index, l_sel);
      case Index::portable:
        return index_forward_portable(ctx, index, in, block_index, l_sel);
    }
  });
}

void nsa_index_backward(Context& ctx, const IndexBackward& index, const AttendIn& in, ConstTensor lse,
                        ConstTensor block_index, int64_t l_sel) {
  const Index choice = choose_index_backward(ctx, index, in, block_index, l_sel);
  run_index(ctx, "nsa_index_backward", in.q.dtype, choice, [&](Index kernel) {
    switch (kernel) {
      case Index::sm90:
        return index_backward_sm90(ctx, index, in, lse, block_index, l_sel);
      case Index::portable:
        return index_backward_portable(ctx, index, in, lse, block_index, l_sel);
    }
  });
}

}  // namespace triad::cuda
