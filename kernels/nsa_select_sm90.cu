// NSA's selection on Hopper for bf16: block scores by wgmma, then the top n, in one kernel.
// A CTA owns 16 tokens of one (sequence, group), all within one selection block, so that they choose from the same
// candidates. A warpgroup takes 128 compressed keys at a time:
//   1. Keys are the rows of the product, in registers: a lane loads 16-byte pieces of its four neighbouring keys
//      straight from global memory (L2), and keeps them while the heads take turns. Queries are the columns, in shared
//      memory, 16 tokens x 2 heads a product (N = 32: the full rate of wgmma, and no column is wasted for even G).
//      A lane's column is the same token for every head, so the sum over heads is an add in a register.
//   2. A lane has four neighbouring keys of a token: Eq. 9's pooling is an add of registers, and one shuffle for the
//      key that reaches over from the block before. The first block of a warp's 32 keys gets its share from `carry`.
//   3. One warp a token: the 64 maxima of 64 interleaved groups of candidates bound the n-th best score from below;
//      the few candidates above that bound are listed, and bisection among those alone finds the n-th best.
// All of it in fp32 and in an order that does not depend on where a block lies: equal scores stay equal, and the lower
// block wins.
//
// Floor at T = 65536, Hq 12, Hkv 2, dk 64, d 16: 1.6e9 exponentials, 0.39 ms, beside 2.1e11 FLOP, 0.25 ms. The
// scheduler issues about four instructions for the eight cycles that an exponential of a warp takes.
#include <algorithm>
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
  int tokens, keys, groups, heads;
  int turns;          // products that the heads take
  int l, d, l_sel, n_sel, init_blocks, local_blocks;
  int size;           // keys a block: 2, 4 or 8
  float whole, over;  // weights of a key inside a block, and of a block's last key in the next block; 1 in its own
  float scale;        // of q.k, times log2(e)
  int scored_from;    // tokens before it list all their blocks
  int scored_tiles;
  int bgs;            // B * Hkv
  int64_t items;
  int query_bytes, row_floats;  // in shared memory; a token's scores, with padding
  float* slab;                  // [CTA][kTokens][row_floats], or nullptr: in shared memory
};

// Two of a lane's keys, [row][chunk of 32 columns]: its 16-byte piece of a chunk is its share of two 16-deep steps. The
// order of a sum's terms is free as long as the queries lie in the same one, see load_queries.
template <int kPanels>
struct RawKeys {
  uint4 piece[2][2 * kPanels];
  __device__ __forceinline__ void load(const __nv_bfloat16* column, int64_t stride, int key, int keys) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
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
// The same two keys as the left operand of the products, one for every 16 columns.
template <int kPanels>
struct KeyOperand {
  uint32_t a[4 * kPanels][4];

  __device__ __forceinline__ explicit KeyOperand(const RawKeys<kPanels>& raw) {
#pragma unroll
    for (int i = 0; i < 2 * kPanels; ++i) {
      const uint4 &x = raw.piece[0][i], &y = raw.piece[1][i];
      a[2 * i][0] = moved(x.x), a[2 * i][1] = moved(y.x), a[2 * i][2] = moved(x.y), a[2 * i][3] = moved(y.y);
      a[2 * i + 1][0] = moved(x.z), a[2 * i + 1][1] = moved(y.z);
      a[2 * i + 1][2] = moved(x.w), a[2 * i + 1][3] = moved(y.w);
    }
  }
  // product = these keys x the columns at `queries`.
  template <int kN>
  __device__ __forceinline__ void multiply(float (&product)[kN][4], uint32_t queries, uint32_t panel_units) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4 * kPanels; ++i) {
      const uint32_t b = queries + i / 4 * panel_units + i % 4 * 2;
      if (i == 0)
        wgmma_first<0>(product, a[i], b);
      else
        wgmma_add<0>(product, a[i], b);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(product);
  }
};

// Where a CTA works: tokens [first, first + count) of sequence b, group g.
struct Tile {
  int64_t b;
  int g, first, count;
};

// The forced blocks are [0, begin) and [end, current]; `slots` of [begin, end) are to be chosen, fewer than there are.
struct Candidates {
  int begin, end, current, slots;
  __device__ Candidates(const SelectArgs& a, int t) {
    current = t / a.l_sel;
    begin = a.init_blocks;
    end = current - a.local_blocks + 1;
    slots = a.n_sel - begin - a.local_blocks;
  }
};

