// The selected branch's forward on Hopper (bf16) with resident rows, for groups with up to 8 heads, 64 or 128 wide.
//
// Tile. A CTA computes the query rows (t, h) for neighbouring tokens in one sequence and group: up to 384 rows at head
// width 64, up to 192 at 128. Their q and their outputs stay in shared memory, the outputs in fp32, until all blocks
// are added.
//
// Steps and items. The CTA visits each block that any token in the tile lists, in ascending order; a visit is a step.
// In a step, only the rows whose tokens list the block are computed. They are divided into 64-row items, and a
// warpgroup computes an item by wgmma: an item's rows need not be neighbours, because ldmatrix can load the left
// operand from any 64 rows of q. A step's last item may have fewer than 64 rows. No partial sums go to device memory,
// unlike in KV-stationary (nsa/sm90/kv_stationary.cu).
//
// Softmax. Let s be the score for a row and a key, scaled so that the key's weight is 2^s, and v the key's value. A
// row's base b is its largest s in the first block that it lists. The row's output is O / L, with
//   L = sum 2^(s - b),   O = sum 2^(s - b) v
// over all keys that the row sees in its listed blocks. An item computes its block's part of these sums, l and o. Then
// it merges: it adds l to L and o to O in shared memory.
//
// Overflow. A later block may have scores far above b. If one lane's part of l exceeds 2^60, the item computes the
// row's 2^(s - e) again, where e is the row's largest s in this block; otherwise e = b. L and O are relative to an
// exponent M, at first b. Merging sets
//   M' = max(M, e),   L' = 2^(M - M') L + 2^(e - M') l,   O' = 2^(M - M') O + 2^(e - M') o.
//
// Order. The consumer warpgroups take the items in turn and compute them concurrently. Two items in one block have no
// row in common, but items in different blocks may. So an item waits twice: before it reads its rows' bases, until all
// earlier blocks' items have set bases; and before it merges, until all earlier blocks' items have merged. A row's
// blocks are therefore added in ascending order, and its bits depend neither on its place in the tile nor on other
// rows.
//
// Producers (nsa/sm90/resident_rows.cuh). Loaders, one or two warps, load keys and values by TMA into a stage ring. The
// remaining two or three producer warps, the listers, write the items.
//
// A CTA's shared memory: q takes 48 KB, the outputs 96 KB and the stages 64 KB. Items, sums, token lists and barriers
// together take 9 KB at head width 128, and up to 12 KB at 64. The masks take one bit for each block in the sequence
// and each token in the tile.
//
// Speed (tests/baselines/findings/selected.md). At head width 64 the kernel is limited by latency: an SM finishes an
// item every 800 clocks, for which each scheduler issues 420 instructions, most of them not arithmetic. Three measures
// reduce instructions and waits. The numbers that describe an item are uniform registers, so addresses, descriptors and
// branches that depend on them are uniform too. Stores are predicated, without branches. A warpgroup reads its next
// item while a product runs. At head width 128 the kernel is also limited by shared memory traffic, which is at 70% of
// its rate.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/nsa/sm90/launch_forward.h"
#include "kernels/nsa/sm90/resident_rows.cuh"

