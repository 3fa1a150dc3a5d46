// Part of the portable selection (nsa/gpu/select.cu): a warp writes the list of one token, given the scores of its
// blocks.
#pragma once
#include <cstdint>

#include "kernels/common/warp.cuh"
#include "kernels/nsa/selection_rule.h"

namespace triad::cuda {
namespace {

// Scores are stored as [block][token], for 16 tokens. kScoreStride is the distance between the scores of a token for
// neighbouring blocks. It is 17, not 16, so that accesses along both axes are free of bank conflicts.
constexpr int kScoreStride = 17;

// Maps a score, which is >= 0, to an integer, so that scores and integers have the same order. NaN is mapped to 0.
__device__ __forceinline__ unsigned order_of(float score) { return score > 0.0f ? __float_as_uint(score) : 0u; }

// A Cut says which candidates a list contains: all whose score is above `threshold`, and the first `equals` of those
// whose score equals `threshold`. threshold is a result of order_of().
struct Cut {
  unsigned threshold;
  int equals;
};

// One warp returns the Cut of one token. By bisection it finds the largest threshold that at least rule.slots (>= 1)
// candidates reach. In every turn of the loop at least rule.slots candidates reach `low`, and fewer reach `high`:
// `above` is their number. The search ends early if exactly rule.slots candidates reach `low`.
__device__ Cut find_cut(const float* scores, const SelectionRule<int>& rule) {
  const int lane = threadIdx.x % 32;
  unsigned lane_top = 0;
#pragma unroll 4
  for (int j = rule.init_end + lane; j < rule.candidate_end; j += 32)
    lane_top = max(lane_top, order_of(scores[j * kScoreStride]));
  unsigned high = __reduce_max_sync(kFullWarp, lane_top) + 1;
  // The lowest of the lanes' highest scores is a `low` that at least 32 candidates reach, one of each lane. With fewer
  // than 32 candidates it is 0, which all candidates reach.
  unsigned low = rule.slots <= 32 ? __reduce_min_sync(kFullWarp, lane_top) : 0;
  int above = 0;
  while (high - low > 1) {
    const unsigned bound = low + (high - low) / 2;
    int count = 0;
#pragma unroll 4
    for (int j = rule.init_end + lane; j < rule.candidate_end; j += 32)
      count += order_of(scores[j * kScoreStride]) >= bound;
    count = __reduce_add_sync(kFullWarp, count);
    if (count >= rule.slots)
      low = bound;
    else
      high = bound, above = count;
    if (count == rule.slots) break;
  }
  return {low, rule.slots - above};
}

// One warp writes the list of one token: the ids of the forced blocks and of the candidates with the best scores in
// ascending order, then -1 in the entries that are left. Block j of the token's document has the id first_block + j.
__device__ void write_list(int32_t* list, int n, const float* scores, const SelectionRule<int>& rule, int first_block) {
  const int lane = threadIdx.x % 32;
  const unsigned lower_lanes = (1u << lane) - 1;
  int listed = 0;  // entries written so far
  const auto write_all = [&](int begin, int end) {
    const int count = max(0, min(end - begin, n - listed));
    for (int i = lane; i < count; i += 32) list[listed + i] = first_block + begin + i;
    listed += count;
  };
  write_all(0, rule.init_end);
  if (rule.lists_all()) {
    write_all(rule.init_end, rule.candidate_end);
  } else if (rule.slots > 0) {
    const Cut cut = find_cut(scores, rule);
    const int end = listed + rule.slots;
    int equals = 0;  // entries so far whose score equals the threshold
    for (int j0 = rule.init_end; j0 < rule.candidate_end && listed < end; j0 += 32) {
      const int j = j0 + lane;
      const bool exists = j < rule.candidate_end;
      const unsigned score = exists ? order_of(scores[j * kScoreStride]) : 0;
      const bool equal = exists && score == cut.threshold;
      bool take = exists && score > cut.threshold;
      if (!__any_sync(kFullWarp, take || equal)) continue;
      const unsigned equal_lanes = __ballot_sync(kFullWarp, equal);
      take = take || (equal && equals + __popc(equal_lanes & lower_lanes) < cut.equals);
      equals += __popc(equal_lanes);
      const unsigned taken = __ballot_sync(kFullWarp, take);
      if (take) list[listed + __popc(taken & lower_lanes)] = first_block + j;
      listed += __popc(taken);
    }
  }
  write_all(rule.local_begin, rule.current + 1);
  for (int i = listed + lane; i < n; i += 32) list[i] = -1;
}

}  // namespace
}  // namespace triad::cuda
