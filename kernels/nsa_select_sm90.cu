// NSA's selection on Hopper for bf16: block scores by wgmma, then the top n, in one kernel.
// A CTA of four warps owns 16 tokens of one (sequence, group), all within one selection block, so that they choose from
// the same candidates. Each warp walks a stripe of the compressed keys, 32 keys a step:
//   1. Keys are the rows of the product, in registers: a lane loads 16-byte pieces of its four neighbouring keys
//      straight from global memory (L2), and keeps them while the heads take turns. Queries are the columns, in shared
//      memory, 16 tokens x 2 heads a product (N = 32: the full rate of wgmma, and no column is wasted for even G).
//      A lane's column is the same token for every head, so the sum over heads is an add in a register.
//   2. A lane has four neighbouring keys of a token: Eq. 9's pooling is an add of registers, and one shuffle for the
//      key that reaches over from the block before; from one warp's stripe to the next it goes by shared memory.
//   3. A warp lists four tokens together. The highest scores of 64 groups of candidates, kept while scoring, bound the
//      n-th best from below (their n-th best does); the few candidates that reach the bound are collected in one pass
//      over the scores and sorted. Where more than 64 do (ties, n beyond 32), all scores are searched by bisection.
// All of it in fp32 and in an order that does not depend on where a block lies: equal scores stay equal, and the lower
// block wins.
//
// Scores (T / l' * 4 bytes a token) lie in shared memory where a full SM leaves room for them, else in a slab of
// scratch that L2 keeps; then a bounded number of CTAs take items in turns.
//
// Floor at T = 65536, Hq 12, Hkv 2, dk 64, d 16: 1.6e9 exponentials, 0.44 ms, beside 2.1e11 FLOP, 0.25 ms; measured
// 0.88 ms (before: 1.65). Of the instructions 58% are products and exponentials, 20% pooling and keys, 17% lists; no
// unit is full (exponentials 50%, issue 55%), 16 warps an SM do not hide all latencies. At Hq 64, Hkv 4, dk 128: floors
// 2.4 ms of exponentials and as much of products, measured 5.0 (10.4). At 16 x 2048 tokens of the first: 41 us (117).
#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/bthd.cuh"
#include "kernels/nsa_select_sm90.cuh"
#include "kernels/wgmma_sm90.cuh"