// The queries of the tile as the columns of the products: row h * 16 + t of a 128-byte-swizzled panel. The four words
// of a lane's piece of keys are multiplied as words (q, q + 4) of one 16-deep step and (q, q + 4) of the next.
template <int kPanels>
__device__ __forceinline__ void load_queries(const SelectArgs& a, const Tile& tile, int rows, unsigned char* queries,
                                             float* lse) {
  constexpr int kPieces = 8 * kPanels, kBatch = 4;  // of a row; loads on their way at a time
  for (int i = threadIdx.x; i < rows; i += kWarpgroup) {
    const int t = i % kTokens, h = i / kTokens;
    const bool exists = t < tile.count && h < a.heads;
    const float x = exists ? *a.lse.row(tile.b, tile.first + t, tile.g * a.heads + h) : -INFINITY;
    lse[i] = x == -INFINITY ? INFINITY : x * kLog2e;
  }
  for (int i0 = threadIdx.x; i0 < rows * kPieces; i0 += kBatch * kWarpgroup) {
    uint4 x[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int i = i0 + n * kWarpgroup, row = i / kPieces, t = row % kTokens, h = row / kTokens;
      x[n] = make_uint4(0, 0, 0, 0);
      if (t < tile.count && h < a.heads)
        x[n] = __ldg(reinterpret_cast<const uint4*>(a.q.row(tile.b, tile.first + t, tile.g * a.heads + h)) + i % kPieces);
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int i = i0 + n * kWarpgroup, row = i / kPieces, piece = i % kPieces, chunk = piece % 8 / 4 * 4;
      if (row >= rows) break;
      unsigned char* to = queries + piece / 8 * rows * kPanelRowBytes + piece % 4 * 4;
      *reinterpret_cast<uint32_t*>(to + swizzled(row, chunk)) = x[n].x;
      *reinterpret_cast<uint32_t*>(to + swizzled(row, chunk + 1)) = x[n].y;
      *reinterpret_cast<uint32_t*>(to + swizzled(row, chunk + 2)) = x[n].z;
      *reinterpret_cast<uint32_t*>(to + swizzled(row, chunk + 3)) = x[n].w;
    }
  }
}

// Adds a product's probabilities, 2^(product * scale - lse), to a lane's sums: [tokens 0-7, 8-15][key, token].
template <int kN>
__device__ __forceinline__ void add_probabilities(float (&sum)[2][4], const float (&product)[kN][4],
                                                  const float2* lse, float scale) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const float2 shift = lse[4 * j];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      sum[j % 2][e] += exp2_approx(fmaf(product[j][e], scale, e % 2 ? -shift.y : -shift.x));
  }
}

// What a lane knows of its four tokens, 2 q + {0, 1, 8, 9} with q = lane % 4.
struct LaneTokens {
  float best[2][4] = {};  // highest scores among this lane's candidates of even and of odd steps
  float last[4] = {};     // of a warp's last key, for the block that follows (lanes 28 .. 31)
};

// The scores that a warp's 32 keys give, from the sums of a lane's keys 4r .. 4r + 3, r = lane / 4: [key pair][token].
template <int kSize>
__device__ __forceinline__ void store_scores(const SelectArgs& a, const Candidates& c, const float (&sum)[2][2][4],
                                             int first_key, int parity, LaneTokens& mine, float* lane_scores) {
  const int lane = threadIdx.x % 32, r = lane / 4;
  const int block = first_key / kSize + (kSize == 2 ? 2 * r : kSize == 4 ? r : r / 2);
  const auto is_candidate = [&](int j) { return static_cast<unsigned>(j - c.begin) < static_cast<unsigned>(c.end - c.begin); };
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
    mine.best[0][i] = fmaxf(mine.best[0][i], parity ? 0.0f : best);
    mine.best[1][i] = fmaxf(mine.best[1][i], parity ? best : 0.0f);
  }
}

// What the scoring of a tile leaves in shared memory beside the scores.
struct Bounds {
  float best[kTokens][2 * 32];   // of a token: the highest scores of 64 groups of its candidates
  float last[kWarps][kTokens];   // what each warp's last key gives to the next warp's first block
};

