// Part of the portable selection (nsa/gpu/select.cu): a warp writes one token's list, given its block scores.
#pragma once
#include <cstdint>

#include "kernels/common/warp.cuh"
#include "kernels/nsa/selection_rule.h"

namespace triad::cuda {
namespace {

// Scores are stored as [block][token], for 16 tokens, unless a caller's kStride says otherwise. kScoreStride is the
// distance between a token's scores for neighbouring blocks. It is 17, not 16, so that a warp reads one token's scores
// for 32 blocks without bank conflicts. Accesses to several tokens and several blocks have two-lane conflicts.
constexpr int kScoreStride = 17;

// How scores are mapped to integers that have their order: of(score) maps one, kHighestBit is the integers' highest
// bit. A NaN is mapped to the integer of the lowest score, or below it. Scores that are sums of probabilities, and so
// >= 0.
struct ProbabilityOrder {
  static constexpr int kHighestBit = 30;
  __device__ __forceinline__ static unsigned of(float score) { return score > 0.0f ? __float_as_uint(score) : 0u; }
};
// Any scores. -0 is equal to 0, and a NaN to -inf.
struct SignedOrder {
  static constexpr int kHighestBit = 31;
  __device__ __forceinline__ static unsigned of(float score) {
    const unsigned bits = __float_as_uint(fmaxf(score, -INFINITY) + 0.0f);  // fmaxf() drops a NaN; -0 + 0 is 0
    return bits >> 31 != 0 ? ~bits : bits | 1u << 31;
  }
};

// Returns block j's score, mapped by Order, or 0 if j is after the last candidate.
template <class Order, int kStride>
__device__ __forceinline__ unsigned order_at(const float* scores, const SelectionRule<int>& rule, int j) {
  return j < rule.candidate_end ? Order::of(scores[j * kStride]) : 0;
}

// Returns this lane's highest candidate score, mapped by Order, or 0 if the lane has none. Lane i has every 32nd
// candidate, beginning with number i.
template <class Order, int kStride>
__device__ __forceinline__ unsigned highest_of_lane(const float* scores, const SelectionRule<int>& rule) {
  unsigned highest = 0;
#pragma unroll 4
  for (int j = rule.init_end + static_cast<int>(threadIdx.x % 32); j < rule.candidate_end; j += 32)
    highest = max(highest, Order::of(scores[j * kStride]));
  return highest;
}

// A block with its score, mapped by Order.
struct Candidate {
  unsigned score;
  int block;
};
constexpr int kCandidates = 64;  // the most that write_best() collects: two per lane
// The most slots for which write_best() is tried. If scores were independent, some 43 candidates would be collected for
// 24 slots, but more than kCandidates for 29.
constexpr int kMostCollectedSlots = 24;

// One warp writes the rule.slots best candidates (1 to kMostCollectedSlots) to `list`, in ascending block order. First
// the warp finds a bound: the rule.slots-th largest of the lanes' highest scores, rounded down. At least rule.slots
// candidates score the bound or more. The warp copies all such candidates to `collected`, and then removes those with
// the lowest scores until rule.slots candidates are left. If there are more than kCandidates such candidates, the
// function writes nothing and returns false.
//   scores      the token's score for each block, spaced by kStride floats
//   highest     highest_of_lane()'s result in this lane
//   collected   this warp's shared memory for kCandidates candidates
template <class Order, int kStride>
__device__ __forceinline__ bool write_best(int32_t* list, const float* scores, const SelectionRule<int>& rule,
                                           int first_block, unsigned highest, Candidate* collected) {
  constexpr unsigned kNone = ~0u;  // above all scores
  const int lane = threadIdx.x % 32;
  const unsigned lower_lanes = (1u << lane) - 1;
  unsigned bound = 0;
  constexpr int kBits = 18;  // bits that tell scores apart here: the exponent's 8, and 9 or 10 of the fraction
#pragma unroll
  for (int bit = Order::kHighestBit; bit > Order::kHighestBit - kBits; --bit) {
    const unsigned higher = bound | 1u << bit;
    if (__popc(__ballot_sync(kFullWarp, highest >= higher)) >= rule.slots) bound = higher;
  }

  __syncwarp();  // a lane may still read the candidates for the warp's previous token
  int count = 0;
#pragma unroll 2
  for (int j0 = rule.init_end; j0 < rule.candidate_end; j0 += 32) {
    const int j = j0 + lane;
    const unsigned score = order_at<Order, kStride>(scores, rule, j);
    const bool take = j < rule.candidate_end && score >= bound;
    const unsigned taken = __ballot_sync(kFullWarp, take);
    const int at = count + __popc(taken & lower_lanes);
    if (take && at < kCandidates) collected[at] = {score, j};
    count += __popc(taken);
  }
  if (count > kCandidates) return false;
  __syncwarp();

  Candidate mine[2];  // ascending by block: all lanes' mine[0], then all lanes' mine[1]
#pragma unroll
  for (int i = 0; i < 2; ++i) mine[i] = lane + 32 * i < count ? collected[lane + 32 * i] : Candidate{kNone, 0};
  unsigned lowest, equal[2];
  int above = count;  // collected candidates that are neither removed nor equal to `lowest`
  while (true) {
    lowest = __reduce_min_sync(kFullWarp, min(mine[0].score, mine[1].score));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      equal[i] = __ballot_sync(kFullWarp, mine[i].score == lowest);
      above -= __popc(equal[i]);
    }
    if (above < rule.slots) break;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (mine[i].score == lowest) mine[i].score = kNone;
  }
  // Among equal scores, the first blocks enter the list.
  int equals = rule.slots - above;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool is_equal = mine[i].score == lowest && __popc(equal[i] & lower_lanes) < equals;
    const bool take = is_equal || (mine[i].score > lowest && mine[i].score != kNone);
    const unsigned taken = __ballot_sync(kFullWarp, take);
    if (take) list[__popc(taken & lower_lanes)] = first_block + mine[i].block;
    list += __popc(taken);
    equals -= __popc(equal[i]);
  }
  return true;
}