namespace triad::cuda {
namespace {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kTokens = 16, kWarps = 4, kWarpTokens = kTokens / kWarps, kWarpKeys = 32;
constexpr int kListedTokens = 128;  // of an item that needs no scores
constexpr int kFound = 64;          // candidates of a token that are searched for the n-th best
constexpr int kMaxSlots = 64;
constexpr float kLog2e = 1.4426950408889634f;

struct SelectArgs {
  Bthd<int32_t> block_index;
  Bthd<const __nv_bfloat16> q, k;
  Bthd<const float> lse;  // [B,T,Hq,1]
  int tokens, keys, heads;
  unsigned groups, bgs;  // Hkv, B * Hkv
  int turns;             // products that the heads take
  int l, d, n_sel, init_blocks, local_blocks;
  int token_shift, key_shift;  // log2 of the tokens and of the keys of a block; 2, 4 or 8 keys
  float whole, over;  // weights of a key inside a block, and of a block's last key in the next block; 1 in its own
  float scale;        // of q.k, times log2(e)
  int scored_from;    // tokens before it list all their blocks
  int scored_tiles;
  int items;
  int query_bytes, row_floats;  // in shared memory; a token's scores, with padding
  float* slab;                  // [CTA][kTokens][row_floats], or nullptr: in shared memory
};

// Of two heads, [tokens 0-7, 8-15 of one, of the other][key, token]: 64 keys x 32 columns.
using Product = float[4][4];
constexpr int kTurnRows = 2 * kTokens, kTurnUnits = kTurnRows * kPanelRowBytes / 16;  // of a turn's queries in a panel

// A lane's four neighbouring keys, as they lie in memory: [key][chunk of 32 columns]. Its 16-byte piece of a chunk is
// its share of two 16-deep steps; the order of a sum's terms is free as long as the queries lie in the same one, see
// load_queries.
template <int kPanels>
struct RawKeys {
  uint4 piece[4][2 * kPanels];
  __device__ __forceinline__ void load(const __nv_bfloat16* column, int64_t stride, int key, int keys) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint4* row = reinterpret_cast<const uint4*>(column + min(key + r, keys - 1) * stride);
#pragma unroll
      for (int i = 0; i < 2 * kPanels; ++i) piece[r][i] = __ldg(row + 4 * i);
    }
  }
};
// A copy that stays where it is written.
__device__ __forceinline__ uint32_t moved(uint32_t x) {
  uint32_t y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// The same keys as the left operands of the products, one for every 16 columns: keys 0 and 1 are two rows of the first
// product, keys 2 and 3 of the second.
template <int kPanels>
struct KeyOperands {
  uint32_t a[2][4 * kPanels][4];

  __device__ __forceinline__ explicit KeyOperands(const RawKeys<kPanels>& raw) {
#pragma unroll
    for (int p = 0; p < 2; ++p)
#pragma unroll
      for (int i = 0; i < 2 * kPanels; ++i) {
        const uint4 &x = raw.piece[2 * p][i], &y = raw.piece[2 * p + 1][i];
        const uint32_t words[8] = {x.x, y.x, x.y, y.y, x.z, y.z, x.w, y.w};
#pragma unroll
        for (int w = 0; w < 8; ++w) a[p][2 * i + w / 4][w % 4] = moved(words[w]);
      }
  }
  // product[p] = keys 2p and 2p + 1 x the columns at `queries`. The two take turns: one's latency is the other's time.
  __device__ __forceinline__ void multiply(Product (&product)[2], uint32_t queries, uint32_t panel_units) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4 * kPanels; ++i)
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const uint32_t b = queries + i / 4 * panel_units + i % 4 * 2;
        if (i == 0)
          wgmma_first<0>(product[p], a[p][i], b);
        else
          wgmma_add<0>(product[p], a[p][i], b);
      }
    wgmma_commit();
    wgmma_wait<0>();
    pin(product[0]);
    pin(product[1]);
  }
};

// Where a CTA works: tokens [first, first + count) of sequence b, group g.
struct Tile {
  int b, g, first, count;
  __device__ Tile(const SelectArgs& a, unsigned item) {
    const unsigned bg = item % a.bgs, i = item / a.bgs, tiles = a.scored_tiles;
    b = static_cast<int>(bg / a.groups), g = static_cast<int>(bg % a.groups);
    first = i < tiles ? a.scored_from + static_cast<int>(tiles - 1 - i) * kTokens
                      : static_cast<int>(i - tiles) * kListedTokens;
    count = i < tiles ? min(kTokens, a.tokens - first) : min(kListedTokens, a.scored_from - first);
  }
};

// The forced blocks are [0, begin) and the `local_blocks` from `end` on; `slots` of [begin, end) are to be chosen,
// fewer than there are.
struct Candidates {
  int begin, end, slots;
  __device__ Candidates(const SelectArgs& a, int t)
      : begin(a.init_blocks),
        end((t >> a.token_shift) - a.local_blocks + 1),
        slots(a.n_sel - a.init_blocks - a.local_blocks) {}
};