// Each warp walks a stripe of `steps` times 32 keys.
template <int kPanels, int kHeads>
__device__ __forceinline__ void score_tile(const SelectArgs& a, const Tile& tile, const Candidates& c,
                                           const unsigned char* queries, const float* lse, float* scores,
                                           Bounds& bounds, int steps) {
  constexpr int kRows = kHeads * kTokens, kUnits = kRows * kPanelRowBytes / 16;  // of a turn's columns
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t columns = tile_descriptor(shared_address(queries)), panel_units = a.turns * kUnits;
  const __nv_bfloat16* k = a.k.row(tile.b, 0, tile.g) + lane % 4 * 8;
  const int64_t stride = a.k.stride_t;
  const float2* lane_lse = reinterpret_cast<const float2*>(lse) + lane % 4;
  float* lane_scores = scores + lane % 4 * 2 * a.row_floats;
  int key0 = warp * steps * kWarpKeys, lane_key = key0 + lane / 4 * 4;
  LaneTokens mine;
  RawKeys<kPanels> raw;
  raw.load(k, stride, lane_key, a.keys);
#pragma unroll 1
  for (int step = 0; step < steps; ++step, key0 += kWarpKeys) {
    float sum[2][2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyOperand<kPanels> keys(raw);
      lane_key += half == 0 ? 2 : kWarpKeys - 2;
      raw.load(k, stride, lane_key, a.keys);  // the next two keys, on their way while these are at work
      uint32_t b = columns;
      const float2* shift = lane_lse;
#pragma unroll 1
      for (int turn = 0; turn < a.turns; ++turn, b += kUnits, shift += kRows / 2) {
        float product[2 * kHeads][4];
        keys.multiply(product, b, panel_units);
        add_probabilities(sum[half], product, shift, a.scale);
      }
    }
    if ((key0 + kWarpKeys - 1) * a.d + a.l > tile.first + 1) {  // not all tokens see all keys
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int key = key0 + lane / 4 * 4 + i / 8 * 2 + i % 4 / 2, token = lane % 4 * 2 + i % 2 + i / 4 % 2 * 8;
        if (key * a.d + a.l > tile.first + token + 1) sum[i / 8][i / 4 % 2][i % 4] = 0.0f;
      }
    }
    if (a.size == 4)
      store_scores<4>(a, c, sum, key0, step % 2, mine, lane_scores);
    else if (a.size == 2)
      store_scores<2>(a, c, sum, key0, step % 2, mine, lane_scores);
    else
      store_scores<8>(a, c, sum, key0, step % 2, mine, lane_scores);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = lane % 4 * 2 + i % 2 + i / 2 * 8;
    bounds.best[token][warp * 8 + lane / 4] = mine.best[0][i];
    bounds.best[token][32 + warp * 8 + lane / 4] = mine.best[1][i];
    if (lane >= 28) bounds.last[warp][token] = mine.last[i];
  }
}

// The values to take of a token: those above `threshold`, and the first `equals` of those at it. Scores are >= 0, so
// that their bits order like integers.
struct Cut {
  int threshold, equals;
};

// For each of a warp's tokens the largest threshold that at least `slots` of 64 values reach, two a lane, by bisection;
// it ends early where exactly `slots` do. The tokens take their steps together, which hides their latency.
__device__ __forceinline__ void find_cuts(Cut (&cut)[kWarpTokens], int slots, const int (&value)[kWarpTokens][2]) {
  constexpr int kFirstGuess = 3 << 23;  // below the highest: an eighth of it
  int low[kWarpTokens], high[kWarpTokens], above[kWarpTokens];
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t) {
    low[t] = above[t] = 0;
    high[t] = __reduce_max_sync(kFullWarp, max(value[t][0], value[t][1])) + 1;
  }
  for (bool first = true, open = true; open; first = false) {
    open = false;
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
      if (high[t] - low[t] <= 1) continue;
      const int bound = first ? max(high[t] - kFirstGuess, low[t] + 1) : low[t] + (high[t] - low[t]) / 2;
      const int reached = __popc(__ballot_sync(kFullWarp, value[t][0] >= bound)) +
                          __popc(__ballot_sync(kFullWarp, value[t][1] >= bound));
      if (reached >= slots) low[t] = bound;
      if (reached < slots) high[t] = bound, above[t] = reached;
      if (reached == slots) high[t] = bound + 1, above[t] = 0;
      open = open || high[t] - low[t] > 1;
    }
  }
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t) cut[t] = {low[t], slots - above[t]};
}

