// Backward of the attention branches on Hopper for bf16 heads of 128: one kernel for dq, dk and dv, five products.
//
// A CTA keeps keys of one (sequence, group) and walks the rows that see them, 64 a stage (cp.async, swizzled). Two
// warpgroups compute, for 64 keys and the 64 rows of a stage each,
//   s^T = k q^T,  dp^T = v dout^T,  dv += pg^T dout,  dk += ds^T q      (pg^T and ds^T as left operands in registers)
// with dk and dv as sums in registers, and lay ds into shared memory. The third warpgroup brings the rows and takes
//   dq = ds k
// to global memory by fp32 additions where the memory is (L2). What the two share:
//   contiguous rows (window, compressed): the rows; they have 128 keys, so that q, dout and dq move once for 128 keys;
//   listed rows (selected): the 64 keys of a block; they take turns with the stages, and add up dk and dv at the end.
// Order of the additions to dq: any. Each addend is rounded to a multiple of the row's quantum (RowRounding), which
// leaves every partial sum exact: the bits repeat.
//
// 10.5 MFLOP a stage and 128 keys: 2,570 clocks at the card's 4,080 a clock and SM, for 32 KB from L2 and 32 KB added.
#include "kernels/nsa_attend_wide_sm90.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

struct FusedArgs {
  Attend<bf16> in;
  View<const bf16> dout;
  const RowFact* facts;
  const float* rounding;  // [B*Hkv, T*G]; nullptr: addends stay as they are
  View<float> dq;
  GradView dk, dv;
  KeyRange range;
  KeyWorkList list;
  int part_tokens;  // contiguous rows: pieces are cut at multiples of it; 0: every block's rows in equal pieces
  int sequences_and_groups;
};

constexpr int kWidth = 128, kPanels = kWidth / kPanel, kStageRows = 64, kWarpRows = kStageRows / 4;
constexpr int kPanelBytes = 64 * kPanelRowBytes;  // of keys, of a stage's rows, and of ds: 64 rows each
constexpr int kThreads3 = 3 * kWarpgroup;
constexpr int kTiles = 2;  // of ds, which a warpgroup fills in turn

struct __align__(1024) RowStage {
  unsigned char q[kPanels][kPanelBytes], dout[kPanels][kPanelBytes];
};
struct __align__(1024) KeyPanels {
  unsigned char k[kPanels][kPanelBytes], v[kPanels][kPanelBytes];
};
template <bool kListed>
struct __align__(1024) Shared {
  static constexpr int kStages = kListed ? 4 : 3, kKeyTiles = kListed ? 1 : 2;
  KeyPanels keys[kKeyTiles];
  RowStage stages[kStages];
  unsigned char ds[2][kTiles][kPanelBytes];  // [row][key]
  RowFact facts[kStages][kStageRows];
  int2 range[kStages][kStageRows];    // the keys that the row sees
  int dq_at[kStages][kStageRows];     // where the row's dq lies in its sequence, in pairs of elements; -1: no row
  float rounding[kStages][kStageRows];
  int any[2][kTiles];                 // whether ds is not all zero
  uint64_t full[kStages], empty[kStages], ds_full[2][kTiles], ds_empty[2][kTiles];
  int listed[kListed ? kWorkTokens : 1];
};