// The queries of the tile as the columns of the products: row h * 16 + t of a 128-byte-swizzled panel. The four words
// of a lane's piece of keys are multiplied as words (q, q + 4) of one 16-deep step and (q, q + 4) of the next. A thread
// moves one 16-byte piece of a token for every head and panel.
template <int kPanels>
__device__ __forceinline__ void load_queries(const SelectArgs& a, const Tile& tile, unsigned char* queries,
                                             float* lse) {
  constexpr int kBatch = kPanels == 2 ? 8 : 6;  // loads on their way at a time
  static_assert(kBatch % kPanels == 0);
  const int rows = a.turns * kTurnRows, t = threadIdx.x / 8, piece = threadIdx.x % 8, chunk = piece / 4 * 4;
  const __nv_bfloat16* from = a.q.row(tile.b, tile.first + t, tile.g * a.heads) + piece * 8;
  unsigned char* to = queries + piece % 4 * 4;
  const int place[4] = {swizzled(t, chunk), swizzled(t, chunk + 1), swizzled(t, chunk + 2), swizzled(t, chunk + 3)};
  for (int i = threadIdx.x; i < rows; i += kWarpgroup) {
    const int token = i % kTokens, h = i / kTokens;
    const bool exists = token < tile.count && h < a.heads;
    const float x = exists ? *a.lse.row(tile.b, tile.first + token, tile.g * a.heads + h) : -INFINITY;
    lse[i] = x == -INFINITY ? INFINITY : x * kLog2e;
  }
#pragma unroll 1
  for (int h0 = 0; h0 < 2 * a.turns; h0 += kBatch / kPanels) {
    uint4 x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      x[i] = make_uint4(0, 0, 0, 0);
      if (t < tile.count && h0 + i / kPanels < a.heads)
        x[i] = __ldg(reinterpret_cast<const uint4*>(from + i / kPanels * a.q.stride_h + i % kPanels * kPanel));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (h0 + i / kPanels >= 2 * a.turns) break;
      unsigned char* row = to + i % kPanels * rows * kPanelRowBytes + i / kPanels * kTokens * kPanelRowBytes;
      *reinterpret_cast<uint32_t*>(row + place[0]) = x[i].x;
      *reinterpret_cast<uint32_t*>(row + place[1]) = x[i].y;
      *reinterpret_cast<uint32_t*>(row + place[2]) = x[i].z;
      *reinterpret_cast<uint32_t*>(row + place[3]) = x[i].w;
    }
    from += kBatch / kPanels * a.q.stride_h;
    to += kBatch / kPanels * kTokens * kPanelRowBytes;
  }
}

// Adds the probabilities, 2^(product * scale - lse), of two heads to a lane's sums: [key pair][token half][key, token].
__device__ __forceinline__ void add_probabilities(float (&sum)[2][2][4], const Product (&product)[2], const float2* lse,
                                                  float scale) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 shift = lse[4 * j];
#pragma unroll
    for (int p = 0; p < 2; ++p)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sum[p][j % 2][e] += exp2_approx(fmaf(product[p][j][e], scale, e % 2 ? -shift.y : -shift.x));
  }
}

// What a lane knows of its four tokens, 2 q + {0, 1, 8, 9} with q = lane % 4.
struct LaneTokens {
  float best[2][4] = {};  // highest scores among this lane's candidates, of every other step
  float last[4] = {};     // of a warp's last key, for the block that follows (lanes 28 .. 31)
};

// The scores that a warp's 32 keys give, from the sums of a lane's keys 4r .. 4r + 3, r = lane / 4: [key pair][token].
template <int kSize>
__device__ __forceinline__ void store_scores(const SelectArgs& a, const Candidates& c, const float (&sum)[2][2][4],
                                             int first_key, LaneTokens& mine, float* lane_scores) {
  const int lane = threadIdx.x % 32, r = lane / 4;
  const int block = first_key / kSize + (kSize == 2 ? 2 * r : kSize == 4 ? r : r / 2);
  const auto is_candidate = [&](int j) {
    return static_cast<unsigned>(j - c.begin) < static_cast<unsigned>(c.end - c.begin);
  };
  const bool counts = is_candidate(block) && (kSize != 8 || r % 2 == 0), next_counts = is_candidate(block + 1);
  float* to = lane_scores + block;
#pragma unroll
  for (int i = 0; i < 4; ++i, to += i == 2 ? 7 * a.row_floats : a.row_floats) {
    const int j = i / 2, e = i % 2;
    const float s0 = sum[0][j][e], s1 = sum[0][j][e + 2], s2 = sum[1][j][e], s3 = sum[1][j][e + 2];
    const float last = a.over * s3;
    const float before = __shfl_sync(kFullWarp, lane < 28 ? last : mine.last[i], (lane + 28) % 32);
    mine.last[i] = last;
    float score, best = 0.0f;
    if constexpr (kSize == 4) {
      to[0] = score = fmaxf(fmaf(a.whole, s0 + s1 + s2, s3) + before, 0.0f);
    } else if constexpr (kSize == 2) {
      to[0] = score = fmaxf(fmaf(a.whole, s0, s1) + before, 0.0f);
      const float next = fmaxf(fmaf(a.whole, s2, s3) + a.over * s1, 0.0f);
      to[1] = next;
      if (next_counts) best = next;
    } else {
      const float half = fmaf(a.whole, s0 + s1 + s2, (r % 2 ? 1.0f : a.whole) * s3);
      score = fmaxf(half + __shfl_down_sync(kFullWarp, half, 4) + before, 0.0f);
      if (r % 2 == 0) to[0] = score;
    }
    if (counts) best = fmaxf(best, score);
    const float highest = fmaxf(mine.best[0][i], best);
    mine.best[0][i] = mine.best[1][i];
    mine.best[1][i] = highest;
  }
}