namespace triad::cuda {
namespace {

// Returns x, and makes the compiler hold it in a register instead of computing it again at each use.
template <class T>
__device__ __forceinline__ T keep(T x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The attention from an item's 64 rows to its block's keys. A warpgroup holds it in registers, and a lane has parts of
// two rows, i = 0 and 1. If an item has fewer than 64 rows, copies of its last row replace the rows that it lacks. In a
// warp that has at least one row, the copies' p is 0. A warp that has none only issues the products: its p is not set,
// and its o is not used.
template <class Shape>
struct Product {
  int rows[2];     // row i's number in the tile
  bool exists[2];  // false if row i is a copy
  float s[kBlockKeys / 8][4], o[Shape::kPanels][kPanel / 8][4];
  float exponent[2];  // row i's exponent e
  float sum[2];       // this lane's part of row i's l, added up before p is rounded to bf16
  uint32_t queries[Shape::kHead / 16][4], p[kBlockKeys / 16][4];

  // Loads the rows' q. q: the shared_address() where the row that this lane passes to ldmatrix has columns 0 to 15.
  __device__ __forceinline__ void load_queries(uint32_t q) {
#pragma unroll
    for (int i = 0; i < Shape::kHead / 16; ++i) load_matrices(queries[i], query_columns(q, i));
  }
  // Computes s = q k^T and waits for it. k: the keys' descriptor.
  __device__ __forceinline__ void multiply_scores(uint32_t k) {
    wgmma_fence();
    wgmma_begin<Major::k>(s, queries[0], k);
#pragma unroll
    for (int i = 1; i < Shape::kHead / 16; ++i) wgmma<Major::k>(s, queries[i], k + i / 4 * kPanelStep + i % 4 * 2);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
  }
  // Sets scores to -inf for keys that a row doesn't see. Row i sees the block's first seen[i] keys, and at least one.
  __device__ __forceinline__ void mask(const int (&seen)[2]) {
#pragma unroll
    for (int j = 0; j < kBlockKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * j + fragment_column() + e % 2 >= seen[e / 2]) s[j][e] = -INFINITY;
  }
  // Sets each row's exponent to its base b, which is in shared memory. If a row has no base yet, this block is its
  // first: its largest score becomes its base, and is stored.
  __device__ __forceinline__ void set_base(Shared<Shape>& shared, float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) exponent[i] = exists[i] ? shared.base[rows[i]] : INFINITY;
    if (!__any_sync(kFullWarp, fminf(exponent[0], exponent[1]) == -INFINITY)) return;
    const float largest[2] = {row_max(0) * scale, row_max(1) * scale};
    __syncwarp();  // a row's four lanes have all read its base before one writes
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (exponent[i] == -INFINITY) {
        exponent[i] = largest[i];
        if (threadIdx.x % 4 == 0) shared.base[rows[i]] = shared.sums[rows[i]].x = largest[i];
      }
    __syncwarp();
  }
  // Computes p = 2^(s - exponent) and its sums. It keeps s, because p may have to be computed again.
  __device__ __forceinline__ void softmax(float scale) {
    float add[2][2];
#pragma unroll
    for (int k = 0; k < kBlockKeys / 16; ++k) {
      float power[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          power[j][e] = exp2_approx(fmaf(s[2 * k + j][e], scale, -exponent[e / 2]));
          float& to = add[e / 2][e % 2];
          to = k + j == 0 ? power[j][e] : to + power[j][e];
        }
      pack_operand(p[k], power, 0);
    }
    sum[0] = add[0][0] + add[0][1], sum[1] = add[1][0] + add[1][1];
  }
  // If a row's sum is too large, sets the row's exponent e to its largest score in this block. Other rows' exponents
  // remain their base b. Returns whether any row in the warp has a new exponent. If so, the caller computes p again.
  __device__ __forceinline__ bool raise_exponents(float scale) {
    if (!__any_sync(kFullWarp, fmaxf(sum[0], sum[1]) > kMostSum)) return false;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (const float largest = row_max(i) * scale; quad_max(sum[i]) > kMostSum) exponent[i] = largest;
    return true;
  }
  // Begins to compute o = p v. end_values() waits for it; before that, o and p must not be used. v: the values'
  // descriptor.
  __device__ __forceinline__ void begin_values(uint32_t v) {
#pragma unroll
    for (auto& panel : o) leave_unset(panel);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i)
#pragma unroll
      for (int panel = 0; panel < Shape::kPanels; ++panel)
        wgmma<Major::mn>(o[panel], p[i], v + panel * kPanelStep + i * (16 * kPanelRowBytes >> 4), i > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void end_values() {
    wgmma_wait<0>();
#pragma unroll
    for (auto& panel : o) pin(panel);
  }
  // Adds l and o of the item's rows to their L and O in shared memory.
  __device__ __forceinline__ void merge(Shared<Shape>& shared) {
    const uint32_t at[2] = {keep(output_address(shared, rows[0])), keep(output_address(shared, rows[1]))};
    float2 before[2];
    float4 x[2][kGroups];
    load_outputs(x, at, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) before[i] = exists[i] ? shared.sums[rows[i]] : make_float2(exponent[i], 0.0f);
    sum[0] = quad_sum(sum[0]), sum[1] = quad_sum(sum[1]);
    const bool same = __all_sync(kFullWarp, before[0].x == exponent[0] && before[1].x == exponent[1]);
    __syncwarp();  // a row's four lanes have all read its sums before one writes
    if (same) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (exists[i] && threadIdx.x % 4 == 0) shared.sums[rows[i]].y = before[i].y + sum[i];
      add_outputs(x, at, [](float before, float item, int) { return before + item; });
    } else {
      float old_factor[2], item_factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float best = fmaxf(before[i].x, exponent[i]);
        old_factor[i] = exp2_approx(before[i].x - best), item_factor[i] = exp2_approx(exponent[i] - best);
        if (exists[i] && threadIdx.x % 4 == 0)
          shared.sums[rows[i]] = make_float2(best, fmaf(before[i].y, old_factor[i], item_factor[i] * sum[i]));
      }
      add_outputs(x, at,
                  [&](float before, float item, int i) { return fmaf(before, old_factor[i], item * item_factor[i]); });
    }
  }

