// Launchers for the selected branch's forward with a shared KV tile (nsa/sm90/shared_tile.cuh).
#include "kernels/nsa/sm90/shared_tile.cuh"

#include <algorithm>

#include "kernels/nsa/sm90/launch_forward.h"

namespace triad::cuda {
namespace {

// The most blocks that a tile's plan may have, because its tables have to fit into shared memory. A block needs 6 words
// of bits and one for each of its steps; in packed rows, one for its first key too.
int64_t most_plan_blocks(const AttendIn& in, int64_t l_sel) {
  constexpr int64_t kMaxBlocks = 1024;
  const int64_t parts = ceil_div(std::min(l_sel, in.q.size(1)), kTileKeys);
  return in.documents.empty() ? kMaxBlocks : kMaxBlocks * (6 + parts) / (7 + parts);
}
int64_t blocks_of_row(const AttendIn& in, int64_t l_sel) {
  return in.documents.empty() ? ceil_div(end_token(in), std::min(l_sel, end_token(in))) : in.documents.ids();
}

}  // namespace

bool shared_tile_supports(const AttendOut& out, const AttendIn& in, int64_t l_sel, bool long_documents_elsewhere) {
  const int64_t T = in.q.size(1), parts = ceil_div(std::min(l_sel, T), kTileKeys);
  const bool fits = blocks_of_row(in, l_sel) <= most_plan_blocks(in, l_sel) ||
                    (long_documents_elsewhere && !in.documents.empty() && shared_tile_longest(in, l_sel) > 0);
  return forward_sm90_supports(out, in) && T < (1 << 24) && parts < (1 << 12) && fits;
}

int64_t shared_tile_longest(const AttendIn& in, int64_t l_sel) {
  const int64_t most = most_plan_blocks(in, l_sel);
  if (blocks_of_row(in, l_sel) <= most) return in.q.size(1);
  // Besides the document's blocks, a tile's plan has the blocks of documents that begin in the tile.
  const int64_t tile_tokens = ceil_div(ForwardShape<64, 64, 64, 6, 1>::kRowsCta, in.q.size(2) / in.k.size(2));
  return std::max<int64_t>((most - tile_tokens - 2) * l_sel - tile_tokens, 0);
}

void forward_shared_tile(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                         const SelectedKeys& keys, const CombineAlong* combine, const KvStationaryShare* elsewhere) {
  if (elsewhere == nullptr && in.documents.empty() && lists_fit_bitmaps(keys.range, keys.block_keys))
    return launch_forward_sm90(ctx, op, out, in, make_bitmap_keys(keys, combine));
  const int64_t blocks = std::min<int64_t>(keys.lists.blocks, most_plan_blocks(in, keys.block_keys));
  if (in.documents.empty())
    launch_forward_sm90(ctx, op, out, in, make_shared_tile_keys<false>(keys, blocks, combine, elsewhere));
  else
    launch_forward_sm90(ctx, op, out, in, make_shared_tile_keys<true>(keys, blocks, combine, elsewhere));
}

}  // namespace triad::cuda
