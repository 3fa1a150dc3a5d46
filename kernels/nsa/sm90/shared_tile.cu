// Launchers of the selected branch's forward with a shared KV tile (nsa/sm90/shared_tile.cuh).
#include "kernels/nsa/sm90/shared_tile.cuh"

#include "kernels/nsa/sm90/launch_forward.h"

namespace triad::cuda {

namespace {

SharedTileSize size_of(const AttendIn& in, int64_t l_sel) {
  constexpr int64_t kRows = ForwardShape<64, 64, kTileKeys, 6, 1>::kRowsCta;  // the same in all shapes
  return shared_tile_size(in, l_sel, kRows);
}

}  // namespace

bool shared_tile_supports(const AttendOut& out, const AttendIn& in, int64_t l_sel) {
  constexpr int64_t kMostBlocks = 1024, kMostWords = 6;  // for groups of one head a mask has 6 words
  const SharedTileSize size = size_of(in, l_sel);
  const bool fits = in.documents.empty()
                        ? size.blocks <= kMostBlocks
                        : size.bytes() <= kMostBlocks * (kMostWords + size.parts) * int64_t{sizeof(int)};
  return forward_sm90_supports(out, in) && in.q.size(1) < (1 << 24) && size.parts < (1 << 12) && fits;
}

void forward_shared_tile(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                         const SelectedKeys& keys, const CombineAlong* combine, const int* unless) {
  if (unless == nullptr && in.documents.empty() && lists_fit_bitmaps(keys.range, keys.block_keys))
    launch_forward_sm90(ctx, op, out, in, make_bitmap_keys(keys, combine));
  else
    launch_forward_sm90(ctx, op, out, in, make_shared_tile_keys(keys, size_of(in, keys.block_keys), combine, unless));
}

}  // namespace triad::cuda