// Writes the blocks of those of `count` values that the cut takes. value(i), block(i): the i-th, in ascending order.
template <class Value, class Block>
__device__ __forceinline__ void write_taken(int32_t* list, int slots, const Cut& cut, int count, Value&& value,
                                            Block&& block) {
  const int lane = threadIdx.x % 32;
  const unsigned lower_lanes = (1u << lane) - 1;
  int listed = 0, equals = 0;
  for (int i0 = 0; i0 < count && listed < slots; i0 += 32) {
    const int i = i0 + lane, v = i < count ? value(i) : -1;
    const bool equal = v == cut.threshold;
    const unsigned equal_lanes = __ballot_sync(kFullWarp, equal);
    const bool take = v > cut.threshold || (equal && equals + __popc(equal_lanes & lower_lanes) < cut.equals);
    equals += __popc(equal_lanes);
    const unsigned taken = __ballot_sync(kFullWarp, take);
    const int place = listed + __popc(taken & lower_lanes);
    if (take && place < slots) list[place] = block(i);
    listed += __popc(taken);
  }
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
  write_taken(list, slots, {low, slots - above}, end - begin, [&](int i) { return value(begin + i); },
              [&](int i) { return begin + i; });
}

// The lists of a warp's four tokens, given their rows of scores.
__device__ __forceinline__ void write_lists(const SelectArgs& a, const Tile& tile, const Candidates& c, float* scores,
                                            const Bounds& bounds, int steps, int2* found) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token0 = warp * kWarpTokens;
  float* rows = scores + token0 * a.row_floats;
  if (lane < kWarpTokens * kWarps) {  // what reaches over from one stripe to the next
    const int t = lane / kWarps, stripe = lane % kWarps, block = stripe * steps * kWarpKeys / a.size;
    if (stripe > 0 && block < c.end) rows[t * a.row_floats + block] += bounds.last[stripe - 1][token0 + t];
  }
  __syncwarp();
  int value[kWarpTokens][2];
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) value[t][i] = __float_as_int(bounds.best[token0 + t][32 * i + lane]);
  Cut cut[kWarpTokens];
  find_cuts(cut, c.slots, value);

  int count[kWarpTokens] = {};
#pragma unroll 4
  for (int j0 = c.begin; j0 < c.end; j0 += 32) {
    const int j = j0 + lane;
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
      const int v = j < c.end ? __float_as_int(rows[t * a.row_floats + j]) : -1;
      const bool reaches = v >= cut[t].threshold;
      const unsigned lanes = __ballot_sync(kFullWarp, reaches);
      const int place = count[t] + __popc(lanes & ((1u << lane) - 1));
      if (reaches && place < kFound) found[t * kFound + place] = make_int2(v, j);
      count[t] += __popc(lanes);
    }
  }
  __syncwarp();
  const int bound[kWarpTokens] = {cut[0].threshold, cut[1].threshold, cut[2].threshold, cut[3].threshold};
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) value[t][i] = lane + 32 * i < count[t] ? found[t * kFound + lane + 32 * i].x : -1;
  find_cuts(cut, c.slots, value);
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t) {
    if (token0 + t >= tile.count) break;
    int32_t* list = a.block_index.row(tile.b, tile.first + token0 + t, tile.g);
    for (int j = lane; j < c.begin; j += 32) list[j] = j;
    for (int j = lane; j < a.local_blocks; j += 32) list[c.begin + c.slots + j] = c.end + j;
    const int2* mine = found + t * kFound;
    if (count[t] <= kFound)
      write_taken(list + c.begin, c.slots, cut[t], count[t], [&](int i) { return mine[i].x; },
                  [&](int i) { return mine[i].y; });
    else
      write_searched(list + c.begin, rows + t * a.row_floats, c.begin, c.end, c.slots, bound[t]);
  }
}

// All blocks up to the token's own, for the tokens that have no more than n of them.
__device__ void list_all(const SelectArgs& a, const Tile& tile) {
  const int lane = threadIdx.x % 32;
  for (int t = tile.first + static_cast<int>(threadIdx.x) / 32; t < tile.first + tile.count; t += kWarps) {
    int32_t* list = a.block_index.row(tile.b, t, tile.g);
    const int current = t / a.l_sel;
    for (int i = lane; i < a.n_sel; i += 32) list[i] = i <= current ? i : -1;
  }
}