// ---- barriers in shared memory ----
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// By one lane, after all lanes of the warp are done.
__device__ __forceinline__ void warp_arrive(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// d[64x64] = (kAdd: +=) a[64x16] b[16x64], both in shared memory, a read along its rows, b across (kAcross) or along.
template <int kAdd, int kAcross>
__device__ __forceinline__ void wgmma_shared(float (&d)[8][4], uint32_t a, uint32_t b) {
#define TRIAD_D4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\nmov.b64 a, {%32, %36};\nmov.b64 b, {%33, %36};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%"
      "30,%31}, a, b, p, 1, 1, 0, %35;\n}"
      : TRIAD_D4(0), TRIAD_D4(1), TRIAD_D4(2), TRIAD_D4(3), TRIAD_D4(4), TRIAD_D4(5), TRIAD_D4(6), TRIAD_D4(7)
      : "r"(a), "r"(b), "n"(kAdd), "n"(kAcross), "n"(kDescriptorHigh));
#undef TRIAD_D4
}
// Four 8x8 matrices to shared memory, transposed; lanes 8i .. 8i + 7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void store_matrices_transposed(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// The piece of this CTA. Contiguous rows without a window's limit: all blocks' pieces of one run of tokens follow each
// other, so that what is added to dq at about one time stays in L2; the last tokens, which see most, come first.
__device__ __forceinline__ KeyWork find_piece(const FusedArgs& a, int i, int bg) {
  if (a.part_tokens == 0) return find_work(a.list, a.range, a.in.tokens, i, bg, a.sequences_and_groups);
  const int parts = a.list.pieces / a.list.blocks, part = parts - 1 - i / a.list.blocks, block = i % a.list.blocks;
  const int key0 = block * a.list.block_keys, key1 = min(key0 + a.list.block_keys, a.range.keys) - 1;
  const int first = max(a.range.first_row(key0), part * a.part_tokens);
  const int end = min(a.range.end_row(key1, a.in.tokens), (part + 1) * a.part_tokens);
  return {block, first, first < end ? end - first : -1, parts > 1 ? (bg * a.list.blocks + block) * parts + part : -1};
}

