// The student's lse of a taught index on Hopper (nsa/index.h).
//
// Dense attention: a sweep over the keys (index_sweep.cuh). A lane keeps a running maximum and sum over its products of
// each of its two rows, in powers of 2, and the four lanes of a row merge theirs at the end.
//
// Listed blocks: the tokens that list a block share its keys (build_inverse_index). A CTA keeps the keys of one block;
// a warpgroup multiplies 64 of the tokens at a time, whose queries it loads to registers, and stores the lse over this
// block at the block's place in the token's list. A second kernel adds the n numbers of a row, in the order of its
// list.
//
// Bound: dense: exponentials, T^2 / 2 * Hkv a sequence. Listed: the latency of gathered rows; 12 bytes of queries a
// (row, block) pair and FLOP, of which tensor cores do 2 * 128.
#include "kernels/nsa/sm90/launch_index.h"

#include "kernels/nsa/gpu/index.cuh"
#include "kernels/nsa/sm90/index_sweep.cuh"

namespace triad::cuda {
namespace {

// ---- dense attention ----

struct DenseLseArgs {
  SweepArgs sweep;
  View<float> lse;   // row t is that of token t
  float scale_log2;  // log2(e) / sqrt(di)
};

// A lane's maximum and sum over its keys of one row, in powers of 2, without the scale.
struct RunningSum {
  float most = -INFINITY, sum = 0.0f;
  __device__ __forceinline__ void merge(float other_most, float other_sum, float scale) {
    const float higher = fmaxf(most, other_most);
    if (higher == -INFINITY) return;
    sum = sum * exp2_approx((most - higher) * scale) + other_sum * exp2_approx((other_most - higher) * scale);
    most = higher;
  }
  // Merges the four lanes of a row.
  __device__ __forceinline__ void merge_lanes(float scale) {
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      const float other = __shfl_xor_sync(kFullWarp, most, lanes), other_sum = __shfl_xor_sync(kFullWarp, sum, lanes);
      merge(other, other_sum, scale);
    }
  }
};

template <int kPanels>
__global__ void __launch_bounds__(kSweepThreads, 1) index_dense_lse_kernel(const __grid_constant__ DenseLseArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = *reinterpret_cast<SweepShared<kPanels>*>(aligned_shared());
  const SweepTile tile(a.sweep);
  begin_sweep(shared, a.sweep, tile);
  const auto set_keys = [&](Segment& segment) { segment.key0 = segment.begin, segment.key_end = segment.last + 1; };
  const int warpgroup = threadIdx.x / kWarpgroup;
  SweepRing<kPanels> ring{shared};
  if (warpgroup == 2) {
    produce_sweep(ring, a.sweep, tile, set_keys);
  } else {
    increase_registers<kSweepConsumerRegisters>();
    const int row0 = static_cast<int>(threadIdx.x) / 32 * 16 + fragment_row();  // this lane has row0 and row0 + 8
    RunningSum sums[2];
    int token[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) token[i] = tile.first + a.sweep.groups.quotient(row0 + 8 * i);
    tile.for_segments(a.sweep, set_keys, [&](const Segment& segment) {
      int seen[2];  // the row's keys end here, counted from the segment's first
#pragma unroll
      for (int i = 0; i < 2; ++i)
        seen[i] = token[i] >= segment.first && token[i] <= segment.last ? token[i] + 1 - segment.key0 : 0;
      sweep_segment(
          ring, warpgroup, segment,
          [&](float(&s)[16][4], int i, bool) {  // no row sees a tile that does not exist
            const int key0 = i * kSweepKeys + fragment_column();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              if (i * kSweepKeys + kSweepKeys > seen[half]) {
#pragma unroll
                for (int j = 0; j < 16; ++j)
#pragma unroll
                  for (int e = 0; e < 2; ++e)
                    if (key0 + 8 * j + e >= seen[half]) s[j][2 * half + e] = -INFINITY;
              }
              float most = sums[half].most;
#pragma unroll
              for (int j = 0; j < 16; ++j) most = fmaxf(most, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
              if (most == -INFINITY) continue;
              const float shift = most * a.scale_log2;
              float sum = sums[half].sum * exp2_approx(fmaf(sums[half].most, a.scale_log2, -shift));
#pragma unroll
              for (int j = 0; j < 16; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) sum += exp2_approx(fmaf(s[j][2 * half + e], a.scale_log2, -shift));
              sums[half].most = most, sums[half].sum = sum;
            }
          },
          [] {});
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i].merge_lanes(a.scale_log2);
      const int r = row0 + 8 * i, in_tile = token[i] - tile.first;
      if (threadIdx.x % 4 == 0 && in_tile < a.sweep.tile_tokens && token[i] < tile.end)
        *a.lse.at(tile.b, token[i], r - in_tile * a.sweep.groups.value()) =
            sums[i].sum > 0.0f ? (sums[i].most * a.scale_log2 + log2_approx(sums[i].sum)) / kLog2e : -INFINITY;
    }
  }
#endif
}

// ---- listed blocks ----

constexpr int kLseTokens = 64, kLseThreads = 2 * kWarpgroup;  // tokens of a warpgroup; threads of a CTA
constexpr int kMostPieceTokens = 512;

struct ListedLseArgs {
  View<const bf16> q, k;
  BlockLists lists;
  KeyRange range;
  KeyWorkList list;
  int sequences_and_groups, groups, first_token;
  float scale_log2;
  float* partial;  // [B*Hkv, tokens that have lists, n]: the lse over one block of the list, in powers of 2
};

template <int kPanels>
__global__ void __launch_bounds__(kLseThreads) index_listed_lse_kernel(const __grid_constant__ ListedLseArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  unsigned char* const keys = aligned_shared();  // [kPanels][128 keys]
  const int bg = blockIdx.y, b = bg / a.groups, g = bg % a.groups, lane = threadIdx.x % 32;
  const KeyWork work = a.list.work[static_cast<int64_t>(blockIdx.x) * a.sequences_and_groups + bg];
  if (work.count <= 0) return;
  const int2 block = keys_of_block(a.list, a.range, b, work.block);
  const int rows = a.list.block_keys <= 64 ? 64 : 128;
  for (int i = threadIdx.x; i < rows * kPanels * 8; i += kLseThreads) {
    const int r = i / (kPanels * 8), chunk = i % (kPanels * 8);
    uint4 x = make_uint4(0, 0, 0, 0);
    if (block.x + r < block.y && chunk * 8 < a.k.width)
      x = *reinterpret_cast<const uint4*>(a.k.at(b, block.x + r, 0) + chunk * 8);
    *reinterpret_cast<uint4*>(keys + chunk / 8 * kSweepPanelBytes + swizzled(r, chunk % 8)) = x;
  }
  fence_async_proxy();
  __syncthreads();
  const int* const listed = a.list.tokens + bg * a.list.tokens_stride + work.first;
  const int warpgroup = threadIdx.x / kWarpgroup, row0 = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + fragment_row();
  const uint32_t k = uniform(tile_descriptor(shared_address(keys)));
  for (int first = warpgroup * kLseTokens; first < work.count; first += 2 * kLseTokens) {
    int token[2];
    const bf16* q[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = first + row0 + 8 * i;
      token[i] = at < work.count ? listed[at] : -1;
      q[i] = token[i] < 0 ? nullptr : a.q.at(b, token[i], g) + lane % 4 * 2;
    }
    uint32_t operand[4 * kPanels][4];
#pragma unroll
    for (int step = 0; step < 4 * kPanels; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        operand[step][i] = q[i % 2] == nullptr || 16 * step >= a.q.width
                               ? 0u
                               : __ldg(reinterpret_cast<const uint32_t*>(q[i % 2] + 16 * step + i / 2 * 8));
    RunningSum sums[2];
#pragma unroll 1
    for (int key0 = 0; key0 < rows; key0 += 64) {
      float s[8][4];
      leave_unset(s);
      const uint32_t at = k + static_cast<uint32_t>(key0 * kPanelRowBytes >> 4);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4 * kPanels; ++step)
        wgmma<Major::k>(s, operand[step], at + step / 4 * (kSweepPanelBytes >> 4) + step % 4 * 2, step > 0);
      wgmma_commit();
      wgmma_wait<0>();
      pin(s);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int seen = min(block.y, token[i] + 1) - block.x - key0 - fragment_column();
        float most = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * j + e >= seen) s[j][2 * i + e] = -INFINITY;
            most = fmaxf(most, s[j][2 * i + e]);
          }
        if (most == -INFINITY) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) sum += exp2_approx((s[j][2 * i + e] - most) * a.scale_log2);
        sums[i].merge(most, sum, a.scale_log2);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i].merge_lanes(a.scale_log2);
      if (token[i] < 0) continue;
      // The four lanes of a row search the block's place in its list.
      const int* const blocks = a.lists.at(b, token[i], g);
      float* const to =
          a.partial +
          (static_cast<int64_t>(bg) * (a.lists.tokens - a.first_token) + token[i] - a.first_token) * a.lists.n;
      for (int place = lane % 4; place < a.lists.n; place += 4)
        if (blocks[place] == work.block) to[place] = sums[i].most * a.scale_log2 + log2_approx(sums[i].sum);
    }
  }
