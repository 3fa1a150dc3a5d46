// Computes the block scores for a token tile, by one CTA (nsa/sm90/select.cu): key-query products, probabilities summed
// over heads, and Eq. 9's pooling into blocks. Only block scores are stored.
#pragma once
#include "kernels/common/bthd.cuh"
#include "kernels/common/documents.cuh"
#include "kernels/hopper/warpgroup.cuh"
#include "kernels/hopper/wgmma.cuh"
#include "kernels/nsa/sm90/select_lists.cuh"

namespace triad::cuda {
namespace {

constexpr int kWarps = 4, kWarpKeys = 32, kMaxTokens = 32;
// The usual token count per tile, for kPanels = dk / 64: so few that three CTAs' queries fit on an SM, even for large
// groups. Small groups may have up to kMaxTokens, so that fewer tiles read the group's keys from L2.
template <int kPanels>
constexpr int kTokensOf = kPanels == 1 ? 16 : 8;
constexpr int kListedTokens = 128;  // tokens per work item, for tokens that need no scores

struct SelectArgs {
  Bthd<int32_t> block_index;
  Bthd<const __nv_bfloat16> q, k;
  Bthd<const float> lse;    // [B,T,Hq,1]
  int first_token, tokens;  // the tokens that have queries: [first_token, tokens), by default [0, T)
  int keys, heads;
  int key_bytes;         // stride between neighbouring keys, bytes
  unsigned groups, bgs;  // groups is Hkv, bgs is B * Hkv
  int columns, turns;    // columns: tokens per tile times heads, rounded up; they are multiplied in `turns` parts
  int l, d, n_sel, init_blocks, local_blocks;
  int token_shift, key_shift;  // log2 of the tokens, and of the 2, 4 or 8 compressed keys, per block
  float whole, over;           // Eq. 9's weights: whole, for a key inside its block; over, for a block's last key in
                               // the next block
  float scale;                 // q.k's factor, times log2(e)
  int scored_from;             // tokens before this one need no scores, because they list all their blocks; T in packed
                               // rows, where the kernel looks at each token
  int scored_tiles;            // tiles that need scores, in a sequence and group
  const int4* packed_tiles;  // packed rows' tiles that need scores, listed by list_tiles_kernel; x: first token; y, z:
                             // the document's first token and first block; w: 32 * sequence + token count
  const int* packed_count;   // number of packed_tiles
  int query_bytes, list_bytes,
      row_floats;  // q's bytes in shared memory; bytes for a warp's lists; floats per token's score row, with padding
  float* slab;     // scores [CTA][tokens per tile][row_floats]; nullptr: scores are in shared memory
  int* taken;      // counts the items that have been assigned; nullptr: items are assigned round robin
  DocumentView documents;
};

// A tile's queries are the products' columns, in the order [head][token in the tile]. A turn multiplies kColumns of
// them with 64 keys in two products; the first product has kFirstOf columns.
constexpr int kColumnUnits = kPanelRowBytes / 16;
template <int kColumns>
constexpr int kFirstOf = kColumns == 96 ? 64 : kColumns / 2;

__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// A warp's 32 keys in one step. They are copied to the warp's buffer in shared memory, then read into registers as left
// operands. Lane 4r + q gets keys 4r .. 4r + 3: key 4r + c is row 8c + r in a swizzled panel, so that keys 4r + 2p and
// 4r + 2p + 1 are rows r and r + 8 in product p.
template <int kPanels>
struct WarpKeys {
  static constexpr int kPanelBytes = kWarpKeys * kPanelRowBytes, kBytes = kPanels * kPanelBytes;
  uint32_t a[4 * kPanels][4];  // one product's left operand

