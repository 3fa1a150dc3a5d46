// Launchers of the selected branch's forward with a shared KV tile (nsa/sm90/shared_tile.cuh).
#include "kernels/nsa/sm90/shared_tile.cuh"

#include <algorithm>

#include "kernels/nsa/sm90/launch_forward.h"

namespace triad::cuda {

bool shared_tile_supports(const AttendOut& out, const AttendIn& in, int64_t l_sel) {
  constexpr int64_t kMaxBlocks = 1024;  // limit on the blocks of a sequence: the table of bits has to fit into shared
                                        // memory
  const int64_t T = in.q.size(1), block = std::min(l_sel, T);
  // A block needs 6 words of bits and one for each of its steps; of packed rows, one for its first key too.
  const int64_t parts = ceil_div(block, kTileKeys);
  const bool fits = in.documents.empty() ? ceil_div(T, block) <= kMaxBlocks
                                         : in.documents.ids() * (7 + parts) <= kMaxBlocks * (6 + parts);
  return forward_sm90_supports(out, in) && T < (1 << 24) && parts < (1 << 12) && fits;
}

void forward_shared_tile(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                         const SelectedKeys& keys, const CombineAlong* combine, const int* unless) {
  if (unless == nullptr && in.documents.empty() && lists_fit_bitmaps(keys.range, keys.block_keys))
    launch_forward_sm90(ctx, op, out, in, make_bitmap_keys(keys, combine));
  else
    launch_forward_sm90(ctx, op, out, in, make_shared_tile_keys(keys, combine, unless));
}

}  // namespace triad::cuda