// What the scoring of a tile leaves in shared memory beside the scores.
struct Bounds {
  float best[kTokens][2 * 32];  // of a token: the highest scores of 64 groups of its candidates
  float last[kWarps][kTokens];  // what each warp's last key gives to the next warp's first block
};

// Each warp walks a stripe of `steps` times 32 keys; every step takes turns with two heads after the other.
template <int kPanels>
__device__ __forceinline__ void score_tile(const SelectArgs& a, const Tile& tile, const Candidates& c,
                                           const unsigned char* queries, const float* lse, float* scores,
                                           Bounds& bounds, int steps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t columns = tile_descriptor(shared_address(queries)), panel_units = a.turns * kTurnUnits;
  const __nv_bfloat16* k = a.k.row(tile.b, 0, tile.g) + lane % 4 * 8;
  const float2* lane_lse = reinterpret_cast<const float2*>(lse) + lane % 4;
  float* lane_scores = scores + lane % 4 * 2 * a.row_floats;
  int key0 = warp * steps * kWarpKeys;
  LaneTokens mine;
  RawKeys<kPanels> raw;
  raw.load(k, a.k.stride_t, key0 + lane / 4 * 4, a.keys);
#pragma unroll 1
  for (int step = 0; step < steps; ++step, key0 += kWarpKeys) {
    const KeyOperands<kPanels> keys(raw);
    float sum[2][2][4] = {};
    Product product[2];
    uint32_t b = columns;
    const float2* shift = lane_lse;
#pragma unroll 1
    for (int turn = 0; turn < a.turns - 1; ++turn, b += kTurnUnits, shift += kTurnRows / 2) {
      keys.multiply(product, b, panel_units);
      add_probabilities(sum, product, shift, a.scale);
    }
    keys.multiply(product, b, panel_units);
    raw.load(k, a.k.stride_t, key0 + kWarpKeys + lane / 4 * 4, a.keys);  // on its way under what is left of the step
    add_probabilities(sum, product, shift, a.scale);

    if ((key0 + kWarpKeys - 1) * a.d + a.l > tile.first + 1) {  // not all tokens see all keys
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int key = key0 + lane / 4 * 4 + i / 8 * 2 + i % 4 / 2, token = lane % 4 * 2 + i % 2 + i / 4 % 2 * 8;
        if (key * a.d + a.l > tile.first + token + 1) sum[i / 8][i / 4 % 2][i % 4] = 0.0f;
      }
    }
    if (a.key_shift == 2)
      store_scores<4>(a, c, sum, key0, mine, lane_scores);
    else if (a.key_shift == 1)
      store_scores<2>(a, c, sum, key0, mine, lane_scores);
    else
      store_scores<8>(a, c, sum, key0, mine, lane_scores);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = lane % 4 * 2 + i % 2 + i / 2 * 8;
    bounds.best[token][warp * 8 + lane / 4] = mine.best[1][i];  // of the last step, the only one of short tiles
    bounds.best[token][32 + warp * 8 + lane / 4] = mine.best[0][i];
    if (lane >= 28) bounds.last[warp][token] = mine.last[i];
  }
}