#endif
}

// Adds the blocks of one row.
__global__ void __launch_bounds__(256)
    index_add_lse_kernel(const __grid_constant__ ListedLseArgs a, const View<float> lse) {
  const int queries = a.lists.tokens - a.first_token;
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= int64_t{queries} * a.sequences_and_groups) return;
  const int bg = static_cast<int>(i / queries), b = bg / a.groups, g = bg % a.groups;
  const int t = a.first_token + static_cast<int>(i % queries);
  const DocumentRow<int> row = a.range.documents.row(b);
  const int* const blocks = a.lists.at(b, t, g);
  const float* const from = a.partial + i * a.lists.n;
  float most = -INFINITY, sum = 0.0f;
  for (int place = 0; place < a.lists.n; ++place) {
    // As in the inverse index: a list ends at -1, or at a block that begins after the token.
    if (blocks[place] < row.first_block(t) || row.block_begin(blocks[place], a.list.block_keys) > t) continue;
    const float x = from[place], higher = fmaxf(most, x);
    sum = sum * exp2_approx(most - higher) + exp2_approx(x - higher);
    most = higher;
  }
  *lse.at(b, t, g) = sum > 0.0f ? (most + log2_approx(sum)) / kLog2e : -INFINITY;
}

}  // namespace

bool index_forward_sm90_supports(const IndexForward& index, const ConstTensor& block_index, int64_t l_sel) {
  return sweep_supports(index.in.q, index.in.k) && (block_index.empty() || l_sel == 64 || l_sel == 128);
}

