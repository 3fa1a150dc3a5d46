// A sweep of a taught index on Hopper: the products of 128 query rows with all keys that they may see, 128 keys at a
// time. A query row is one token and group, and all groups share the keys. The selection (select_index.cu) takes the
// blocks' maxima of the products, dense attention's student its lse (index_forward.cu).
//
// A CTA keeps the rows of tile_tokens consecutive tokens. Warpgroups 0 and 1 multiply 64 rows each, warpgroup 2 loads
// the keys by TMA into a ring. A warpgroup has two sets of sums: the next tile's product runs while it visits a tile.
// Packed rows: the tokens of each document are a segment, with a sweep over that document's keys alone.
#pragma once
#include "kernels/hopper/tma.cuh"
#include "kernels/hopper/wgmma.cuh"
#include "kernels/nsa/gpu/attend.cuh"

namespace triad::cuda {

inline constexpr int kSweepRows = 128, kSweepKeys = 128, kSweepThreads = 3 * kWarpgroup;
inline constexpr int kSweepConsumerRegisters = 240, kSweepProducerRegisters = 24;
inline constexpr int kSweepPanelBytes = kSweepKeys * kPanelRowBytes;  // a panel of 128 keys or rows

namespace {

using bf16 = __nv_bfloat16;

struct SweepArgs {
  CUtensorMap k_map;  // boxes of 128 keys and 64 columns
  View<const bf16> q;
  Divisor groups;
  int first_token, tokens;  // the tokens that have queries
  int tile_tokens, batch;
  DocumentView documents;
};

template <int kPanels>
struct __align__(1024) SweepShared {
  static constexpr int kStages = kPanels == 1 ? 6 : 4;
  unsigned char q[kPanels][kSweepPanelBytes];
  unsigned char k[kStages][kPanels][kSweepPanelBytes];
  Barrier full[kStages], empty[kStages];
};

// The tokens [first, last] of one document, whose first token is `begin`, and the keys [key0, key_end) of their sweep.
struct Segment {
  int first, last, begin, key0, key_end;
  __device__ __forceinline__ int tiles() const { return ceil_div(max(0, key_end - key0), kSweepKeys); }
};

// Where a thread is in the ring of stages.
template <int kPanels>
struct SweepRing {
  SweepShared<kPanels>& shared;
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == SweepShared<kPanels>::kStages) stage = 0, parity ^= 1;
  }
};

// A CTA's sequence and tokens [first, end): the last tokens, which see the most keys, begin first.
struct SweepTile {
  int b, first, end;
  __device__ __forceinline__ explicit SweepTile(const SweepArgs& a) {
    const int tile = static_cast<int>(gridDim.x / a.batch - 1 - blockIdx.x / a.batch);
    b = static_cast<int>(blockIdx.x % a.batch);
    first = a.first_token + tile * a.tile_tokens, end = min(first + a.tile_tokens, a.tokens);
  }
  // Calls visit(segment) for each document. keys(segment) sets the keys of a segment.
  template <class Keys, class Visit>
  __device__ __forceinline__ void for_segments(const SweepArgs& a, Keys keys, Visit visit) const {
    const DocumentRow<int> row = a.documents.row(b);
    for (int t = first; t < end;) {
      Segment segment{.first = t, .last = min(end, row.end(t)) - 1, .begin = row.begin(t)};
      keys(segment);
      visit(segment);
      t = segment.last + 1;
    }
  }
};

// Prepares a CTA: its barriers, and its queries, in row order token, group. Columns from di on are zeros.
template <int kPanels>
__device__ __forceinline__ void begin_sweep(SweepShared<kPanels>& shared, const SweepArgs& a, const SweepTile& tile) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < SweepShared<kPanels>::kStages; ++i)
      barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], 2 * 4);
    barrier_init_done();
  }
  for (int i = threadIdx.x; i < kSweepRows * kPanels * 8; i += kSweepThreads) {
    const int r = i / (kPanels * 8), chunk = i % (kPanels * 8), token = a.groups.quotient(r);
    const int t = tile.first + token, g = r - token * a.groups.value();
    uint4 x = make_uint4(0, 0, 0, 0);
    if (token < a.tile_tokens && t < tile.end && chunk * 8 < a.q.width)
      x = *reinterpret_cast<const uint4*>(a.q.at(tile.b, t, g) + chunk * 8);
    *reinterpret_cast<uint4*>(shared.q[chunk / 8] + swizzled(r, chunk % 8)) = x;
  }
  fence_async_proxy();
  __syncthreads();
}