// The values to take of a token: those above `threshold`, and the first `equals` of those at it. Scores are >= 0, so
// that their bits order like integers.
struct Cut {
  int threshold, equals;
};

// One step of sorting 32 values, a value a lane: lanes i and i ^ distance exchange, the higher to the lower lane or
// (lanes with `up`) to the upper one. The tokens take their steps together, which hides their latency.
__device__ __forceinline__ void exchange(int (&value)[kWarpTokens], int distance, bool up) {
  const bool keep_high = ((threadIdx.x & distance) == 0) != up;
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t) {
    const int other = __shfl_xor_sync(kFullWarp, value[t], distance);
    value[t] = keep_high ? max(value[t], other) : min(value[t], other);
  }
}
// Descending (Batcher's bitonic sort).
__device__ __forceinline__ void sort_down(int (&value)[kWarpTokens]) {
#pragma unroll
  for (int size = 2; size <= 32; size *= 2)
#pragma unroll
    for (int distance = size / 2; distance > 0; distance /= 2)
      exchange(value, distance, size < 32 && (threadIdx.x & size) != 0);
}

// The n-th best of a token's values, two a lane (or one, where the second ones are not in use), for n <= 64 (32).
__device__ __forceinline__ void find_nth(int (&nth)[kWarpTokens], int n, const int (&value)[2][kWarpTokens], bool two) {
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t) nth[t] = value[0][t];
  sort_down(nth);
  if (two) {  // the upper or the lower half of both together, from two sorted halves, is one step; then sort that
    int second[kWarpTokens];
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) second[t] = value[1][t];
    sort_down(second);
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
      const int other = __shfl_xor_sync(kFullWarp, second[t], 31);
      nth[t] = n <= 32 ? max(nth[t], other) : min(nth[t], other);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) exchange(nth, distance, false);
  }
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t) nth[t] = __shfl_sync(kFullWarp, nth[t], (n - 1) % 32);
}

// Of 32 values, one a lane, writes the blocks that the cut takes. listed, equals: so far.
__device__ __forceinline__ void write_taken(int32_t* list, int slots, const Cut& cut, int value, int block, int& listed,
                                            int& equals) {
  const unsigned lower_lanes = (1u << threadIdx.x % 32) - 1;
  const unsigned equal_lanes = __ballot_sync(kFullWarp, value == cut.threshold);
  const bool take =
      value > cut.threshold || (value == cut.threshold && equals + __popc(equal_lanes & lower_lanes) < cut.equals);
  const unsigned taken = __ballot_sync(kFullWarp, take);
  const int place = listed + __popc(taken & lower_lanes);
  if (take && place < slots) list[place] = block;
  equals += __popc(equal_lanes);
  listed += __popc(taken);
}

// The n-th best of all of a row's candidates, where too many of them reach the bound: many ties, or n beyond 32.
__device__ __noinline__ void write_searched(int32_t* list, const float* row, int begin, int end, int slots, int low) {
  const auto value = [&](int j) { return __float_as_int(row[j]); };
  int high = 0x7fffffff, above = 0;
  while (high - low > 1) {
    const int bound = low + (high - low) / 2;
    int reached = 0;
#pragma unroll 4
    for (int j = begin + static_cast<int>(threadIdx.x) % 32; j < end; j += 32) reached += value(j) >= bound;
    reached = __reduce_add_sync(kFullWarp, reached);
    if (reached >= slots)
      low = bound;
    else
      high = bound, above = reached;
    if (reached == slots) break;
  }
  const Cut cut{low, slots - above};
  int listed = 0, equals = 0;
  for (int j0 = begin; j0 < end && listed < slots; j0 += 32) {
    const int j = j0 + static_cast<int>(threadIdx.x) % 32;
    write_taken(list, slots, cut, j < end ? value(j) : -1, j, listed, equals);
  }
}