template <bool kListed>
__global__ void __launch_bounds__(kThreads3, 1) fused_grad_sm90_kernel(const __grid_constant__ FusedArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the PTX for older cards holds an empty kernel, which is not chosen there
  using Shared = Shared<kListed>;
  constexpr int kStages = Shared::kStages, kAhead = kStages - 1, kStepsD = kPanel / 16;
  constexpr int kKeys = Shared::kKeyTiles * kRows;
  // Contiguous: groups of heads next to each other, then pieces. Listed: groups apart, as dq has to stay in L2.
  const int bg = blockIdx.x % a.sequences_and_groups, b = bg / a.in.groups, g = bg % a.in.groups;
  const KeyWork work = find_piece(a, blockIdx.x / a.sequences_and_groups, bg);
  const int key0 = work.block * a.list.block_keys + static_cast<int>(blockIdx.y) * kKeys;
  const int key_end = min(min((work.block + 1) * a.list.block_keys, key0 + kKeys), a.range.keys);
  if (work.count < 0 || key0 >= key_end) return;

  Shared& shared = *reinterpret_cast<Shared*>(aligned_shared());
  const int G = a.in.heads.value(), rows = work.count * G, steps = (rows + kStageRows - 1) / kStageRows;
  const int warpgroup = threadIdx.x / kWarpgroup, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) barrier_init(&shared.full[s], 4), barrier_init(&shared.empty[s], kListed ? 4 : 8);
    for (int i = 0; i < 2 * kTiles; ++i) barrier_init(shared.ds_full[0] + i, 4), barrier_init(shared.ds_empty[0] + i, 4);
  }
  if (kListed) {
    const int* tokens = a.list.tokens + bg * a.list.tokens_stride + work.first;
    for (int i = threadIdx.x; i < work.count; i += kThreads3) shared.listed[i] = tokens[i];
  }
  {
    const RowSource k_rows(a.in.k, b, g), v_rows(a.in.v, b, g);
    const int chunk = threadIdx.x % 8;
    for (int r = threadIdx.x / 8; r < kKeys; r += kThreads3 / 8) {  // keys past the end repeat the last: not stored
      const int key = min(key0 + r, key_end - 1), to = swizzled(r % kRows, chunk);
      KeyPanels& tile = shared.keys[r / kRows];
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        copy_async_16(tile.k[panel] + to, k_rows.at(key, 0) + panel * kPanel + 8 * chunk, 16);
        copy_async_16(tile.v[panel] + to, v_rows.at(key, 0) + panel * kPanel + 8 * chunk, 16);
      }
    }
  }
  copy_async_wait();
  fence_async_proxy();
  __syncthreads();

  if (warpgroup == 2) {
    // ---- brings the rows, and takes dq away ----
    give_registers<88>();
    const RowFact* const facts = a.facts + static_cast<int64_t>(bg) * a.in.tokens * G;
    const int chunk = lane % 8, warp_row = warp * kWarpRows, to_row = swizzled(warp_row + lane / 8, chunk);
    const bf16* const q_chunk = a.in.q.at(b, 0, g * G) + 8 * chunk;
    const bf16* const dout_chunk = a.dout.at(b, 0, g * G) + 8 * chunk;
    const int q_row = static_cast<int>(a.in.q.row / 8), q_head = static_cast<int>(a.in.q.head / 8);  // in 16 bytes
    const int dout_row = static_cast<int>(a.dout.row / 8), dout_head = static_cast<int>(a.dout.head / 8);
    const int dq_row = static_cast<int>(a.dq.row / 2), dq_head = static_cast<int>(a.dq.head / 2);  // in pairs
    float* const dq_first = a.dq.at(b, 0, g * G) + fragment_column();

    // A warp brings 16 rows of the stage, whose dq it takes away too: a lane finds out where one of them lies and tells
    // the eight that copy it. Rows past the end repeat the last and weigh nothing.
    const auto load = [&](int step, int stage) {
      if (step < steps) {
        const int r = warp_row + lane % kWarpRows, row = min(step * kStageRows + r, rows - 1);
        const int in_list = a.in.heads.quotient(row), t = kListed ? shared.listed[in_list] : work.first + in_list;
        const int h = row - in_list * G;
        const int q_at = t * q_row + h * q_head, dout_at = t * dout_row + h * dout_head;
        RowStage& rows_to = shared.stages[stage];
#pragma unroll
        for (int i = 0; i < kWarpRows / 4; ++i) {
          const int to = (to_row ^ (i % 2 * 4 << 4)) + i * 4 * kPanelRowBytes;
          const bf16* const q_from = q_chunk + 8 * static_cast<int64_t>(__shfl_sync(kFullWarp, q_at, 4 * i + lane / 8));
          const bf16* const dout_from =
              dout_chunk + 8 * static_cast<int64_t>(__shfl_sync(kFullWarp, dout_at, 4 * i + lane / 8));
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            copy_async_16(rows_to.q[panel] + to, q_from + panel * kPanel, 16);
            copy_async_16(rows_to.dout[panel] + to, dout_from + panel * kPanel, 16);
          }
        }
        if (lane < kWarpRows) {
          const bool exists = step * kStageRows + r < rows;
          const int64_t fact = static_cast<int64_t>(t) * G + h;
          if (exists)
            copy_async_8(&shared.facts[stage][r], facts + fact);
          else
            shared.facts[stage][r] = make_float2(INFINITY, 0.0f);
          shared.range[stage][r] = make_int2(a.range.low(t), a.range.high(t));
          shared.dq_at[stage][r] = exists ? t * dq_row + h * dq_head : -1;
          if (a.rounding != nullptr)
            copy_async_4(&shared.rounding[stage][r], a.rounding + static_cast<int64_t>(bg) * a.in.tokens * G + fact, true);
          else
            shared.rounding[stage][r] = 0.0f;
        }
      }
      copy_async_commit();
    };
    const auto announce = [&](int stage) {
      fence_async_proxy();
      warp_arrive(&shared.full[stage]);
    };
    for (int step = 0; step < kAhead; ++step) load(step, step);
    copy_async_wait_group<1>();
    for (int step = 0; step < kAhead - 1; ++step) announce(step);

    for (int step = 0, stage = 0, round = 0; step < steps; ++step) {
      // ds of this step times k; while it runs, rows are ordered for the stage that the last step left.
      const int tile = (kListed ? step / 2 : step) % kTiles, parity = (kListed ? step / 2 : step) / kTiles & 1;
      float dq[kPanels][8][4];
      bool any[2] = {false, false};
#pragma unroll
      for (int w = 0; w < 2; ++w)
        if (!kListed || w == step % 2) {
          barrier_wait(&shared.ds_full[w][tile], parity);
          any[w] = shared.any[w][tile] != 0;
        }
      wgmma_fence();
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) dq[panel][j][e] = 0.0f;
        pin(dq[panel]);
      }
      wgmma_fence();
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          if (!any[w]) continue;
          const uint32_t ds = tile_descriptor(shared_address(shared.ds[w][tile]));
          const uint32_t k = tile_descriptor(shared_address(shared.keys[kListed ? 0 : w].k[panel]));