 private:
  static constexpr int kPanelStep = kBlockKeys * kPanelRowBytes >> 4;  // descriptor step between k or v panels
  static constexpr int kGroups = 2;  // how many of O's 16-column groups are loaded at a time

  // The address where the query row at address q has columns [16 i, 16 i + 16).
  static __device__ __forceinline__ uint32_t query_columns(uint32_t q, int i) {
    return (q ^ i % 4 << 5) + i / 4 * (Shape::kRows * kPanelRowBytes);
  }
  __device__ __forceinline__ float row_max(int i) const {
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < kBlockKeys / 8; ++j) largest = fmaxf(largest, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
    return quad_max(largest);
  }
  // Loads the rows' column groups [first, first + kGroups) in O into x.
  __device__ __forceinline__ void load_outputs(float4 (&x)[2][kGroups], const uint32_t (&at)[2], int first) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int m = 0; m < kGroups; ++m)
        if (exists[i]) x[i][m] = load_shared(output_group(at[i], first + m));
  }
  // Stores O' = add(O, o, i) for both rows i. x: O's first kGroups groups, which the caller has loaded.
  template <class Add>
  __device__ __forceinline__ void add_outputs(float4 (&x)[2][kGroups], const uint32_t (&at)[2], Add add) const {
#pragma unroll
    for (int first = 0; first < Shape::kOutputGroups; first += kGroups) {
      if (first > 0) load_outputs(x, at, first);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int m = 0; m < kGroups; ++m) {
          const int group = first + m, panel = group / 4;
          const float(&low)[4] = o[panel][group % 4 * 2], (&high)[4] = o[panel][group % 4 * 2 + 1];
          store_shared_if(exists[i], output_group(at[i], group),
                          make_float4(add(x[i][m].x, low[2 * i], i), add(x[i][m].y, low[2 * i + 1], i),
                                      add(x[i][m].z, high[2 * i], i), add(x[i][m].w, high[2 * i + 1], i)));
        }
    }
  }
};

// What a lane reads from an item.
struct ItemOfLane {
  unsigned header;    // an ItemHeader
  int first;          // the index in the item where the 16 rows begin that the lane's warp computes
  int query_chunk;    // row_chunk() for the warp's row lane % 16, whose address the lane passes to ldmatrix
  int row_chunks[2];  // row_chunk() for the two rows that the lane has parts of in a Product
};