// The lists of a warp's four tokens, given their rows of scores.
__device__ __forceinline__ void write_lists(const SelectArgs& a, const Tile& tile, const Candidates& c, float* scores,
                                            const Bounds& bounds, int steps, int2* found) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token0 = warp * kWarpTokens;
  float* rows = scores + token0 * a.row_floats;
  if (lane < kWarpTokens * kWarps) {  // what reaches over from one stripe to the next
    const int t = lane / kWarps, stripe = lane % kWarps, block = stripe * steps * kWarpKeys >> a.key_shift;
    if (stripe > 0 && block < c.end) rows[t * a.row_floats + block] += bounds.last[stripe - 1][token0 + t];
  }
  __syncwarp();
  int value[2][kWarpTokens], block[2][kWarpTokens], count[kWarpTokens] = {}, bound[kWarpTokens];
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) value[i][t] = __float_as_int(bounds.best[token0 + t][32 * i + lane]);
  find_nth(bound, c.slots, value, steps > 1 || c.slots > 32);

  constexpr int kBatch = 4;  // of 32 blocks, on their way at a time
  for (int j0 = c.begin; j0 < c.end; j0 += 32 * kBatch) {
    int score[kBatch][kWarpTokens];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
#pragma unroll
      for (int t = 0; t < kWarpTokens; ++t) {
        const int j = j0 + 32 * i + lane;
        score[i][t] = j < c.end ? __float_as_int(rows[t * a.row_floats + j]) : -1;
      }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (j0 + 32 * i >= c.end) break;
#pragma unroll
      for (int t = 0; t < kWarpTokens; ++t) {
        const bool reaches = score[i][t] >= bound[t];
        const unsigned lanes = __ballot_sync(kFullWarp, reaches);
        const int place = count[t] + __popc(lanes & ((1u << lane) - 1));
        if (reaches && place < kFound) found[t * kFound + place] = make_int2(score[i][t], j0 + 32 * i + lane);
        count[t] += __popc(lanes);
      }
    }
  }
  __syncwarp();
  bool two = false;
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t) {
    two = two || count[t] > 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int2 x = found[t * kFound + 32 * i + lane];
      value[i][t] = 32 * i + lane < count[t] ? x.x : -1, block[i][t] = x.y;
    }
  }
  int nth[kWarpTokens];
  find_nth(nth, c.slots, value, two);
  int32_t* list = a.block_index.row(tile.b, tile.first + token0, tile.g);
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t, list += a.block_index.stride_t) {
    if (token0 + t >= tile.count) break;
    for (int j = lane; j < c.begin; j += 32) list[j] = j;
    for (int j = lane; j < a.local_blocks; j += 32) list[c.begin + c.slots + j] = c.end + j;
    if (count[t] <= kFound) {
      const int above = __popc(__ballot_sync(kFullWarp, value[0][t] > nth[t])) +
                        (two ? __popc(__ballot_sync(kFullWarp, value[1][t] > nth[t])) : 0);
      const Cut cut{nth[t], c.slots - above};
      int listed = 0, equals = 0;
      write_taken(list + c.begin, c.slots, cut, value[0][t], block[0][t], listed, equals);
      if (two) write_taken(list + c.begin, c.slots, cut, value[1][t], block[1][t], listed, equals);
    } else {
      write_searched(list + c.begin, rows + t * a.row_floats, c.begin, c.end, c.slots, bound[t]);
    }
  }
}

// All blocks up to the token's own, for the tokens that have no more than n of them.
__device__ __forceinline__ void list_all(const SelectArgs& a, const Tile& tile) {
  const int width = a.n_sel <= 16 ? 16 : 32;  // lanes a token
  int t = tile.first + static_cast<int>(threadIdx.x) / width;
  int32_t* list = a.block_index.row(tile.b, t, tile.g);
  for (; t < tile.first + tile.count; t += kWarpgroup / width, list += kWarpgroup / width * a.block_index.stride_t)
    for (int i = threadIdx.x % width; i < a.n_sel; i += width) list[i] = i <= t >> a.token_shift ? i : -1;
}