  // The 16 bytes that this lane copies from the group's first key.
  __device__ __forceinline__ static const unsigned char* lane_part(const __nv_bfloat16* k) {
    return reinterpret_cast<const unsigned char*>(k) + threadIdx.x % 8 * 16;
  }
  __device__ __forceinline__ static void copy(uint32_t buffer, const unsigned char* k, int key_bytes, int key,
                                              int keys) {
    const int c = threadIdx.x % 32 / 8;
    uint32_t to = buffer + c * 8 * kPanelRowBytes + threadIdx.x % 8 * 16;
    asm volatile("" : "+r"(to));  // makes the compiler recompute eight addresses, which would otherwise take registers
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const unsigned char* row = k + static_cast<int64_t>(min(key + c + 4 * r, keys - 1)) * key_bytes;
#pragma unroll
      for (int i = 0; i < kPanels; ++i)
        copy_async((to ^ r << 4) + i * kPanelBytes + r * kPanelRowBytes, row + i * kPanelRowBytes);
    }
    copy_async_commit();
  }
  template <int p>
  __device__ __forceinline__ void load(uint32_t buffer) {
    const int row = threadIdx.x % 8, matrix = threadIdx.x % 32 / 8;
    const uint32_t first = buffer + matrix % 2 * 8 * kPanelRowBytes + swizzled(row, matrix / 2);
#pragma unroll
    for (int i = 0; i < 4 * kPanels; ++i)
      load_matrices(a[i], (first ^ i % 4 << 5) + i / 4 * kPanelBytes + p * 16 * kPanelRowBytes);
  }
  // Starts to multiply the keys in `a` with 8 kN rows of q in shared memory, which are the columns. queries: these
  // rows' wgmma descriptor. finish() waits for the product.
  template <int kColumns, int kN>
  __device__ __forceinline__ void multiply(float (&product)[kN][4], uint32_t queries) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4 * kPanels; ++i)
      wgmma<Major::k>(product, a[i], queries + i / 4 * kColumns * kColumnUnits + i % 4 * 2, i > 0);
    wgmma_commit();
  }
};
template <int kN>
__device__ __forceinline__ void finish(float (&product)[kN][4]) {
  wgmma_wait<0>();
  pin(product);
}

// A tile of tokens that need scores: [first, first + count) in sequence b and group g, all in one document. Keys,
// blocks and `position`, the first token's, are counted from the document's start. key0 and block0 are the document's
// first key and block in the row.
struct Tile {
  int b, g, first, count, position, key0 = 0, block0 = 0;
  // An item's tile. packed: std::true_type for packed rows. The loop over keys needs all registers, so that the kernel
  // has an instance for each.
  template <class Packed>
  __device__ Tile(const SelectArgs& a, unsigned item, int tile_tokens, Packed packed) {
    if constexpr (packed) {
      const int4 listed = a.packed_tiles[item / a.groups];
      const auto in_all_lanes = [](int x) { return static_cast<int>(uniform(x)); };
      const int b_and_count = in_all_lanes(listed.w), document = in_all_lanes(listed.y);
      b = b_and_count / 32, count = b_and_count % 32, g = static_cast<int>(item % a.groups);
      first = in_all_lanes(listed.x), position = first - document;
      key0 = document >> (a.token_shift - a.key_shift), block0 = in_all_lanes(listed.z);
      return;
    }
    const unsigned bg = item % a.bgs, i = item / a.bgs;
    b = static_cast<int>(bg / a.groups), g = static_cast<int>(bg % a.groups);
    first = a.scored_from + (a.scored_tiles - 1 - static_cast<int>(i)) * tile_tokens;
    count = min(tile_tokens, a.tokens - first);
    position = first;
  }
};

// The blocks from which a tile's tokens choose. The forced blocks are [0, begin) and the local_blocks blocks from `end`
// on. Among the candidates [begin, end), `slots` are chosen, which is fewer than there are.
struct Candidates {
  int begin, end, slots;
  __device__ Candidates(const SelectArgs& a, const Tile& tile)
      : begin(a.init_blocks),
        end((tile.position >> a.token_shift) - a.local_blocks + 1),
        slots(a.n_sel - a.init_blocks - a.local_blocks) {}
};

// Where a column's lse is stored: columns 2q and 2q + 1 in one group of eight and in the next group have contiguous
// lse.
__device__ __forceinline__ int place_of_shift(int column) {
  return column / 16 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
}
// Starts to copy the tile's queries and their lse. The queries become the products' columns, [turn][panel][column].
// Columns without a head or token are set to zero.
template <int kPanels, int kTokens, int kColumns>
__device__ __forceinline__ void copy_queries(const SelectArgs& a, const Tile& tile, unsigned char* queries,
                                             float* lse) {
  const int rows = a.columns, chunk = threadIdx.x % 8;
#pragma unroll 2
  for (int row = threadIdx.x / 8; row < rows; row += kWarpgroup / 8) {
    const int t = row % kTokens, h = row / kTokens;
    const bool exists = t < tile.count && h < a.heads;
    unsigned char* to =
        queries + row / kColumns * (kPanels * kColumns * kPanelRowBytes) + swizzled(row % kColumns, chunk);
    const __nv_bfloat16* from = a.q.row(tile.b, tile.first + (exists ? t : 0), tile.g * a.heads + (exists ? h : 0));
#pragma unroll
    for (int i = 0; i < kPanels; ++i)
      copy_async_16(to + i * kColumns * kPanelRowBytes, from + i * kPanel + chunk * 8, exists ? 16 : 0);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < rows; i += kWarpgroup) {
    const int t = i % kTokens, h = i / kTokens;
    const bool exists = t < tile.count && h < a.heads;
    const float* from = a.lse.row(tile.b, tile.first + (exists ? t : 0), tile.g * a.heads + (exists ? h : 0));
    copy_async_4(lse + place_of_shift(i), from, exists);
  }
}
// Waits for the copies, then replaces each lse by lse * log2(e). Columns without a row get infinity, which makes p = 0.
template <int kTokens>
__device__ __forceinline__ void finish_queries(const SelectArgs& a, const Tile& tile, float* lse) {
  copy_async_wait();
#pragma unroll 1
  for (int i = threadIdx.x; i < a.columns; i += kWarpgroup) {  // each thread converts the values that it has copied
    const bool exists = i % kTokens < tile.count && i / kTokens < a.heads;
    float& x = lse[place_of_shift(i)];
    x = exists && x != -INFINITY ? x * kLog2e : INFINITY;
  }
  fence_async_proxy();
}