// Computes warpgroup w's items: every kWarpgroups-th item. Each thread arrives at the barriers by itself. One arrival
// for a warp would be enough, but compute-sanitizer would then report races: it orders a thread's accesses only by that
// thread's arrivals.
template <class Shape>
__device__ __forceinline__ void attend_items(const ResidentRowsArgs& a, const TokenTile& tile, Shared<Shape>& shared,
                                             int w) {
  constexpr unsigned kWarpgroups = Shape::kWarpgroups;
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x % kWarpgroup / 32);
  w = uniform(w);
  const uint32_t queries = shared_address(shared.q[0]);
  // Waits until a producer has written item n, and reads it.
  const auto read_item = [&](unsigned n) {
    ring_wait(shared.item_full, n);
    const Item& item = shared.items[n % kSlots];
    // Each warp in the warpgroup computes 16 of the 64 rows. If the item has fewer rows, some warps have none. Which
    // warp gets the first 16 rows changes from item to item. Otherwise every warpgroup's last warp would often have no
    // rows; these warps run on the same SM scheduler, which would have less work than the others. If there are four
    // warpgroups, n % 4 is the same for all a warpgroup's items, so n / 4 is added to n.
    const int first = (warp + n + (kWarpgroups == 4 ? n / 4 : 0)) % 4 * 16, row = first + fragment_row();
    return ItemOfLane{item.header, first, item.chunks[first + lane % 16], {item.chunks[row], item.chunks[row + 8]}};
  };
  ItemOfLane next = read_item(w);
  barrier_wait(&shared.q_full, 0);
#pragma unroll 1
  for (unsigned n = w;; n += kWarpgroups) {
    const auto [count, arrivals, step, block] = ItemHeader::unpack(uniform(next.header));
    if (count == 0) return;
    const bool used = next.first < count;
    const uint32_t q = queries + 16 * (next.query_chunk ^ lane / 16);
    const int first_row = keep(next.first + fragment_row());
    Product<Shape> product;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      product.rows[i] = row_of(next.row_chunks[i]), product.exists[i] = first_row + 8 * i < count;
    product.load_queries(q);
    const auto& kv = shared.stage[step % Shape::kStages];
    ring_wait(shared.kv_full, step);
    product.multiply_scores(tile_descriptor(shared_address(kv.k[0])));
    if constexpr (Shape::kApart) barrier_arrive(&shared.k_done[n % kSlots]);
    if (const int first_key = block * kBlockKeys; first_key + kBlockKeys > tile.first) {
      int seen[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) seen[i] = tile.first + a.heads.quotient(product.rows[i]) + 1 - first_key;
      product.mask(seen);
    }
    ring_wait(shared.base_set, step - 1);
    if (used) product.set_base(shared, a.scale_log2);
    barrier_arrive(&shared.base_set[step % kSlots], arrivals);
    if (used) {
      // p is computed again at most once. After that a sum is too large only if scores exceed some 2^31: the exponent e
      // is a rounded score, and then e's rounding error alone can make 2^(s - e) overflow, however often p is computed.
      // Such a row's outputs may be infinite or NaN.
      bool again = false;
      do product.softmax(a.scale_log2);
      while (!again && (again = product.raise_exponents(a.scale_log2)));
    }
    if constexpr (Shape::kApart) ring_wait(shared.v_full, step);
    product.begin_values(tile_descriptor(shared_address(kv.v[0])));
    next = read_item(n + kWarpgroups);  // meanwhile the tensor cores compute o
    product.end_values();
    barrier_arrive(&shared.item_done[n % kSlots]);
    ring_wait(shared.merged, step - 1);
    if (used) product.merge(shared);
    barrier_arrive(&shared.merged[step % kSlots], arrivals);
  }
}

