// Forward for the window branch, the compressed branch and dense attention on Hopper: nsa/sm90/forward.cuh with one key
// range per row.
#include "kernels/nsa/sm90/forward.cuh"
#include "kernels/nsa/sm90/launch_forward.h"

namespace triad::cuda {
namespace {

// Whether TMA and 16-byte vectors can read the tensor's rows, and its row and head strides fit into 31 bits.
bool rows_fit(const ConstTensor& t) {
  return t.dtype == DType::bf16 && make_view<const __nv_bfloat16>(t).vector && t.stride[0] < (int64_t{1} << 38) &&
         t.stride[1] < (int64_t{1} << 31) && t.stride[2] < (int64_t{1} << 31);
}

}  // namespace

bool forward_sm90_supports(const AttendOut& out, const AttendIn& in) {
  constexpr int64_t kMostHeads = 128;  // the most heads per group: a tile consists of whole tokens, each with all the
                                       // group's heads
  const int64_t dk = in.q.size(3), dv = in.v.size(3);
  const bool heads = (dk == 64 && dv == 64) || (dk == 128 && dv == 128) || (dk == 192 && dv == 128);
  return heads && rows_fit(in.q) && rows_fit(in.k) && rows_fit(in.v) && rows_fit(out.o) &&
         in.q.size(2) / in.k.size(2) <= kMostHeads;
}

void forward_range_sm90(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in, const KeyRange& range) {
  if (in.documents.empty())
    launch_forward_sm90(ctx, op, out, in, RowRangeKeys<false>{range});
  else
    launch_forward_sm90(ctx, op, out, in, RowRangeKeys<true>{range});
}

}  // namespace triad::cuda