// Adds the probabilities 2^(product * scale - lse) for a turn's heads to this lane's sums, [eight tokens][key, token].
// kFrom: which eight of a head's tokens are the product's first columns.
template <int kFrom, int kEights, int kN>
__device__ __forceinline__ void add_probabilities(float (&sum)[kEights][4], const float (&product)[kN][4],
                                                  const float4* shifts, float scale) {
#pragma unroll
  for (int j = 0; j < kN; j += 2) {
    const float4 shift = shifts[2 * j];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sum[(kFrom + j + i) % kEights][e] += exp2_approx(
            fmaf(product[j + i][e], scale, i == 0 ? (e % 2 ? -shift.y : -shift.x) : (e % 2 ? -shift.w : -shift.z)));
  }
}

// Stores the block scores that a warp's 32 keys contribute to. sum: the lane's keys 4r .. 4r + 3, with r = lane / 4, as
// [key pair][token]. Blocks that are no candidates get -1. last: for each token, what the warp's last key contributes
// to the next block (in lanes 28 .. 31).
template <int kSize, int kEights>
__device__ __forceinline__ void store_scores(const SelectArgs& a, const Candidates& c,
                                             const float (&sum)[2][kEights][4], int first_key,
                                             float (&last)[2 * kEights], float* lane_scores) {
  const int lane = threadIdx.x % 32, r = lane / 4;
  const int block = first_key / kSize + (kSize == 2 ? 2 * r : kSize == 4 ? r : r / 2);
  const auto is_candidate = [&](int j) {
    return static_cast<unsigned>(j - c.begin) < static_cast<unsigned>(c.end - c.begin);
  };
  const bool counts = is_candidate(block), next_counts = is_candidate(block + 1);
  float* to = lane_scores + block;
#pragma unroll
  for (int i = 0; i < 2 * kEights; ++i, to += i % 2 == 0 ? 7 * a.row_floats : a.row_floats) {
    const int j = i / 2, e = i % 2;
    const float s0 = sum[0][j][e], s1 = sum[0][j][e + 2], s2 = sum[1][j][e], s3 = sum[1][j][e + 2];
    const float over = a.over * s3;
    const float before = __shfl_sync(kFullWarp, lane < 28 ? over : last[i], (lane + 28) % 32);
    last[i] = over;
    if constexpr (kSize == 4) {
      const float score = fmaf(a.whole, s0 + s1 + s2, s3) + before;
      to[0] = counts ? fmaxf(score, 0.0f) : -1.0f;
    } else if constexpr (kSize == 2) {
      const float score = fmaf(a.whole, s0, s1) + before, next = fmaf(a.whole, s2, s3) + a.over * s1;
      to[0] = counts ? fmaxf(score, 0.0f) : -1.0f;
      to[1] = next_counts ? fmaxf(next, 0.0f) : -1.0f;
    } else {
      const float half = fmaf(a.whole, s0 + s1 + s2, (r % 2 ? 1.0f : a.whole) * s3);
      const float score = half + __shfl_down_sync(kFullWarp, half, 4) + before;
      if (r % 2 == 0) to[0] = counts ? fmaxf(score, 0.0f) : -1.0f;
    }
  }
}

// Values that a CTA's warps exchange.
struct SharedEnds {
  float last[kWarps][kMaxTokens];  // what each stripe's last key contributes to the next stripe's first block
  unsigned next_item;
  unsigned scored_items;  // packed rows: how many items are tiles that need scores
  unsigned unused[2];
};