void index_forward_sm90(Context& ctx, const IndexForward& index, const AttendIn& in, const ConstTensor& block_index,
                        int64_t l_sel) {
  const char* const op = "nsa_index_forward";
  const bool wide = index.in.q.size(3) > kPanel;
  const View<const bf16> q = make_query_view<const bf16>(in, index.in.q);
  const View<float> lse = make_query_view<float>(in, index.lse);
  const float scale_log2 = kLog2e / std::sqrt(static_cast<float>(index.in.q.size(3)));
  if (block_index.empty()) {
    const DenseLseArgs a{make_sweep(ctx, q, index.in.q, index.in.k, first_token(in), in.documents), lse, scale_log2};
    const auto run = [&]<int kPanels>() {
      launch(ctx, op, index_dense_lse_kernel<kPanels>, sweep_grid(a.sweep), dim3(kSweepThreads),
             sizeof(SweepShared<kPanels>), a);
    };
    return wide ? run.operator()<2>() : run.operator()<1>();
  }
  Scratch::Scope scope(ctx.scratch);
  const SelectedKeys keys = make_selected_keys(op, in, block_index, l_sel);
  const int64_t bgs = in.k.size(0) * in.k.size(2);
  const ListedLseArgs a{q,
                        make_view<const bf16>(index.in.k),
                        keys.lists,
                        keys.range,
                        build_inverse_index(ctx, scope, op, in, keys, {8, 8, kMostPieceTokens}, /*has_partial=*/false),
                        static_cast<int>(bgs),
                        static_cast<int>(in.k.size(2)),
                        static_cast<int>(first_token(in)),
                        scale_log2,
                        scope.alloc(DType::f32, {bgs, in.q.size(1), keys.lists.n}).ptr<float>()};
  const auto run = [&]<int kPanels>() {
    launch(ctx, op, index_listed_lse_kernel<kPanels>, dim3(a.list.pieces, static_cast<unsigned>(bgs)),
           dim3(kLseThreads), kPanels * kSweepPanelBytes, a);
  };
  wide ? run.operator()<2>() : run.operator()<1>();
  launch(ctx, op, index_add_lse_kernel, dim3(static_cast<unsigned>(ceil_div(bgs * in.q.size(1), 256))), dim3(256), 0, a,
         lse);
}

}  // namespace triad::cuda