#pragma unroll
          for (int i = 0; i < kStepsD; ++i)
            wgmma_shared<1, 1>(dq[panel], ds + 2 * i, k + i * (16 * kPanelRowBytes >> 4));
        }
        wgmma_commit();
      }
      const int before = stage == 0 ? kStages - 1 : stage - 1;  // the stage of the last step
      if (step > 0) barrier_wait(&shared.empty[before], (stage == 0 ? round + 1 : round) & 1);
      load(step + kAhead, before);
      copy_async_wait_group<1>();
      if (step + kAhead - 1 < steps) {
        const int next = stage + kAhead - 1;
        announce(next >= kStages ? next - kStages : next);
      }

      const int r = warp_row + fragment_row();
      const int at[2] = {shared.dq_at[stage][r], shared.dq_at[stage][r + 8]};
      const float grid[2] = {shared.rounding[stage][r], shared.rounding[stage][r + 8]};
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        if (panel == 0)
          wgmma_wait<1>();
        else
          wgmma_wait<0>();
        pin(dq[panel]);
        if (panel == kPanels - 1) {
#pragma unroll
          for (int w = 0; w < 2; ++w)
            if (!kListed || w == step % 2) warp_arrive(&shared.ds_empty[w][tile]);
        }
        if (!any[0] && !any[1]) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (at[i] < 0) continue;
          float* const to = dq_first + 2 * static_cast<int64_t>(at[i]) + panel * kPanel;
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float x = __fmaf_rn(dq[panel][j][2 * i], a.in.scale, grid[i]) - grid[i];
            const float y = __fmaf_rn(dq[panel][j][2 * i + 1], a.in.scale, grid[i]) - grid[i];
            add_pair(to + 8 * j, x, y);
          }
        }
      }
      if (++stage == kStages) stage = 0, round ^= 1;
    }
    return;
  }

  // ---- scores, and the sums of dk and dv ----
  take_registers<208>();
  const KeyPanels& keys = shared.keys[kListed ? 0 : warpgroup];
  const int my_key0 = kListed ? key0 : key0 + warpgroup * kRows, my_key_end = min(key_end, my_key0 + kRows);
  const int warp_key = my_key0 + 16 * warp + fragment_row();
  const float scale = a.in.scale_log2();
  float dk[kPanels][8][4] = {}, dv[kPanels][8][4] = {};
  {
    const uint32_t k = tile_descriptor(shared_address(keys.k)), v = tile_descriptor(shared_address(keys.v));
    // Where this lane's row of the four matrices of ds that a store writes begins; 16 rows further: 2048 bytes.
    const int ds_to = swizzled(lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2);
    constexpr int kStride = kListed ? 2 : 1;
    int turn = 0, stage = kListed ? warpgroup : 0, round = 0;
    for (int step = kListed ? warpgroup : 0; step < steps; step += kStride, ++turn) {
      const int tile = turn % kTiles;
      barrier_wait(&shared.full[stage], round & 1);
      const RowFact* const facts = shared.facts[stage];
      const int2* const ranges = shared.range[stage];
      const int2 first_range = ranges[0], last_range = ranges[min(rows - step * kStageRows, kStageRows) - 1];
      // Both ends of a range grow with the token.
      const bool any = first_range.x < my_key_end && last_range.y > my_key0;
      const bool all = last_range.x <= my_key0 && first_range.y >= my_key_end;
      float p[8][4], ds[8][4];
      uint32_t left_p[4][4], left_ds[4][4];
      if (any) {
        const uint32_t q = tile_descriptor(shared_address(shared.stages[stage].q));
        const uint32_t dout = tile_descriptor(shared_address(shared.stages[stage].dout));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kPanels * kStepsD; ++i) {
          const int at = i / kStepsD * (kPanelBytes >> 4) + i % kStepsD * 2;
          if (i == 0)
            wgmma_shared<0, 0>(p, k + at, q + at);
          else
            wgmma_shared<1, 0>(p, k + at, q + at);
        }
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < kPanels * kStepsD; ++i) {
          const int at = i / kStepsD * (kPanelBytes >> 4) + i % kStepsD * 2;
          if (i == 0)
            wgmma_shared<0, 0>(ds, v + at, dout + at);
          else
            wgmma_shared<1, 0>(ds, v + at, dout + at);
        }
        wgmma_commit();
        wgmma_wait<1>();
        pin(p);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int column = 8 * j + fragment_column();
          const float2 shift = make_float2(facts[column].x, facts[column + 1].x);
#pragma unroll
          for (int e = 0; e < 4; ++e) p[j][e] = exp2_approx(fmaf(p[j][e], scale, e % 2 == 0 ? -shift.x : -shift.y));
          if (!all) {
            const int4 range = *reinterpret_cast<const int4*>(&ranges[column]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int key = warp_key + 8 * (e / 2);
              if (key < (e % 2 == 0 ? range.x : range.z) || key >= (e % 2 == 0 ? range.y : range.w)) p[j][e] = 0.0f;
            }
          }
        }
        wgmma_wait<0>();
        pin(p);
        pin(ds);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int column = 8 * j + fragment_column();
          const float2 center = make_float2(facts[column].y, facts[column + 1].y);
