// Selects the n best in each score row, by one warp (nsa/sm90/select.cu): collects the candidates that reach a lower
// bound on the n-th best score, finds the n-th best among them, and writes the blocks that reach it. The warp processes
// all its tokens in lockstep, which hides latency.
#pragma once
#include <cstdint>

#include "kernels/common/warp.cuh"

namespace triad::cuda {
namespace {

constexpr int kFound = 64;  // the most candidates that are collected per token

// Which of a token's values are chosen: all above `threshold`, and the first `equals` that equal it. Scores are >= 0,
// so their bits compare like integers.
struct Cut {
  int threshold, equals;
};

// max and min.
struct Words {
  __device__ __forceinline__ static int larger(int a, int b) { return max(a, b); }
  __device__ __forceinline__ static int smaller(int a, int b) { return min(a, b); }
};
// max and min for both 16-bit halves in two words. The halves are compared as signed integers.
struct Halves {
  __device__ __forceinline__ static int larger(int a, int b) { return static_cast<int>(__vmaxs2(a, b)); }
  __device__ __forceinline__ static int smaller(int a, int b) { return static_cast<int>(__vmins2(a, b)); }
};

// One compare-exchange step in a bitonic sort over 32 values, one per lane. Between lanes i and i ^ distance, the lower
// one gets the larger value, or the upper one if `up`.
template <class Of = Words, int kCount>
__device__ __forceinline__ void exchange(int (&value)[kCount], int distance, bool up) {
  const bool keep_high = ((threadIdx.x & distance) == 0) != up;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int other = __shfl_xor_sync(kFullWarp, value[i], distance);
    value[i] = keep_high ? Of::larger(value[i], other) : Of::smaller(value[i], other);
  }
}
// Sorts each token's 32 values in descending order, one value per lane (Batcher's bitonic sort). With Halves, a lane
// has one value for each of two tokens in value[i].
template <class Of = Words, int kCount>
__device__ __forceinline__ void sort_down(int (&value)[kCount]) {
#pragma unroll 1
  for (int size = 2; size <= 32; size *= 2)
#pragma unroll 1
    for (int distance = size / 2; distance > 0; distance /= 2)
      exchange<Of>(value, distance, size < 32 && (threadIdx.x & size) != 0);
}

// Finds the n-th largest of each token's values, which are spread over a warp's lanes. If `two`, each lane has two
// values per token, and n <= 64; otherwise only value[0], and n <= 32.
template <int kWarpTokens>
__device__ __forceinline__ void find_nth(int (&nth)[kWarpTokens], int n, const int (&value)[2][kWarpTokens], bool two) {
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t) nth[t] = value[0][t];
  sort_down(nth);
  if (two) {  // a compare-exchange between two sorted sequences separates the upper 32 values from the lower 32; then
              // one half is sorted
    int second[kWarpTokens];
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) second[t] = value[1][t];
    sort_down(second);
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
      const int other = __shfl_xor_sync(kFullWarp, second[t], 31);
      nth[t] = n <= 32 ? max(nth[t], other) : min(nth[t], other);
    }
#pragma unroll 1
    for (int distance = 16; distance > 0; distance /= 2) exchange(nth, distance, false);
  }
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t) nth[t] = __shfl_sync(kFullWarp, nth[t], (n - 1) % 32);
}

// Finds the n-th largest of each token's values; lanes 0 to count - 1 have one each, n <= count <= 32. The smallest
// value, and all that equal it, are removed repeatedly, as long as at least n values remain. The smallest value that
// remains is the n-th. count is little more than n, so this is faster than a sort.
template <int kWarpTokens>
__device__ __forceinline__ void find_nth_of_few(int (&nth)[kWarpTokens], int n, const int (&value)[kWarpTokens],
                                                const int (&count)[kWarpTokens]) {
  constexpr int kRemoved = 0x7fffffff;
  int rest[kWarpTokens], left[kWarpTokens];
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t)
    rest[t] = static_cast<int>(threadIdx.x % 32) < count[t] ? value[t] : kRemoved, left[t] = count[t];
  bool removes;
  do {
    removes = false;
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
      nth[t] = __reduce_min_sync(kFullWarp, rest[t]);
      const int without = left[t] - __popc(__ballot_sync(kFullWarp, rest[t] == nth[t]));
      if (without < n) continue;
      if (rest[t] == nth[t]) rest[t] = kRemoved;
      left[t] = without, removes = true;
    }
  } while (removes);
}

// Writes the blocks that the cut chooses from 32 values, one per lane. listed and equals count the blocks written so
// far, and how many of them equal the threshold.
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

// Writes one token's list by bisection over all its candidates' scores. It is used if more than kFound candidates reach
// the lower bound: with many ties, or n above 32. block0: the id for the row's first score.
__device__ __noinline__ void write_searched(int32_t* list, const float* row, int begin, int end, int slots, int low,
                                            int block0) {
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
    write_taken(list, slots, cut, j < end ? value(j) : -1, block0 + j, listed, equals);
  }
}

// Collects, for a warp's tokens, the candidates that reach a lower bound on the n-th best score, in ascending block
// order. Each token's first kFound go to `found` (score, block), their number to `count`. The blocks are divided into
// 32 groups, or 64 for n above 16 in a row that is long enough; the bound is the groups' n-th best maximum. A row's
// unused scores are -1. kBatch is how many reads per row are in flight.
template <int kWarpTokens, int kBatch>
struct Collector {
  const float* rows;
  int row_floats, end;
  int2* found;  // each collected candidate's (score, block): [token][kFound]
  int bound[kWarpTokens], count[kWarpTokens];