// Grid: one CTA an item, the longest first; with scores in scratch, a bounded number of CTAs that take turns.
template <int kPanels, int kHeads>
__global__ void __launch_bounds__(kWarpgroup, kPanels == 1 ? 4 : kPanels == 2 ? 3 : 2)
    select_sm90_kernel(const __grid_constant__ SelectArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const int rows = a.turns * kHeads * kTokens;
  unsigned char* queries = aligned_shared();
  int2* found = reinterpret_cast<int2*>(queries) + threadIdx.x / 32 * kWarpTokens * kFound;  // once they are used
  float* lse = reinterpret_cast<float*>(queries + a.query_bytes);
  Bounds& bounds = *reinterpret_cast<Bounds*>(lse + rows);
  float* scores = a.slab == nullptr ? reinterpret_cast<float*>(&bounds + 1)
                                    : a.slab + static_cast<int64_t>(blockIdx.x) * kTokens * a.row_floats;
  const int64_t scored_items = static_cast<int64_t>(a.scored_tiles) * a.bgs;

  // Turns go back and forth over the CTAs, so that each gets its share of long items.
  for (int64_t turn = 0; turn * gridDim.x < a.items; ++turn) {
    const int64_t item = turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (item >= a.items) continue;
    const int bg = static_cast<int>(item % a.bgs);
    Tile tile{bg / a.groups, bg % a.groups, 0, 0};
    if (item >= scored_items) {
      tile.first = static_cast<int>((item - scored_items) / a.bgs) * kListedTokens;
      tile.count = min(kListedTokens, a.scored_from - tile.first);
      list_all(a, tile);
      continue;
    }
    tile.first = a.scored_from + (a.scored_tiles - 1 - static_cast<int>(item / a.bgs)) * kTokens;
    tile.count = min(kTokens, a.tokens - tile.first);
    const Candidates c(a, tile.first);
    const int steps = (c.end * a.size + kWarps * kWarpKeys - 1) / (kWarps * kWarpKeys);
    load_queries<kPanels>(a, tile, rows, queries, lse);
    fence_async_proxy();
    __syncthreads();
    score_tile<kPanels, kHeads>(a, tile, c, queries, lse, scores, bounds, steps);
    __syncthreads();
    write_lists(a, tile, c, scores, bounds, steps, found);
    __syncthreads();
  }
#endif
}

// How a call is run: with scores in shared memory, one CTA an item; in scratch (L2 keeps them), this many CTAs in turns.
struct Plan {
  int64_t heads, turns;  // of a product; products
  int64_t query_bytes, work_bytes, row_floats, slab_ctas;
  bool in_shared;
  int64_t score_bytes() const { return 4 * kTokens * row_floats; }
};

Plan make_plan(const Context& ctx, int64_t tokens, int64_t dk, int64_t heads, const SelectOptions& o) {
  constexpr int64_t kSharedOfSm = 228 * 1024, kReserved = 1024;
  const int64_t panels = dk / kPanel, size = o.l_sel / o.d, resident = panels == 1 ? 4 : panels == 2 ? 3 : 2;
  Plan p{.heads = heads % 4 == 0 ? 4 : 2};
  p.turns = ceil_div(heads, p.heads);
  const int64_t rows = p.turns * p.heads * kTokens;
  p.query_bytes = std::max<int64_t>(panels * rows * kPanelRowBytes, kTokens * kFound * sizeof(int2));
  p.work_bytes = p.query_bytes + 4 * rows + static_cast<int64_t>(sizeof(Bounds));
  const int64_t blocks = std::max<int64_t>(1, (tokens - 1) / o.l_sel - o.local_blocks + 1);  // of candidates
  const int64_t stored = align_up(blocks * size, kWarps * kWarpKeys) / size;
  p.row_floats = align_up(stored - 4, 16) + 4;  // 4 modulo 16: no bank conflicts
  p.in_shared = resident * (p.work_bytes + p.score_bytes() + kReserved) <= kSharedOfSm;
  p.slab_ctas = resident * ctx.num_sms;
  return p;
}

