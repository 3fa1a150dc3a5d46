// The selection by a taught index on Hopper (nsa/select_index.h): a sweep over the keys (index_sweep.cuh) whose visits
// take block maxima, and lists of the best n blocks, in one kernel. No score is stored.
//
// A lane has 32 products of each of its two rows per tile. Their maximum takes one instruction each and, across the
// four lanes of a row, two shuffles. Two of the four lanes then append the block to their row's candidates in shared
// memory, if its maximum beats the row's n-th best so far. That bound is refreshed when a row's candidates are about to
// fill: the warp finds each row's n-th best by bisection and keeps n candidates, in the order of their blocks. So a
// list costs a few refreshes however many blocks there are, and the loop has no branches that depend on a single row.
//
// Bound: tensor cores, T^2 / 2 * Hkv * di * 2 FLOP per sequence; the maxima take half as many issue slots as the
// products take time, and run beside the other warpgroup's.
#include "kernels/nsa/sm90/launch_index.h"

#include "kernels/nsa/gpu/select_best.cuh"
#include "kernels/nsa/sm90/index_sweep.cuh"

namespace triad::cuda {
namespace {

constexpr int kListCandidates = 64;               // a row's candidates, at most
constexpr int kMostSlots = 32;                    // the best candidates, which a refresh keeps
constexpr int kRefreshAt = kListCandidates - 4;   // a row gets at most 4 candidates between refreshes
constexpr int kListStride = kListCandidates + 1;  // candidates from row to row, against bank conflicts

struct SelectIndexArgs {
  SweepArgs sweep;
  View<int32_t> block_index;  // row t is that of token t
  int n_sel, init_blocks, local_blocks;
  int every;  // row t of q and block_index is that of token every * t (nsa/gpu/share_lists.h)
};

template <int kPanels>
struct SelectIndexShared {
  SweepShared<kPanels> sweep;
  int2 candidates[kSweepRows][kListStride];  // {bits of the maximum, block}, ascending by block
};

// The candidates of a warp's 16 rows. Each lane has the state of one row, lane / 4 + 8 (lane % 2), so that two lanes
// have the same one; the lower of them writes.
struct RowLists {
  int2 (*candidates)[kListStride];  // those of the warp's first row
  int slots;
  int count = 0, end = INT_MIN;  // candidates so far; the row's blocks from `end` on are none
  float bound = NAN;             // a candidate's maximum is above it; a NaN: every block is a candidate

  __device__ __forceinline__ static int row_of_lane() { return fragment_row() + threadIdx.x % 2 * 8; }
  __device__ __forceinline__ void append(float most, int block) {
    const bool takes = !(most <= bound) && block < end;
    if (takes && threadIdx.x % 4 < 2) candidates[row_of_lane()][count] = make_int2(__float_as_int(most), block);
    count += takes;
  }
  // Keeps the best `slots` candidates of every row that has more, and sets its bound. All lanes of the warp call it.
  __device__ __forceinline__ void refresh() {
    const int lane = threadIdx.x % 32;
    const unsigned before = (1u << lane) - 1;
    __syncwarp();
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
      const int n = __shfl_sync(kFullWarp, count, r % 8 * 4 + r / 8);
      if (n <= slots) continue;
      int2 mine[2];
      unsigned order[2], low = ~0u, high = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool exists = lane + 32 * i < n;
        mine[i] = exists ? candidates[r][lane + 32 * i] : make_int2(0, 0);
        order[i] = exists ? SignedOrder::of(__int_as_float(mine[i].x)) : 0;  // 0 is below every score
        if (exists) low = min(low, order[i]), high = max(high, order[i]);
      }
      // At least `slots` candidates reach `low`, fewer reach `high`, namely `above`.
      low = __reduce_min_sync(kFullWarp, low), high = __reduce_max_sync(kFullWarp, high) + 1;
      int above = 0;
      while (high - low > 1) {
        const unsigned middle = low + (high - low) / 2;
        const int reach =
            __popc(__ballot_sync(kFullWarp, order[0] >= middle)) + __popc(__ballot_sync(kFullWarp, order[1] >= middle));
        if (reach >= slots)
          low = middle;
        else
          high = middle, above = reach;
        if (reach == slots) break;
      }
      int equals = slots - above, kept = 0;  // the first candidates between low and high are kept
      float least = INFINITY;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned between = __ballot_sync(kFullWarp, order[i] >= low && order[i] < high);
        const bool keeps =
            order[i] >= high || (order[i] >= low && order[i] < high && __popc(between & before) < equals);
        const unsigned keeping = __ballot_sync(kFullWarp, keeps);
        if (keeps) {
          candidates[r][kept + __popc(keeping & before)] = mine[i];
          least = fminf(least, __int_as_float(mine[i].x));
        }
        kept += __popc(keeping), equals -= __popc(between);
      }
      least = -warp_max(-least);
      if (row_of_lane() == r) count = slots, bound = least;
      __syncwarp();
    }
    __syncwarp();
  }
};

// Appends a tile's blocks. kBlock: tokens of a block.
template <int kBlock>
__device__ __forceinline__ void append_tile(RowLists& lists, const float (&s)[16][4], int block) {
  constexpr int kBlocks = kSweepKeys / kBlock, kColumns = kBlock / 8;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = i * kColumns; j < (i + 1) * kColumns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) most[e / 2] = fmaxf(most[e / 2], s[j][e]);
    const bool second = threadIdx.x % 2 != 0;  // keeps the second row, and gives the first one away
    float x = fmaxf(second ? most[1] : most[0], __shfl_xor_sync(kFullWarp, second ? most[0] : most[1], 1));
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
    lists.append(x, block + i);
  }
}