  __device__ __forceinline__ int score(int t, int j) const {
    return j < end ? __float_as_int(rows[t * row_floats + j]) : -1;
  }
  __device__ __forceinline__ int4 scores(int t, int j) const {
    if (j >= end) return make_int4(-1, -1, -1, -1);
    return *reinterpret_cast<const int4*>(rows + t * row_floats + j);
  }
  __device__ __forceinline__ static int highest(const int4& x) { return max(max(x.x, x.y), max(x.z, x.w)); }
  // Returns the index at which this lane appends to a token's list, or kFound if it has nothing to append. `count`, the
  // list's length, grows by the number of lanes that append.
  __device__ __forceinline__ static int place(bool has, int& count) {
    const unsigned lanes = __ballot_sync(kFullWarp, has);
    const int place = count + __popc(lanes & ((1u << threadIdx.x % 32) - 1));
    count += __popc(lanes);
    return has ? place : kFound;
  }

  // Sets each token's `bound` to a lower bound on its n-th best score, n = slots: the groups' n-th largest maximum. If
  // n is at most 16, the maxima are first rounded down to half precision, and two tokens' are sorted at once. Before
  // rounding, the maxima are multiplied by kScale. So all maxima from 2^-22 to 2^8 keep half precision's 11 bits;
  // larger ones are rounded down to 255.9.
  __device__ __forceinline__ void find_bound(int slots, const int (&best)[2][kWarpTokens], bool two) {
    static_assert(kWarpTokens % 2 == 0);
    constexpr float kScale = 256.0f;
    if (slots > 16) return find_nth(bound, slots, best, two);
    const auto group = [&](int t) { return __int_as_float(max(max(best[0][t], best[1][t]), 0)) * kScale; };
    int halves[kWarpTokens / 2];
#pragma unroll
    for (int i = 0; i < kWarpTokens / 2; ++i)
      asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(halves[i]) : "f"(group(2 * i + 1)), "f"(group(2 * i)));
    sort_down<Halves>(halves);
#pragma unroll
    for (int i = 0; i < kWarpTokens / 2; ++i) {
      const int nth = __shfl_sync(kFullWarp, halves[i], slots - 1);
      float low, high;
      asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
          : "=f"(low), "=f"(high)
          : "r"(nth));
      bound[2 * i] = __float_as_int(low / kScale), bound[2 * i + 1] = __float_as_int(high / kScale);
    }
  }
  __device__ __forceinline__ void bound_short(int slots) {
    const int lane = threadIdx.x % 32;
    int best[2][kWarpTokens];
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) best[0][t] = score(t, lane), best[1][t] = score(t, 32 + lane);
#pragma unroll kBatch
    for (int j = 64; j < end; j += 64)
#pragma unroll
      for (int t = 0; t < kWarpTokens; ++t)
        best[0][t] = max(best[0][t], score(t, j + lane)), best[1][t] = max(best[1][t], score(t, j + 32 + lane));
    find_bound(slots, best, end > 32);
  }
  __device__ __forceinline__ void collect_short() {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) bound[t] = max(bound[t], 0), count[t] = 0;
#pragma unroll kBatch
    for (int j = 0; j < end; j += 32)
#pragma unroll
      for (int t = 0; t < kWarpTokens; ++t) {
        const int x = score(t, j + lane), to = place(x >= bound[t], count[t]);
        if (to < kFound) found[t * kFound + to] = make_int2(x, j + lane);
      }
  }
  __device__ __forceinline__ void bound_long(int slots) {
    const int lane = threadIdx.x % 32;
    int best[2][kWarpTokens];
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t)
      best[0][t] = highest(scores(t, 4 * lane)), best[1][t] = highest(scores(t, 128 + 4 * lane));
#pragma unroll kBatch / 2
    for (int j = 256; j < end; j += 256)
#pragma unroll
      for (int t = 0; t < kWarpTokens; ++t)
        best[0][t] = max(best[0][t], highest(scores(t, j + 4 * lane))),
        best[1][t] = max(best[1][t], highest(scores(t, j + 128 + 4 * lane)));
    find_bound(slots, best, true);
  }
  // For long rows: collects the four-block groups whose maximum reaches the bound, then the blocks within them.
  __device__ __forceinline__ void collect_long(int* groups) {
    const int lane = threadIdx.x % 32;
    int hits[kWarpTokens] = {};
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) bound[t] = max(bound[t], 0), count[t] = 0;
#pragma unroll kBatch
    for (int j = 0; j < end; j += 128)
#pragma unroll
      for (int t = 0; t < kWarpTokens; ++t) {
        const int to = place(highest(scores(t, j + 4 * lane)) >= bound[t], hits[t]);
        if (to < kFound) groups[t * kFound + to] = j + 4 * lane;
      }
    __syncwarp();
    int most = 0;
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) most = max(most, hits[t]);
#pragma unroll 1
    for (int i0 = 0; i0 < min(most, kFound); i0 += 8)
#pragma unroll
      for (int t = 0; t < kWarpTokens; ++t) {
        const int i = i0 + lane / 4, j = i < hits[t] && i < kFound ? groups[t * kFound + i] + lane % 4 : end;
        const int x = score(t, j), to = place(x >= bound[t], count[t]);
        if (to < kFound) found[t * kFound + to] = make_int2(x, j);
      }
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t)
      if (hits[t] > kFound) count[t] = kFound + 1;  // too many groups reach the bound, and not all were collected
  }
};

}  // namespace
}  // namespace triad::cuda