// Writes the tile rows' o and lse and, if requested, the branches' gated sum. A warp writes eight rows at a time, four
// lanes each.
template <class Shape>
__device__ __forceinline__ void store_rows(const ResidentRowsArgs& a, const TokenTile& tile, Shared<Shape>& shared) {
  constexpr int kVectors = Shape::kHead / 32;  // 16-byte vectors per lane
  const int lane = threadIdx.x % 32, c = lane % 4, G = a.heads.value(), rows = tile.tokens * G;
  __nv_bfloat16* const o = a.o.at(tile.b, tile.first, tile.g * G) + 8 * c;
  float* const lse = a.lse.at(tile.b, tile.first, tile.g * G);
#pragma unroll 1
  for (int row0 = threadIdx.x / 32 * 8; row0 < rows; row0 += Shape::kConsumers / 4) {
    const int row = min(row0 + lane / 4, rows - 1), token = a.heads.quotient(row);
    const int head = row - token * G;
    const bool exists = row0 + lane / 4 < rows;
    const float2 sums = shared.sums[row];
    const float inverse = sums.y == 0.0f ? 0.0f : reciprocal_approx(sums.y);
    uint4 columns[kVectors];
    const uint32_t at = output_address(shared, row);
#pragma unroll
    for (int m = 0; m < kVectors; ++m) {
      const float4 x = load_shared(output_group(at, 2 * m)), y = load_shared(output_group(at, 2 * m + 1));
      uint32_t words[4] = {pack_bf16(x.x * inverse, x.y * inverse), pack_bf16(x.z * inverse, x.w * inverse),
                           pack_bf16(y.x * inverse, y.y * inverse), pack_bf16(y.z * inverse, y.w * inverse)};
      transpose_quad(words);
      columns[m] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (!exists) continue;
    __nv_bfloat16* const to_o = o + token * a.o.row + head * a.o.head;
#pragma unroll
    for (int m = 0; m < kVectors; ++m) *reinterpret_cast<uint4*>(to_o + 32 * m) = columns[m];
    if (c == 0)
      lse[token * a.lse.row + head * a.lse.head] =
          sums.y == 0.0f ? -INFINITY : (sums.x + log2_approx(sums.y)) * std::numbers::ln2_v<float>;
    if (!a.combine.active()) continue;
    const CombineRows::Row to(a.combine, tile.b, tile.first + token, tile.g * G + head, tile.g);
    CombineRows::Row::Others others[kVectors];
#pragma unroll
    for (int m = 0; m < kVectors; ++m) others[m] = to.others(32 * m + 8 * c);
#pragma unroll
    for (int m = 0; m < kVectors; ++m) to.store(32 * m + 8 * c, columns[m], others[m]);
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    fwd_resident_rows_kernel(const __grid_constant__ ResidentRowsArgs a) {
  constexpr int kConsumers = Shape::kConsumers, kThreads = Shape::kThreads;
  auto& shared = *reinterpret_cast<Shared<Shape>*>(aligned_shared());
  unsigned* const masks = shared.block_masks();
  const TokenTile tile(a);
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  ListReader<Shape> reader{a, tile};
  reader.load(0);  // the entries arrive while barriers and sums are initialized
  // Initializes a ring's barriers, all by one thread, warp `by`'s first lane. Using all 32 lanes would take longer:
  // mbarrier.init takes an address that is uniform in the warp, so the lanes would execute the instruction one after
  // the other.
  const auto init_ring = [&](int by, Barrier* ring, int arrivals) {
    if (threadIdx.x == 32 * by)
      for (unsigned i = 0; i < kSlots; ++i) barrier_init(&ring[i], arrivals);
  };
  if (threadIdx.x == 0) barrier_init(&shared.q_full, 1);
  init_ring(0, shared.item_full, 32);
  init_ring(1, shared.kv_full, 1);
  init_ring(2, shared.item_done, kWarpgroup);
  init_ring(3, shared.base_set, Shape::kStepItems * kWarpgroup);
  init_ring(4, shared.merged, Shape::kStepItems * kWarpgroup);
  if constexpr (Shape::kApart) init_ring(5, shared.v_full, 1), init_ring(6, shared.k_done, kWarpgroup);
  if (threadIdx.x % 32 == 0) barrier_init_done();
  for (int i = threadIdx.x; i < tile.blocks() * Shape::kWords; i += kThreads) masks[i] = 0;
  for (int i = threadIdx.x; i < Shape::kRows * Shape::kHead / 4; i += kThreads)
    reinterpret_cast<float4*>(shared.o)[i] = make_float4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < Shape::kRows; i += kThreads)
    shared.base[i] = -INFINITY, shared.sums[i] = make_float2(-INFINITY, 0.0f);
  __syncthreads();
  if (threadIdx.x == kConsumers) load_queries(a, tile, shared);
  __syncwarp();
  reader.mark(0, masks);
  for (int first = reader.kEntries; first < reader.entries(); first += reader.kEntries)
    reader.load(first), reader.mark(first, masks);
  __syncthreads();
  // Registers per thread. At the launch, all threads have the most that the launch bound allows; then producers give up
  // some, and consumers get them.
  constexpr int kRegisters = 65536 / kThreads / 8 * 8, kRegistersProducer = Shape::kWide ? 56 : 64,
                kRegistersConsumer = Shape::kWide ? 152 : 104;
  static_assert(kRegistersProducer + Shape::kWarpgroups * kRegistersConsumer <= (Shape::kWarpgroups + 1) * kRegisters);
  if (warp >= kConsumers / 32) {
    decrease_registers<kRegistersProducer>();
    const int producer = warp - kConsumers / 32;
    if (producer >= Shape::kLoaders)
      list_items(a, tile, shared, producer - Shape::kLoaders);
    else if constexpr (!Shape::kApart)
      load_steps<Shape, true, true>(a, tile, shared);
    else if (producer == 0)
      load_steps<Shape, true, false>(a, tile, shared);
    else
      load_steps<Shape, false, true>(a, tile, shared);
  } else {
    increase_registers<kRegistersConsumer>();
    if (a.combine.active())
      for (int i = threadIdx.x; i < tile.tokens * a.heads.value(); i += kConsumers) {
        const int token = a.heads.quotient(i);
#pragma unroll
        for (int panel = 0; panel < Shape::kPanels; ++panel)
          a.combine.prefetch(tile.b, tile.first + token, tile.g * a.heads.value() + i - token * a.heads.value(),
                             panel * kPanel);
      }
    attend_items(a, tile, shared, warp / 4);
    named_barrier_sync<kConsumers>(1);  // now all items are merged
    store_rows(a, tile, shared);
    __syncwarp();
  }
}

// Tokens per tile, for groups of G heads.
template <class Shape>
int64_t tile_tokens(int64_t G) {
  return std::min<int64_t>(Shape::kTokens, Shape::kRows / G);
}
// Calls f with the shape for heads with `head` columns, groups of G heads and sequences of `blocks` blocks. A tile has
// as many rows as fit shared memory, so the fewer heads a group has, the more tokens the tile needs. With more tokens
// the block masks take more memory, so very long sequences have tiles with fewer tokens.
template <class F>
auto with_shape(int64_t head, int64_t G, int64_t blocks, F&& f) {
  using Tokens96 = ResidentRowsShape<64, 96>;
  using Tokens192 = ResidentRowsShape<64, 192>;
  using Tokens384 = ResidentRowsShape<64, 384>;
  using Wide96 = ResidentRowsShape<128, 96>;
  using Wide192 = ResidentRowsShape<128, 192>;
  if (head == 128) return G == 1 && blocks <= most_blocks<Wide192>() ? f(Wide192()) : f(Wide96());
  if (G == 1 && blocks <= most_blocks<Tokens384>()) return f(Tokens384());
  return G < 4 && blocks <= most_blocks<Tokens192>() ? f(Tokens192()) : f(Tokens96());
}

}  // namespace

bool resident_rows_supports(const AttendOut& out, const AttendIn& in, const ConstTensor& block_index, int64_t l_sel) {
  // The kernel itself has no limit on list entries. Tests have lists with up to 64 entries.
  constexpr int64_t kMostHeads = 8, kMostEntries = 64;
  const int64_t head = in.q.size(3), G = in.q.size(2) / in.k.size(2), blocks = ceil_div(end_token(in), l_sel);
  return forward_sm90_supports(out, in) && (head == 64 || head == 128) && G <= kMostHeads && l_sel == kBlockKeys &&
         block_index.size(3) <= kMostEntries && in.documents.empty() &&
         blocks <= with_shape(head, G, blocks, [](auto shape) { return most_blocks<decltype(shape)>(); });
}

bool resident_rows_pays(const AttendIn& in, const ConstTensor& block_index, int64_t l_sel) {
  // The limits are measured for whole sequences (tests/baselines/findings/selected.md). If the call computes a part of
  // a sequence, both conditions apply to a whole sequence of first_token + end_token tokens, because its tokens see as
  // many blocks on average.
  const int64_t head = in.q.size(3), G = in.q.size(2) / in.k.size(2), n = block_index.size(3);
  const int64_t blocks = ceil_div(first_token(in) + end_token(in), l_sel);
  // If a sequence has fewer than `least` blocks for each list entry, and neighbouring tokens list nearly the same
  // blocks, the shared tile is faster.
  const int64_t least = G > 4 ? 8 : head == 128 ? 6 : G == 1 ? 4 : 5;
  // In the last tiles, a step has tile_rows * n / blocks rows on average. With fewer than kLeastRows, more than four
  // fifths of an item's 64 rows would be padding (copies of its last row).
  constexpr int64_t kLeastRows = 12;
  const int64_t tile_rows = with_shape(head, G, ceil_div(end_token(in), l_sel),
                                       [&](auto shape) { return G * tile_tokens<decltype(shape)>(G); });
  return least * n <= blocks && kLeastRows * blocks <= tile_rows * n;
}

template <class Shape>
void launch_resident_rows(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                          const SelectedKeys& keys, const CombineAlong* combine) {
  using bf16 = __nv_bfloat16;
  const int64_t B = in.k.size(0), groups = in.k.size(2), G = in.q.size(2) / groups;
  const int64_t tile = tile_tokens<Shape>(G);
  // A TMA box has at most 256 elements in each dimension. Only 384-token tiles exceed this limit; each is loaded as two
  // 192-token boxes.
  const int64_t box_tokens = tile <= 256 ? tile : tile / 2;
  const int64_t tiles = ceil_div(in.q.size(1), tile), all = B * groups * tiles;
  TRIAD_CHECK(all < (int64_t{1} << 31), "{}: {} tiles do not fit 31 bits", op, all);
  ResidentRowsArgs a{.q_map = {},
                     .k_map = {},
                     .v_map = {},
                     .o = make_query_view<bf16>(in, out.o),
                     .lse = make_query_view<float>(in, out.lse),
                     .combine = combine_rows(combine, keys.lists.first_token),
                     .lists = keys.lists,
                     .n = Divisor(keys.lists.n),
                     .heads = Divisor(static_cast<int>(G)),
                     .sequences_and_groups = Divisor(static_cast<int>(B * groups)),
                     .tile_tokens = static_cast<int>(tile),
                     .box_tokens = static_cast<int>(box_tokens),
                     .tiles = static_cast<int>(tiles),
                     .scale_log2 = kLog2e / std::sqrt(static_cast<float>(in.q.size(3)))};
  if (!ctx.planning) {
    const auto map = [&](const ConstTensor& t) {
      return make_box_map(make_view<const bf16>(t), B, t.size(1), groups, kBlockKeys);
    };
    a.q_map = make_query_map(make_view<const bf16>(in.q), B, in.q.size(1), in.q.size(2), static_cast<int>(G),
                             static_cast<int>(box_tokens));
    a.k_map = map(in.k), a.v_map = map(in.v);
  }
  launch(ctx, op, fwd_resident_rows_kernel<Shape>, dim3(static_cast<unsigned>(all)), dim3(Shape::kThreads),
         Shared<Shape>::bytes(keys.lists.blocks), a);
}

void forward_resident_rows(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                           const SelectedKeys& keys, const CombineAlong* combine) {
  with_shape(in.q.size(3), in.q.size(2) / in.k.size(2), keys.lists.blocks,
             [&](auto shape) { launch_resident_rows<decltype(shape)>(ctx, op, out, in, keys, combine); });
}

}  // namespace triad::cuda