template <int kPanels, int kBlock>
__global__ void __launch_bounds__(kSweepThreads, 1)
    select_index_sm90_kernel(const __grid_constant__ SelectIndexArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = *reinterpret_cast<SelectIndexShared<kPanels>*>(aligned_shared());
  const SweepTile tile(a.sweep);
  begin_sweep(shared.sweep, a.sweep, tile);
  const auto rule_at = [&](int position) {
    return SelectionRule<int>(position * a.every, kBlock, a.n_sel, a.init_blocks, a.local_blocks);
  };
  // The candidates of a segment's last token include those of the others.
  const auto set_keys = [&](Segment& segment) {
    const SelectionRule<int> rule = rule_at(segment.last - segment.begin);
    segment.key0 = segment.begin + rule.init_end * kBlock;
    segment.key_end = rule.lists_all() || rule.slots == 0 ? segment.key0 : segment.begin + rule.candidate_end * kBlock;
  };
  const int warpgroup = threadIdx.x / kWarpgroup, lane = threadIdx.x % 32;
  SweepRing<kPanels> ring{shared.sweep};
  if (warpgroup == 2) {
    produce_sweep(ring, a.sweep, tile, set_keys);
  } else {
    increase_registers<kSweepConsumerRegisters>();
    const int row0 = static_cast<int>(threadIdx.x) / 32 * 16;
    RowLists lists{.candidates = shared.candidates + row0, .slots = a.n_sel - a.init_blocks - a.local_blocks};
    const int my_token = tile.first + a.sweep.groups.quotient(row0 + RowLists::row_of_lane());
    tile.for_segments(a.sweep, set_keys, [&](const Segment& segment) {
      const bool has_row = my_token >= segment.first && my_token <= segment.last;
      lists.end = has_row ? rule_at(my_token - segment.begin).candidate_end : INT_MIN;
      const int block0 = (segment.key0 - segment.begin) / kBlock;
      sweep_segment(
          ring, warpgroup, segment,
          [&](const float(&s)[16][4], int i, bool) {  // the blocks of a tile that does not exist are no candidates
            append_tile<kBlock>(lists, s, block0 + i * (kSweepKeys / kBlock));
          },
          [&] {
            if (__any_sync(kFullWarp, lists.count > kRefreshAt)) lists.refresh();
          });
    });
    lists.refresh();
    const DocumentRow<int> row = a.sweep.documents.row(tile.b);
    for (int r = 0; r < 16; ++r) {
      const int token = a.sweep.groups.quotient(row0 + r), g = row0 + r - token * a.sweep.groups.value();
      const int t = tile.first + token;
      if (token >= a.sweep.tile_tokens || t >= tile.end) break;
      const SelectionRule<int> rule = rule_at(t - row.begin(t));
      const bool all = rule.lists_all();
      const int first_block = row.first_block(t), chosen = all ? rule.candidates() : rule.slots;
      const int listed = rule.init_end + chosen + rule.current + 1 - rule.local_begin;
      int32_t* const list = a.block_index.at(tile.b, t, g);
      for (int i = lane; i < a.n_sel; i += 32) {
        int block = -1;
        if (i < rule.init_end)
          block = i;
        else if (i < rule.init_end + chosen)
          block = all ? i : lists.candidates[r][i - rule.init_end].y;
        else if (i < listed)
          block = rule.local_begin + i - rule.init_end - chosen;
        list[i] = block < 0 ? -1 : first_block + block;
      }
    }
  }
#endif
}

}  // namespace

bool select_index_sm90_supports(const ConstTensor& iq, const ConstTensor& ik, const SelectOptions& o) {
  return sweep_supports(iq, ik) && (o.l_sel == 64 || o.l_sel == 128) &&
         o.n_sel - o.init_blocks - o.local_blocks <= kMostSlots && o.n_sel < (1 << 20);
}

void select_index_sm90(Context& ctx, Tensor block_index, ConstTensor iq, ConstTensor ik, const SelectOptions& o,
                       const Documents& documents) {
  const int64_t first = documents.part.first_query;
  View<const bf16> q = make_view<const bf16>(iq);
  q.data -= first * q.row;
  View<int32_t> lists = make_view<int32_t>(block_index);
  lists.data -= first * lists.row;
  const SelectIndexArgs a{make_sweep(ctx, q, iq, ik, first, documents),
                          lists,
                          static_cast<int>(o.n_sel),
                          static_cast<int>(o.init_blocks),
                          static_cast<int>(o.local_blocks),
                          static_cast<int>(o.every)};
  const auto run = [&]<int kPanels, int kBlock>() {
    launch(ctx, "nsa_select_index", select_index_sm90_kernel<kPanels, kBlock>, sweep_grid(a.sweep), dim3(kSweepThreads),
           sizeof(SelectIndexShared<kPanels>), a);
  };
  const bool wide = iq.size(3) > kPanel;
  if (o.l_sel == 64)
    wide ? run.operator()<2, 64>() : run.operator()<1, 64>();
  else
    wide ? run.operator()<2, 128>() : run.operator()<1, 128>();
}

}  // namespace triad::cuda