template <int kPanels, int kHeads>
void run(Context& ctx, const SelectArgs& a, const Plan& p) {
  const int64_t ctas = p.in_shared ? a.items : std::min(a.items, p.slab_ctas);
  launch(ctx, "nsa_select", select_sm90_kernel<kPanels, kHeads>, dim3(ctas), kWarpgroup,
         p.work_bytes + (p.in_shared ? p.score_bytes() : 0), a);
}

void run_plan(Context& ctx, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
              const SelectOptions& o, const Plan& p) {
  const int64_t B = q.size(0), tokens = q.size(1), Hkv = k_cmp.size(2), dk = q.size(3), G = q.size(2) / Hkv;
  const int64_t scored_from = std::min(tokens, o.n_sel * o.l_sel), scored_tiles = ceil_div(tokens - scored_from, kTokens);
  const int64_t items = (scored_tiles + ceil_div(scored_from, kListedTokens)) * B * Hkv;
  Scratch::Scope scope(ctx.scratch);
  float* const slab =
      p.in_shared ? nullptr : scope.alloc(DType::f32, {std::min(items, p.slab_ctas), kTokens * p.row_floats}).ptr<float>();
  const SelectArgs a{.block_index = bthd<int32_t>(block_index),
                     .q = bthd<__nv_bfloat16>(q),
                     .k = bthd<__nv_bfloat16>(k_cmp),
                     .lse = bthd<float>(lse_cmp.view({B, tokens, q.size(2), 1})),
                     .tokens = static_cast<int>(tokens),
                     .keys = static_cast<int>(k_cmp.size(1)),
                     .groups = static_cast<int>(Hkv),
                     .heads = static_cast<int>(G),
                     .turns = static_cast<int>(p.turns),
                     .l = static_cast<int>(o.l),
                     .d = static_cast<int>(o.d),
                     .l_sel = static_cast<int>(o.l_sel),
                     .n_sel = static_cast<int>(o.n_sel),
                     .init_blocks = static_cast<int>(o.init_blocks),
                     .local_blocks = static_cast<int>(o.local_blocks),
                     .size = static_cast<int>(o.l_sel / o.d),
                     .whole = o.l == o.d ? 1.0f : 2.0f,
                     .over = o.l == o.d ? 0.0f : 1.0f,
                     .scale = kLog2e / std::sqrt(static_cast<float>(dk)),
                     .scored_from = static_cast<int>(scored_from),
                     .scored_tiles = static_cast<int>(scored_tiles),
                     .bgs = static_cast<int>(B * Hkv),
                     .items = items,
                     .query_bytes = static_cast<int>(p.query_bytes),
                     .row_floats = static_cast<int>(p.row_floats),
                     .slab = slab};
  const auto run_panels = [&]<int kPanels>() {
    if (p.heads == 4)
      run<kPanels, 4>(ctx, a, p);
    else
      run<kPanels, 2>(ctx, a, p);
  };
  if (dk == 64)
    run_panels.operator()<1>();
  else if (dk == 128)
    run_panels.operator()<2>();
  else
    run_panels.operator()<3>();
}

}  // namespace

bool select_sm90_applies(const Context& ctx, const ConstTensor& q, const ConstTensor& k_cmp, const SelectOptions& o) {
  const int64_t dk = q.size(3), heads = q.size(2) / k_cmp.size(2), span = o.l / o.d, size = o.l_sel / o.d;
  return ctx.compute_capability == 90 && q.dtype == DType::bf16 && all_have_vectors(8, q, k_cmp) &&
         (dk == 64 || dk == 128 || dk == 192) && heads <= 32 && o.l == span * o.d && (span == 1 || span == 2) &&
         o.l_sel == size * o.d && (size == 2 || size == 4 || size == 8) && o.l_sel % kTokens == 0 &&
         o.n_sel > o.init_blocks + o.local_blocks && o.n_sel - o.init_blocks - o.local_blocks <= kMaxSlots &&
         q.size(1) > 0 && q.size(1) < (int64_t{1} << 27) && o.l_sel < (int64_t{1} << 16);
}

void select_sm90(Context& ctx, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
                 const SelectOptions& o) {
  run_plan(ctx, block_index, q, k_cmp, lse_cmp, o, make_plan(ctx, q.size(1), q.size(3), q.size(2) / k_cmp.size(2), o));
}

}  // namespace triad::cuda
