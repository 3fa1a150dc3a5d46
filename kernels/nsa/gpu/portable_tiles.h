// The portable attention kernels' tile shapes (nsa/gpu/fwd_dq.cuh, nsa/gpu/dkdv.cu), and the choice among them by the
// problem and the card's shared memory. The choice is a pure function without CUDA, so tests make it for any card.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>

#include "kernels/common/integer.h"
#include "kernels/common/shared_limits.h"

namespace triad {

// Tile sizes per CTA.
//   kRows         rows that the CTA keeps, 16 per warp: query rows, or keys in the kernels that compute dk and dv
//   kKeys         rows that the CTA loads per step: keys, or query rows in the kernels that compute dk and dv
//   kColumns      output columns (o, dq, or dk and dv) that the CTA computes
//   kHoldsTokens  whether the selected branch's kernels for dk and dv copy a piece's token list to shared memory
// For head widths up to 64 the kernels use SmallHeadTile, or WideTile where plan_wide_tile() plans it. For larger heads
// they use LargeHeadTile if it fits into shared memory, and CompactTile if it does not. If a head has more than 128
// columns, several CTAs compute 128 output columns each, and every one computes the scores itself. With SmallHeadTile
// at head width 64, and with LargeHeadTile at 128, a warp takes 64 mma.m16n8k16 per forward step and keeps its sums in
// registers.
template <int kRows_, int kKeys_, int kColumns_, bool kHoldsTokens_>
struct PortableTile {
  static constexpr int kRows = kRows_, kKeys = kKeys_, kColumns = kColumns_, kThreads = 2 * kRows;
  static constexpr bool kHoldsTokens = kHoldsTokens_;
};
using SmallHeadTile = PortableTile<64, 64, 64, true>;
using LargeHeadTile = PortableTile<64, 32, 128, true>;
using CompactTile = PortableTile<32, 16, 128, false>;
// WideTile is for PortableKernel::dq_dk_dv, the kernel that computes dq, dk and dv, with bf16 heads up to 64 wide in a
// branch without block lists where each token sees all keys up to itself. With WideTile, the kernel loads a query row
// and adds to its dq once per 96 keys; with SmallHeadTile, once per 64 keys.
using WideTile = PortableTile<96, 96, 64, false>;

enum class PortableKernel { forward, dq, dkdv, dq_dk_dv };
enum class TileShape { small_heads, large_heads, compact, wide };

// choose_tile()'s result: the tile's shape, how many tiles are in shared memory at a time (`stages`: 2 for double
// buffering, or 1), and a CTA's shared memory (`bytes`).
struct TilePlan {
  TileShape shape;
  int stages;
  int64_t bytes;
};

struct TileProblem {
  int64_t element_bytes, dk, dv;
  int64_t listed_tokens = 0;  // the selected branch's dkdv, dq_dk_dv: the most tokens in a piece of work
};

inline constexpr int64_t kTilePadBytes = 16;  // padding after each tile row, against bank conflicts
// For each query row in a stage, the kernels that compute dk and dv keep q, dout and a few more numbers in shared
// memory (StageRows in nsa/gpu/dkdv.cu). These are the other numbers' bytes: without dq, and with dq.
inline constexpr int64_t kDkdvRowBytes = 20, kDqDkDvRowBytes = 24;
inline constexpr int kSmallHeads = SmallHeadTile::kColumns;  // the widest small heads

// A `width`-element row's columns in shared memory.
template <class Tile>
constexpr int64_t padded_columns(int64_t width) {
  return round_up(width, int64_t{Tile::kColumns});
}

// Plans a CTA's shared memory for tiles with this shape. If two CTAs with two buffers (stages) each fit on an SM, a CTA
// has two, and fills one while it uses the other. Otherwise it has one.
template <class Tile>
TilePlan plan_tile(TileShape shape, PortableKernel kernel, const TileProblem& p, const SharedLimits& limits) {
  const auto row_bytes = [&](int64_t columns) { return columns * p.element_bytes + kTilePadBytes; };
  const int64_t k = row_bytes(padded_columns<Tile>(p.dk)), v = row_bytes(padded_columns<Tile>(p.dv));
  int64_t kept = Tile::kRows * (k + v), stage = Tile::kKeys * (k + v);
  if (kernel == PortableKernel::forward) {
    kept = Tile::kRows * k;
    stage = Tile::kKeys * (k + row_bytes(Tile::kColumns));
  } else if (kernel == PortableKernel::dkdv || kernel == PortableKernel::dq_dk_dv) {
    if (Tile::kHoldsTokens) kept += p.listed_tokens * static_cast<int64_t>(sizeof(int32_t));
    stage += Tile::kKeys * (kernel == PortableKernel::dkdv ? kDkdvRowBytes : kDqDkDvRowBytes);
    if (kernel == PortableKernel::dq_dk_dv) kept += Tile::kRows * row_bytes(Tile::kKeys);  // ds
  }
  const int stages = kept + 2 * stage <= limits.bytes_per_cta(2) ? 2 : 1;
  return {shape, stages, kept + stages * stage};
}

// Returns the plan for a problem on a card with these limits. Small heads have one shape. Larger heads have two, and
// the first that fits is chosen. If none fits, the returned plan's `bytes` exceeds limits.cta_bytes.
inline TilePlan choose_tile(PortableKernel kernel, const TileProblem& p, const SharedLimits& limits) {
  if (std::max(p.dk, p.dv) <= kSmallHeads) return plan_tile<SmallHeadTile>(TileShape::small_heads, kernel, p, limits);
  const TilePlan large = plan_tile<LargeHeadTile>(TileShape::large_heads, kernel, p, limits);
  if (large.bytes <= limits.cta_bytes) return large;
  return plan_tile<CompactTile>(TileShape::compact, kernel, p, limits);
}

// Plans a WideTile CTA, or returns nothing where choose_tile() has to choose: in f32, for heads wider than 64, if two
// CTAs with two stages each do not fit on an SM, and if there are fewer than kLeastKeys keys. With few keys, the last
// tile, which may be mostly empty, weighs too much.
inline std::optional<TilePlan> plan_wide_tile(const TileProblem& p, int64_t keys, const SharedLimits& limits) {
  constexpr int64_t kLeastKeys = 1024;
  if (p.element_bytes != 2 || std::max(p.dk, p.dv) > kSmallHeads || keys < kLeastKeys) return std::nullopt;
  const TilePlan plan = plan_tile<WideTile>(TileShape::wide, PortableKernel::dq_dk_dv, p, limits);
  if (plan.stages != 2) return std::nullopt;
  return plan;
}

}  // namespace triad