#pragma unroll
          for (int e = 0; e < 4; ++e) ds[j][e] = p[j][e] * (ds[j][e] - (e % 2 == 0 ? center.x : center.y));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) pack_operand(left_p[i], p, i), pack_operand(left_ds[i], ds, i);
        wgmma_fence();
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            wgmma_add<1>(dv[panel], left_p[i], dout + (panel * kPanelBytes + i * 16 * kPanelRowBytes >> 4));
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            wgmma_add<1>(dk[panel], left_ds[i], q + (panel * kPanelBytes + i * 16 * kPanelRowBytes >> 4));
        wgmma_commit();
      }
      if (turn >= kTiles) barrier_wait(&shared.ds_empty[warpgroup][tile], turn / kTiles - 1 & 1);
      if (any) {
        const uint32_t to = shared_address(shared.ds[warpgroup][tile]) + ds_to;
#pragma unroll
        for (int i = 0; i < 4; ++i) store_matrices_transposed(to + i * 16 * kPanelRowBytes, left_ds[i]);
        fence_async_proxy();
      }
      if (threadIdx.x % kWarpgroup < 32 && lane == 0) shared.any[warpgroup][tile] = any;
      warp_arrive(&shared.ds_full[warpgroup][tile]);
      if (any) {
        wgmma_wait<0>();
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) pin(dk[panel]), pin(dv[panel]);
      }
      warp_arrive(&shared.empty[stage]);
      stage += kStride;
      if (stage >= kStages) stage -= kStages, round ^= 1;
    }
  }

  if (kListed) {  // the first warpgroup gets all of dk, the second all of dv
    float4* const other = reinterpret_cast<float4*>(shared.stages);
    constexpr int kCount = kPanels * 8 * kWarpgroup;
    const auto math_barrier = [] { asm volatile("bar.sync 1, 256;" ::: "memory"); };
    const auto exchange = [&](float(&mine)[kPanels][8][4], bool give) {
      float4* const at = other + (threadIdx.x % kWarpgroup);
#pragma unroll
      for (int i = 0; i < kPanels * 8; ++i) {
        float(&x)[4] = mine[i / 8][i % 8];
        if (give) {
          at[i * kWarpgroup] = make_float4(x[0], x[1], x[2], x[3]);
        } else {
          const float4 y = at[i * kWarpgroup];
          x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
        }
      }
    };
    math_barrier();  // no product reads the stages any more
    if (warpgroup == 0) {
      other += kCount;
      exchange(dv, true);
    } else {
      exchange(dk, true);
    }
  }
#endif
}

}  // namespace
}  // namespace triad::cuda