// A Cut says which candidates a list contains: all candidates whose score is above `threshold`, and the first `equals`
// candidates whose score equals `threshold`. The threshold is mapped by Order, as scores are.
struct Cut {
  unsigned threshold;
  int equals;
};

// One warp returns one token's Cut: by bisection, the largest threshold that at least rule.slots (>= 1) candidates
// reach. A candidate reaches a value if its score is at least that value. Before and after each loop turn,
//   low     is a value that at least rule.slots candidates reach,
//   high    is a value that fewer than rule.slots candidates reach,
//   above   is the number of candidates that reach `high`.
// The loop ends early if exactly rule.slots candidates reach `low`. The argument `highest` is highest_of_lane()'s
// result in this lane.
template <class Order, int kStride>
__device__ Cut find_cut(const float* scores, const SelectionRule<int>& rule, unsigned highest) {
  const int lane = threadIdx.x % 32;
  unsigned high = __reduce_max_sync(kFullWarp, highest) + 1;
  // The lowest of the lanes' highest scores is a `low` that at least 32 candidates reach, one in each lane. With fewer
  // than 32 candidates it is 0, which all candidates reach.
  unsigned low = rule.slots <= 32 ? __reduce_min_sync(kFullWarp, highest) : 0;
  int above = 0;
  while (high - low > 1) {
    const unsigned bound = low + (high - low) / 2;
    int count = 0;
#pragma unroll 4
    for (int j = rule.init_end + lane; j < rule.candidate_end; j += 32)
      count += Order::of(scores[j * kStride]) >= bound;
    count = __reduce_add_sync(kFullWarp, count);
    if (count >= rule.slots)
      low = bound;
    else
      high = bound, above = count;
    if (count == rule.slots) break;
  }
  return {low, rule.slots - above};
}

// One warp writes the candidates within the cut to `list`, in ascending block order.
template <class Order, int kStride>
__device__ void write_within_cut(int32_t* list, const float* scores, const SelectionRule<int>& rule, int first_block,
                                 const Cut& cut) {
  const int lane = threadIdx.x % 32;
  const unsigned lower_lanes = (1u << lane) - 1;
  int listed = 0;  // entries so far
  int equals = 0;  // those whose score equals the threshold
  for (int j0 = rule.init_end; j0 < rule.candidate_end && listed < rule.slots; j0 += 32) {
    const int j = j0 + lane;
    const bool exists = j < rule.candidate_end;
    const unsigned score = order_at<Order, kStride>(scores, rule, j);
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

// One warp writes the rule.slots (>= 1) best of the candidates, which are more, to `list`, in ascending block order.
template <class Order, int kStride>
__device__ void write_slots(int32_t* list, const float* scores, const SelectionRule<int>& rule, int first_block,
                            Candidate* collected) {
  const unsigned highest = highest_of_lane<Order, kStride>(scores, rule);
  if (rule.slots > kMostCollectedSlots ||
      !write_best<Order, kStride>(list, scores, rule, first_block, highest, collected))
    write_within_cut<Order, kStride>(list, scores, rule, first_block, find_cut<Order, kStride>(scores, rule, highest));
}

// One warp writes one token's list with n entries: in ascending order, the forced blocks' and the best candidates' ids,
// and then -1. The document's block j has the id first_block + j. choose(to) writes the ids of the rule.slots best
// candidates to `to`, where there are more.
template <class Choose>
__device__ void write_list_by(int32_t* list, int n, const SelectionRule<int>& rule, int first_block, Choose&& choose) {
  const int lane = threadIdx.x % 32;
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
    choose(list + listed);
    listed += rule.slots;
  }
  write_all(rule.local_begin, rule.current + 1);
  for (int i = listed + lane; i < n; i += 32) list[i] = -1;
}

// The same by the scores of all blocks.
//   scores      the token's score for each block, spaced by kStride floats
//   collected   this warp's shared memory for kCandidates candidates
template <class Order, int kStride = kScoreStride>
__device__ void write_list(int32_t* list, int n, const float* scores, const SelectionRule<int>& rule, int first_block,
                           Candidate* collected) {
  write_list_by(list, n, rule, first_block,
                [&](int32_t* to) { write_slots<Order, kStride>(to, scores, rule, first_block, collected); });
}

}  // namespace
}  // namespace triad::cuda