// CTAs of an SM, which bounds the registers.
template <int kPanels>
constexpr int kResident = kPanels == 1   ? 4
                          : kPanels == 2 ? 3
                                         : 2;

// Grid: one CTA an item, the longest first; with scores in scratch, a bounded number of CTAs that take turns.
template <int kPanels>
__global__ void __launch_bounds__(kWarpgroup, kResident<kPanels>)
    select_sm90_kernel(const __grid_constant__ SelectArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  unsigned char* queries = aligned_shared();
  int2* found = reinterpret_cast<int2*>(queries) + threadIdx.x / 32 * kWarpTokens * kFound;  // once they are used
  float* lse = reinterpret_cast<float*>(queries + a.query_bytes);
  Bounds& bounds = *reinterpret_cast<Bounds*>(lse + a.turns * kTurnRows);
  float* scores = a.slab == nullptr ? reinterpret_cast<float*>(&bounds + 1)
                                    : a.slab + static_cast<int64_t>(blockIdx.x) * kTokens * a.row_floats;
  const unsigned scored_items = static_cast<unsigned>(a.scored_tiles) * a.bgs, items = a.items;
  // Turns go back and forth over the CTAs, so that each gets its share of long items.
  for (unsigned turn = 0; turn * gridDim.x < items; ++turn) {
    const unsigned item = turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (item >= items) continue;
    const Tile tile(a, item);
    if (item >= scored_items) {
      list_all(a, tile);
      continue;
    }
    const Candidates c(a, tile.first);
    const int steps = ((c.end << a.key_shift) + kWarps * kWarpKeys - 1) / (kWarps * kWarpKeys);
    load_queries<kPanels>(a, tile, queries, lse);
    fence_async_proxy();
    __syncthreads();
    score_tile<kPanels>(a, tile, c, queries, lse, scores, bounds, steps);
    __syncthreads();
    write_lists(a, tile, c, scores, bounds, steps, found);
    __syncthreads();
  }
#endif
}

// How a call is run: with scores in shared memory, one CTA an item; in scratch, `ctas` in turns.
struct Plan {
  int64_t turns;
  int64_t query_bytes, work_bytes, row_floats, ctas;
  bool in_shared;
  int64_t score_bytes() const { return 4 * kTokens * row_floats; }
};

Plan make_plan(const Context& ctx, int64_t tokens, int64_t dk, int64_t heads, const SelectOptions& o) {
  constexpr int64_t kSharedOfSm = 228 * 1024, kReserved = 1024;
  constexpr int kOfPanels[] = {0, kResident<1>, kResident<2>, kResident<3>};
  const int64_t panels = dk / kPanel, size = o.l_sel / o.d, resident = kOfPanels[panels];
  Plan p{.turns = ceil_div(heads, 2)};
  const int64_t rows = p.turns * kTurnRows;
  p.query_bytes = std::max<int64_t>(panels * rows * kPanelRowBytes, kTokens * kFound * sizeof(int2));
  p.work_bytes = p.query_bytes + 4 * rows + static_cast<int64_t>(sizeof(Bounds));
  const int64_t blocks = std::max<int64_t>(1, (tokens - 1) / o.l_sel - o.local_blocks + 1);  // of candidates
  const int64_t stored = align_up(blocks * size, kWarps * kWarpKeys) / size;
  p.row_floats = align_up(stored - 4, 16) + 4;  // 4 modulo 16: no bank conflicts
  p.in_shared = resident * (p.work_bytes + p.score_bytes() + kReserved) <= kSharedOfSm;
  p.ctas = resident * ctx.num_sms;
  return p;
}

template <int kPanels>
void run(Context& ctx, const SelectArgs& a, const Plan& p) {
  const int64_t ctas = p.in_shared ? a.items : std::min<int64_t>(a.items, p.ctas);
  launch(ctx, "nsa_select", select_sm90_kernel<kPanels>, dim3(ctas), kWarpgroup,
         p.work_bytes + (p.in_shared ? p.score_bytes() : 0), a);
}

