#include "kernels/nsa/gpu/dkdv_merge.cuh"

#include <algorithm>

namespace triad::cuda {
namespace {

constexpr int kMergeThreads = 256;

// Computes a key block's dk and dv by adding its pieces' partial sums. Grid: x the block and some of its keys, one for
// each index threadIdx.y; y the sequence and group. A thread adds kColumns columns at a time. Pieces that do not exist
// (part_tokens) are left out: their partial sums were never written. If a block has no piece, its dk and dv become
// zeros.
template <int kColumns>
__global__ void __launch_bounds__(kMergeThreads) bwd_dkdv_merge_kernel(const __grid_constant__ MergeArgs a) {
  const KeyWorkList& list = a.list;
  const int turns = ceil_div(list.block_keys, static_cast<int>(blockDim.y));  // CTAs per block
  const int block = blockIdx.x / turns, bg = blockIdx.y, b = bg / a.groups, g = bg % a.groups;
  const int2 keys = keys_of_block(list, a.range, b, block);
  int2 slots;  // the block's first slot of partial sums, and the slot count
  if (list.block_slots != nullptr) {
    slots = list.block_slots[static_cast<int64_t>(bg) * list.blocks + block];
    if (slots.y <= 1) return;  // the only piece stored dk and dv
  } else {
    const int parts = list.pieces / list.blocks;
    int first = 0, end = parts;
    if (a.part_tokens > 0) {  // the pieces that have rows
      const DocumentRange range(a.range, b);
      const int first_row = range.first_row(keys.x), end_row = range.end_row(keys.y - 1, a.tokens);
      first = max(0, first_row - a.first_token) / a.part_tokens;
      end = first_row < end_row && a.first_token < end_row ? ceil_div(end_row - a.first_token, a.part_tokens) : first;
    }
    slots = make_int2((bg * list.blocks + block) * parts + first, end - first);
  }
  const int width = a.dk.width + a.dv.width;
  const int in_block = static_cast<int>(blockIdx.x % turns * blockDim.y + threadIdx.y);
  const int key = keys.x + in_block;
  if (in_block >= list.block_keys || key >= keys.y) return;
  for (int column = threadIdx.x * kColumns; column < width; column += blockDim.x * kColumns) {
    float sum[kColumns] = {};
    for (int part = 0; part < slots.y; ++part) {
      const float* from =
          list.partial + (static_cast<int64_t>(slots.x + part) * list.block_keys + in_block) * width + column;
      if constexpr (kColumns == 4) {
        const float4 x = *reinterpret_cast<const float4*>(from);
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
      } else {
        sum[0] += *from;
      }
    }
    const bool is_dk = column < a.dk.width;
    const GradView& out = is_dk ? a.dk : a.dv;
    const int to = is_dk ? column : column - a.dk.width;
    if constexpr (kColumns == 4) {
      out.store(b, key, g, to, sum[0], sum[1]);
      out.store(b, key, g, to + 2, sum[2], sum[3]);
    } else {
      out.store(b, key, g, to, sum[0]);
    }
  }
}

template <int kColumns>
void launch_merge(Context& ctx, const char* op, const MergeArgs& a, int64_t sequences_and_groups) {
  const int lanes = std::min((a.dk.width + a.dv.width) / kColumns, kMergeThreads), keys = kMergeThreads / lanes;
  const dim3 grid(a.list.blocks * ceil_div(a.list.block_keys, keys), static_cast<unsigned>(sequences_and_groups));
  launch(ctx, op, bwd_dkdv_merge_kernel<kColumns>, grid, dim3(lanes, keys), 0, a);
}

}  // namespace

void merge_dkdv(Context& ctx, const char* op, const MergeArgs& a, int64_t sequences_and_groups) {
  if (a.list.partial == nullptr) return;
  if (a.dk.width % 4 == 0 && a.dv.width % 4 == 0)
    launch_merge<4>(ctx, op, a, sequences_and_groups);
  else
    launch_merge<1>(ctx, op, a, sequences_and_groups);
}

}  // namespace triad::cuda