// The producer warpgroup's work: one of its threads loads each segment's keys, which keys(segment) sets.
template <int kPanels, class Keys>
__device__ __forceinline__ void produce_sweep(SweepRing<kPanels>& ring, const SweepArgs& a, const SweepTile& tile,
                                              Keys keys) {
  decrease_registers<kSweepProducerRegisters>();
  if (threadIdx.x != 2 * kWarpgroup) return;
  tile.for_segments(a, keys, [&](const Segment& segment) {
    for (int i = 0; i < segment.tiles(); ++i) {
      barrier_wait(&ring.shared.empty[ring.stage], ring.parity ^ 1);
      barrier_expect(&ring.shared.full[ring.stage], kPanels * kSweepPanelBytes);
      for (int panel = 0; panel < kPanels; ++panel)
        copy_box(ring.shared.k[ring.stage][panel], a.k_map, panel * kPanel, segment.key0 + i * kSweepKeys, 0, tile.b,
                 &ring.shared.full[ring.stage]);
      ring.advance();
    }
  });
}

// Calls visit(products, i, exists) for tile i of a segment's keys, with the products of this warpgroup's 64 rows, and
// after each two visits between_tiles(). The four warps of a consumer warpgroup call it. The number of visits is even;
// a tile past the last one does not exist, and has the products of what the ring happens to hold. Products are thus
// queued and read without a branch: with one, ptxas would let no product run during a visit.
template <int kPanels, class Visit, class Between>
__device__ __forceinline__ void sweep_segment(SweepRing<kPanels>& ring, int warpgroup, const Segment& segment,
                                              Visit visit, Between between_tiles) {
  const int tiles = segment.tiles();
  if (tiles == 0) return;
  const uint32_t q = uniform(tile_descriptor(shared_address(ring.shared.q) + warpgroup * 64 * kPanelRowBytes));
  const uint32_t k = uniform(tile_descriptor(shared_address(ring.shared.k)));
  const auto multiply = [&](float(&s)[16][4], bool exists) {
    if (exists) barrier_wait(&ring.shared.full[ring.stage], ring.parity);
    const uint32_t at = k + static_cast<uint32_t>(ring.stage) * (kPanels * kSweepPanelBytes >> 4);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4 * kPanels; ++i) {
      const uint32_t step = i / 4 * (kSweepPanelBytes >> 4) + i % 4 * 2;
      wgmma<Major::k, Major::k>(s, q + step, at + step, i > 0);
    }
    wgmma_commit();
    if (exists) ring.advance();
  };
  int released = ring.stage;
  const auto finish = [&](float(&s)[16][4], bool exists) {
    wgmma_wait<0>();
    pin(s);
    if (exists) {
      barrier_arrive_warp(&ring.shared.empty[released]);
      if (++released == SweepShared<kPanels>::kStages) released = 0;
    }
  };
  float even[16][4], odd[16][4];
  leave_unset(even);
  leave_unset(odd);
  multiply(even, true);
#pragma unroll 1
  for (int i = 0; i < tiles; i += 2) {
    finish(even, true);
    multiply(odd, i + 1 < tiles);
    visit(even, i, true);
    finish(odd, i + 1 < tiles);
    multiply(even, i + 2 < tiles);
    visit(odd, i + 1, i + 1 < tiles);
    between_tiles();
  }
  wgmma_wait<0>();
  pin(even);
}

// The arguments of a sweep, and its launch. supports: bf16, widths of 16 to 128 that are multiples of 16, rows of
// 16-byte vectors, at most 64 groups.
inline bool sweep_supports(const ConstTensor& q, const ConstTensor& k) {
  const int64_t di = q.size(3);
  return q.dtype == DType::bf16 && di % 16 == 0 && di <= 128 && q.size(2) <= 64 && make_view<const bf16>(q).vector &&
         make_view<const bf16>(k).vector && q.size(1) * q.size(2) < (int64_t{1} << 31) - kSweepRows;
}
// q_rows: a view of q whose row t is that of token t. A plan needs no map, which only a driver can make.
inline SweepArgs make_sweep(const Context& ctx, const View<const bf16>& q_rows, const ConstTensor& q,
                            const ConstTensor& k, int64_t first_token, const Documents& documents) {
  const int64_t tokens = first_token + q.size(1);
  return {ctx.planning ? CUtensorMap{} : make_box_map(make_view<const bf16>(k), k.size(0), k.size(1), 1, kSweepKeys),
          q_rows,
          Divisor(static_cast<int>(q.size(2))),
          static_cast<int>(first_token),
          static_cast<int>(tokens),
          kSweepRows / static_cast<int>(q.size(2)),
          static_cast<int>(q.size(0)),
          document_view(documents, tokens)};
}
inline dim3 sweep_grid(const SweepArgs& a) {
  return dim3(static_cast<unsigned>(ceil_div(a.tokens - a.first_token, a.tile_tokens) * a.batch));
}

}  // namespace
}  // namespace triad::cuda