void run_plan(Context& ctx, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
              const SelectOptions& o, const Plan& p) {
  const int64_t B = q.size(0), tokens = q.size(1), Hkv = k_cmp.size(2), dk = q.size(3), G = q.size(2) / Hkv;
  const int64_t scored_from = std::min(tokens, o.n_sel * o.l_sel),
                scored_tiles = ceil_div(tokens - scored_from, kTokens);
  const int64_t items = (scored_tiles + ceil_div(scored_from, kListedTokens)) * B * Hkv;
  Scratch::Scope scope(ctx.scratch);
  float* const slab =
      p.in_shared ? nullptr : scope.alloc(DType::f32, {std::min(items, p.ctas), kTokens * p.row_floats}).ptr<float>();
  const SelectArgs a{.block_index = bthd<int32_t>(block_index),
                     .q = bthd<__nv_bfloat16>(q),
                     .k = bthd<__nv_bfloat16>(k_cmp),
                     .lse = bthd<float>(lse_cmp.view({B, tokens, q.size(2), 1})),
                     .tokens = static_cast<int>(tokens),
                     .keys = static_cast<int>(k_cmp.size(1)),
                     .heads = static_cast<int>(G),
                     .groups = static_cast<unsigned>(Hkv),
                     .bgs = static_cast<unsigned>(B * Hkv),
                     .turns = static_cast<int>(p.turns),
                     .l = static_cast<int>(o.l),
                     .d = static_cast<int>(o.d),
                     .n_sel = static_cast<int>(o.n_sel),
                     .init_blocks = static_cast<int>(o.init_blocks),
                     .local_blocks = static_cast<int>(o.local_blocks),
                     .token_shift = std::countr_zero(static_cast<uint64_t>(o.l_sel)),
                     .key_shift = std::countr_zero(static_cast<uint64_t>(o.l_sel / o.d)),
                     .whole = o.l == o.d ? 1.0f : 2.0f,
                     .over = o.l == o.d ? 0.0f : 1.0f,
                     .scale = kLog2e / std::sqrt(static_cast<float>(dk)),
                     .scored_from = static_cast<int>(scored_from),
                     .scored_tiles = static_cast<int>(scored_tiles),
                     .items = static_cast<int>(items),
                     .query_bytes = static_cast<int>(p.query_bytes),
                     .row_floats = static_cast<int>(p.row_floats),
                     .slab = slab};
  if (dk == 64)
    run<1>(ctx, a, p);
  else if (dk == 128)
    run<2>(ctx, a, p);
  else
    run<3>(ctx, a, p);
}

}  // namespace

bool select_sm90_applies(const Context& ctx, const ConstTensor& q, const ConstTensor& k_cmp, const SelectOptions& o) {
  const int64_t dk = q.size(3), heads = q.size(2) / k_cmp.size(2), span = o.l / o.d, size = o.l_sel / o.d;
  return ctx.compute_capability == 90 && q.dtype == DType::bf16 && all_have_vectors(8, q, k_cmp) &&
         (dk == 64 || dk == 128 || dk == 192) && heads <= 32 && o.l == span * o.d && (span == 1 || span == 2) &&
         o.l_sel == size * o.d && (size == 2 || size == 4 || size == 8) && o.l_sel % kTokens == 0 &&
         std::has_single_bit(static_cast<uint64_t>(o.l_sel)) && o.n_sel > o.init_blocks + o.local_blocks &&
         o.n_sel - o.init_blocks - o.local_blocks <= kMaxSlots && o.n_sel < (int64_t{1} << 16) && q.size(1) > 0 &&
         q.size(1) < (int64_t{1} << 27) && o.l_sel < (int64_t{1} << 16) &&
         ceil_div(q.size(1), kTokens) * q.size(0) * k_cmp.size(2) < (int64_t{1} << 30);
}

void select_sm90(Context& ctx, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
                 const SelectOptions& o) {
  run_plan(ctx, block_index, q, k_cmp, lse_cmp, o, make_plan(ctx, q.size(1), q.size(3), q.size(2) / k_cmp.size(2), o));
}

}  // namespace triad::cuda