// Computes a tile's scores. Each warp processes a stripe of the keys, `steps` times 32 keys. A step multiplies keys 4r
// and 4r + 1 with all columns, in turns, then keys 4r + 2 and 4r + 3. The next product runs during the current one's
// exponentials.
template <int kPanels, int kTokens, int kColumns>
__device__ __forceinline__ void score_tile(const SelectArgs& a, const Tile& tile, const Candidates& c,
                                           const unsigned char* queries, const float* lse, unsigned char* key_buffers,
                                           float* scores, float (&ends)[kWarps][kMaxTokens], int steps) {
  // A turn's first product begins with a head's first tokens, its second one with the tokens 8 * kSecondFrom on.
  constexpr int kEights = kTokens / 8, kFirst = kFirstOf<kColumns>, kSecondFrom = kFirst / 8 % kEights;
  static_assert(kColumns % kTokens == 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t columns = tile_descriptor(shared_address(queries));
  const unsigned char* k = WarpKeys<kPanels>::lane_part(a.k.row(tile.b, tile.key0, tile.g));
  const float4* shifts = reinterpret_cast<const float4*>(lse) + lane % 4;
  float* lane_scores = scores + lane % 4 * 2 * a.row_floats;
  const uint32_t buffer = shared_address(key_buffers) + warp * WarpKeys<kPanels>::kBytes;
  int key0 = warp * steps * kWarpKeys;
  WarpKeys<kPanels> keys;
  float first[kFirst / 8][4], second[(kColumns - kFirst) / 8][4];
  leave_unset(first);
  leave_unset(second);
  float last[2 * kEights] = {};
  keys.template load<0>(buffer);
  keys.template multiply<kColumns>(first, columns);
#pragma unroll 1
  for (int step = 0; step < steps; ++step, key0 += kWarpKeys) {
    float sum[2][kEights][4] = {};
    const auto take_turns = [&](auto& sums, auto&& next_keys) {
      uint32_t b = columns;
      const float4* shift = shifts;
#pragma unroll 1
      for (int turn = 1; turn < a.turns; ++turn) {
        finish(first);
        keys.template multiply<kColumns>(second, b + kFirst * kColumnUnits);
        add_probabilities<0>(sums, first, shift, a.scale);
        finish(second);
        b += kPanels * kColumns * kColumnUnits;
        keys.template multiply<kColumns>(first, b);
        add_probabilities<kSecondFrom>(sums, second, shift + kFirst / 4, a.scale);
        shift += kColumns / 4;
      }
      finish(first);
      keys.template multiply<kColumns>(second, b + kFirst * kColumnUnits);
      add_probabilities<0>(sums, first, shift, a.scale);
      finish(second);
      next_keys();
      keys.template multiply<kColumns>(first, columns);
      add_probabilities<kSecondFrom>(sums, second, shift + kFirst / 4, a.scale);
    };
    take_turns(sum[0], [&] {
      keys.template load<1>(buffer);
      __syncwarp();
      WarpKeys<kPanels>::copy(buffer, k, a.key_bytes, key0 + kWarpKeys, a.keys - tile.key0);
    });
    take_turns(sum[1], [&] {
      copy_async_wait_group<0>();
      __syncwarp();
      keys.template load<0>(buffer);
    });

    // True if some token does not see some key, so that a mask is needed.
    if ((key0 + kWarpKeys - 1) * a.d + a.l > tile.position + 1) {
#pragma unroll
      for (int i = 0; i < 8 * kEights; ++i) {
        const int p = i / (4 * kEights), j = i / 4 % kEights, e = i % 4;
        const int key = key0 + lane / 4 * 4 + p * 2 + e / 2, token = lane % 4 * 2 + e % 2 + j * 8;
        if (key * a.d + a.l > tile.position + token + 1) sum[p][j][e] = 0.0f;
      }
    }
    if (a.key_shift == 2)
      store_scores<4>(a, c, sum, key0, last, lane_scores);
    else if (a.key_shift == 1)
      store_scores<2>(a, c, sum, key0, last, lane_scores);
    else
      store_scores<8>(a, c, sum, key0, last, lane_scores);
  }
  finish(first);
#pragma unroll
  for (int i = 0; i < 2 * kEights; ++i)
    if (lane >= 28) ends[warp][lane % 4 * 2 + i % 2 + i / 2 * 8] = last[i];
}

}  // namespace
}  // namespace triad::cuda
