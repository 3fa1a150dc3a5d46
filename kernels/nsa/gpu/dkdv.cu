// The portable kernels that compute dk and dv, for all three branches and for dense attention.
//
// A CTA keeps 64 keys of one sequence and group, 16 per warp, and iterates over the query rows that see them, 64 per
// step (large heads: 32). Scores are computed transposed, s^T = k q^T, so that p^T and ds^T are in the registers that
// the left operands of the next products need:
//   dv += (gate p)^T dout   and   dk += ds^T q,   summed in registers over all rows and all heads of the group.
// A step has 4 matrix products; the kernel for dq (nsa/gpu/fwd_dq.cuh) has 3. There are no atomics, so the result is
// bitwise reproducible. Per step a CTA reads q and dout of 64 rows from L2: 16 KiB at heads of 64 in bf16, for 2.1
// MFLOP. The bound is the bandwidth of shared memory, as for dq: 72 ldmatrix of 512 bytes for 128 mma.m16n8k16 of a
// warp.
//
// Many more rows see the first keys than the last ones. The rows of each block of keys are therefore cut into pieces of
// about equal size (KeyWorkList), and a second kernel adds the partial sums of a block's pieces in order.
#include <limits>

#include "kernels/nsa/gpu/attend.cuh"

namespace triad::cuda {
namespace {

// The strides of q or dout in bytes: from a token to the next, and from a head to the next. They are zero unless each
// row of the tensor consists of 16-byte vectors, as many as its row in shared memory has, and the strides fit 32 bits.
// The offset of a row then takes two multiply-adds.
struct RowBytes {
  uint32_t token = 0, head = 0;
  // The offset of token t and head h.
  __device__ __forceinline__ uint64_t at(int t, int h) const {
    return static_cast<uint64_t>(static_cast<uint32_t>(t)) * token +
           static_cast<uint64_t>(static_cast<uint32_t>(h)) * head;
  }
};

template <class T>
struct DkdvArgs {
  Attend<T> in;
  View<const T> dout;
  View<const float> lse, delta, gate;
  GradView dk, dv;
  KeyRange range;
  KeyWorkList list;
  RowBytes q_bytes, dout_bytes;
  bool whole_rows;  // whether neither q_bytes nor dout_bytes is zero
};

// What the kernel reads for each query row of a stage, apart from q and dout: the softmax statistics, the gate, and the
// keys that the row sees.
template <int kCount>
struct RowStats {
  float lse[kCount], delta[kCount], gate[kCount];
  int2 range[kCount];  // the row sees the keys [x, y)
};

// Computes one piece of work (KeyWork) for one tile of keys and kColumns output columns. Grid: x the piece, y the
// sequence and group, z the chunk of columns and the tile of the block's keys. Shared memory: k [keys][dk], v
// [keys][dv], in the selected branch the piece's tokens [kWorkTokens] (not in CompactTile); per stage q [rows][dk],
// dout [rows][dv] and RowStats.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, resident_ctas<T, Tile>(3, 2))
    bwd_dkdv_portable_kernel(const DkdvArgs<T> a) {
  constexpr int kCount = Tile::kKeys, kColumns = Tile::kColumns;  // rows per step; output columns of this CTA
  const int depth_k = padded_depth<Tile>(a.in.depth_k), stride_k = padded_stride<T, Tile>(a.in.depth_k);
  const int depth_v = padded_depth<Tile>(a.in.depth_v), stride_v = padded_stride<T, Tile>(a.in.depth_v);
  const int b = blockIdx.y / a.in.groups, g = blockIdx.y % a.in.groups;
  const int parts_z = ceil_div(a.list.block_keys, Tile::kRows);  // tiles of keys per block
  const int key_tile = blockIdx.z % parts_z, column0 = blockIdx.z / parts_z * kColumns;
  const DocumentRange range(a.range, b);
  const KeyWork work =
      find_work(a.list, range, a.range.keys, a.in.tokens, blockIdx.x, blockIdx.y, gridDim.y, a.in.first_token);
  if (work.count < 0) return;
  const int2 block_keys = keys_of_block(a.list, a.range, b, work.block);
  const int key0 = block_keys.x + key_tile * Tile::kRows, key_end = min(block_keys.y, key0 + Tile::kRows);
  if (key0 >= key_end) return;

  T* k = reinterpret_cast<T*>(dynamic_shared());
  T* v = k + Tile::kRows * stride_k;
  int* held = reinterpret_cast<int*>(v + Tile::kRows * stride_v);
  const bool is_listed = a.list.tokens != nullptr;
  unsigned char* stages = reinterpret_cast<unsigned char*>(held + (is_listed && Tile::kHoldsTokens ? kWorkTokens : 0));
  const int stage_bytes = kCount * (stride_k + stride_v) * static_cast<int>(sizeof(T)) + sizeof(RowStats<kCount>);
  const auto load_keys = [&](T* to, int stride, int depth, const View<const T>& view) {
    load_rows<Tile::kRows, Tile::kThreads>(to, stride, depth, view, [&](int r) -> const T* {
      return key0 + r < key_end ? view.at(b, key0 + r, g) : nullptr;
    });
  };
  load_keys(k, stride_k, depth_k, a.in.k);
  load_keys(v, stride_v, depth_v, a.in.v);
  const int* listed = held;  // the piece's tokens, in the selected branch
  if (is_listed) {
    const int* tokens = a.list.tokens + blockIdx.y * a.list.tokens_stride + work.first;
    if constexpr (Tile::kHoldsTokens) {
      for (int i = threadIdx.x; i < work.count; i += Tile::kThreads) held[i] = tokens[i];
      __syncthreads();
    } else {
      listed = tokens;
    }
  }
  const int G = a.in.heads.value(), rows = work.count * G;
  const auto token_of = [&](int i) { return is_listed ? listed[i] : work.first + i; };

  // Copies q and dout of a stage's rows to shared memory. If a.whole_rows is set, eight threads copy a row, 16 bytes at
  // a time. Each of them computes the token and the head of the row once and uses them for q and for dout, because that
  // takes more instructions than the copies. If a.whole_rows is not set, load_rows() copies q and then dout, and fills
  // up rows whose length is not a multiple of 16 bytes.
  constexpr int kCopy = 16 / sizeof(T), kLanes = 8, kCopiedRows = Tile::kThreads / kLanes;
  const int copy_row = threadIdx.x / kLanes, copy_column = threadIdx.x % kLanes * kCopy;
  const auto* q_from = reinterpret_cast<const unsigned char*>(a.in.q.at(b, 0, g * G) + copy_column);
  const auto* dout_from = reinterpret_cast<const unsigned char*>(a.dout.at(b, 0, g * G) + copy_column);
  const auto load = [&](int row0, int stage) {
    T* q = reinterpret_cast<T*>(stages + stage * stage_bytes);
    T* dout = q + kCount * stride_k;
    auto* stats = reinterpret_cast<RowStats<kCount>*>(dout + kCount * stride_v);
    if (a.whole_rows) {
#pragma unroll
      for (int j = 0; j < kCount / kCopiedRows; ++j) {
        const int r = copy_row + j * kCopiedRows, row = min(row0 + r, rows - 1), bytes = row0 + r < rows ? 16 : 0;
        const int i = a.in.heads.quotient(row), t = token_of(i), h = row - i * G;
        const unsigned char* q_row = q_from + a.q_bytes.at(t, h);
        const unsigned char* dout_row = dout_from + a.dout_bytes.at(t, h);
        for (int c = 0; c < depth_k; c += kLanes * kCopy)
          copy_async_16(q + r * stride_k + copy_column + c, q_row + c * sizeof(T), bytes);
        for (int c = 0; c < depth_v; c += kLanes * kCopy)
          copy_async_16(dout + r * stride_v + copy_column + c, dout_row + c * sizeof(T), bytes);
      }
    } else {
      const auto load_query = [&](T* to, int stride, int depth, const View<const T>& view) {
        load_rows<kCount, Tile::kThreads>(to, stride, depth, view, [&](int r) -> const T* {
          if (row0 + r >= rows) return nullptr;
          const int i = a.in.heads.quotient(row0 + r);
          return view.at(b, token_of(i), g * G + row0 + r - i * G);
        });
      };
      load_query(q, stride_k, depth_k, a.in.q);
      load_query(dout, stride_v, depth_v, a.dout);
    }
    static_assert(Tile::kThreads >= 2 * kCount);
    if (threadIdx.x >= 2 * kCount) return;
    const int r = threadIdx.x % kCount, row = min(row0 + r, rows - 1);
    const bool exists = row0 + r < rows;
    const int i = a.in.heads.quotient(row), t = token_of(i);
    if (threadIdx.x < kCount) {
      const int head = g * G + row - i * G;
      copy_async_4(&stats->lse[r], a.lse.at(b, t, head), exists);
      copy_async_4(&stats->delta[r], a.delta.at(b, t, head), exists);
    } else {
      if (a.gate.data != nullptr)
        copy_async_4(&stats->gate[r], a.gate.at(b, t, g), exists);
      else
        stats->gate[r] = 1.0f;
      stats->range[r] = exists ? make_int2(range.low(t), range.high(t)) : make_int2(0, 0);
    }
  };

  constexpr bool kOneChunk = Tile::kColumns == kSmallHeads;  // one CTA has all columns, and column0 is 0
  const bool has_dk = kOneChunk || column0 < a.dk.width, has_dv = kOneChunk || column0 < a.dv.width;
  const int warp_row = 16 * (threadIdx.x / 32), warp_key = key0 + warp_row;
  const float scale = a.in.scale_log2();
  float dk[kColumns / 8][4] = {}, dv[kColumns / 8][4] = {};
  int row0 = -kCount;
  pipeline<int>(
      a.in.stages,
      [&](int& next) {
        next = row0 += kCount;
        return row0 < rows;
      },
      load,
      [&](int now, int stage) {
        const T* q = reinterpret_cast<const T*>(stages + stage * stage_bytes);
        const T* dout = q + kCount * stride_k;
        const auto& stats = *reinterpret_cast<const RowStats<kCount>*>(dout + kCount * stride_v);
        const int2 first = stats.range[0], last = stats.range[min(kCount, rows - now) - 1];  // bounds ascend with rows
        if (warp_key >= key_end || last.y <= warp_key || first.x >= warp_key + 16) return;
        const bool all = now + kCount <= rows && last.x <= warp_key && first.y >= warp_key + 16;

        float p[kCount / 8][4] = {}, ds[kCount / 8][4] = {};
        multiply_nt<kCount>(p, k + warp_row * stride_k, q, stride_k, depth_k);
        multiply_nt<kCount>(ds, v + warp_row * stride_v, dout, stride_v, depth_v);
        // Products are transposed here: column_of(j, e) is the index, within the stage, of the query row that element
        // [j][e] of p and ds belongs to.
        const auto column_of = [](int j, int e) { return 8 * j + fragment_column() + e % 2; };
#pragma unroll
        for (int j = 0; j < kCount / 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            p[j][e] = exp2_approx(fmaf(p[j][e], scale, -(stats.lse[column_of(j, e)] * kLog2e)));
        if (!all) {  // clears p of unseen keys; a row that sees no key has lse = -inf, so its p is inf before
#pragma unroll
          for (int j = 0; j < kCount / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int2 seen = stats.range[column_of(j, e)];
              const int key = warp_key + fragment_row() + 8 * (e / 2);
              if (key < seen.x || key >= seen.y) p[j][e] = 0.0f;
            }
        }
#pragma unroll
        for (int j = 0; j < kCount / 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float delta = stats.delta[column_of(j, e)], gate = stats.gate[column_of(j, e)];
            ds[j][e] = score_gradient<T>(p[j][e], fmaf(gate, ds[j][e], -delta));
            p[j][e] *= gate;
          }
        if (has_dv) multiply_nn<kCount, kColumns>(dv, p, dout + column0, stride_v);
        if (has_dk) multiply_nn<kCount, kColumns>(dk, ds, q + column0, stride_k);
      });

  const int width = a.dk.width + a.dv.width;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = warp_key + fragment_row() + 8 * i;
    if (key >= key_end) continue;
    float* partial = a.list.partial;
    if (work.slot >= 0) partial += (static_cast<int64_t>(work.slot) * a.list.block_keys + key - block_keys.x) * width;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int column = column0 + 8 * j + fragment_column();
      const float dk0 = dk[j][2 * i] * a.in.scale, dk1 = dk[j][2 * i + 1] * a.in.scale;
      if (work.slot >= 0) {
        store_pair(partial + column, a.dk.width - column, dk0, dk1);
        store_pair(partial + a.dk.width + column, a.dv.width - column, dv[j][2 * i], dv[j][2 * i + 1]);
      } else {
        a.dk.store(b, key, g, column, dk0, dk1);
        a.dv.store(b, key, g, column, dv[j][2 * i], dv[j][2 * i + 1]);
      }
    }
  }
}

// Computes dk and dv of every block that has several pieces, by adding the partial sums of its pieces in order. Grid: x
// the block, y the sequence and group, z a group of kMergeKeys keys of the block. A thread adds one column at a time,
// so heads may have any width; bwd_dkdv_merge_kernel (nsa/sm90/dkdv.cu) loads four at a time, for widths that are
// multiples of 64.
constexpr int kMergeKeys = 8;
__global__ void bwd_dkdv_merge_portable_kernel(const GradView dk, const GradView dv, const KeyWorkList list, int groups,
                                               const KeyRange range) {
  const int block = blockIdx.x, bg = blockIdx.y, width = dk.width + dv.width;
  int2 slots;
  if (list.block_slots != nullptr) {
    slots = list.block_slots[static_cast<int64_t>(bg) * list.blocks + block];
  } else {
    const int parts = list.pieces / list.blocks;
    slots = make_int2((bg * list.blocks + block) * parts, parts);
  }
  if (slots.y <= 1) return;
  const int2 block_keys = keys_of_block(list, range, bg / groups, block);
  for (int i = threadIdx.x; i < kMergeKeys * width; i += blockDim.x) {
    const int in_block = blockIdx.z * kMergeKeys + i / width, column = i % width;
    const int key = block_keys.x + in_block;
    if (key >= block_keys.y) continue;
    float sum = 0.0f;
    for (int part = 0; part < slots.y; ++part)
      sum += list.partial[(static_cast<int64_t>(slots.x + part) * list.block_keys + in_block) * width + column];
    if (column < dk.width)
      dk.store(bg / groups, key, bg % groups, column, sum);
    else
      dv.store(bg / groups, key, bg % groups, column - dk.width, sum);
  }
}

// Returns the strides of a tensor, or zeros if RowBytes does not allow them. depth: the columns of a row in shared
// memory, padded ones included.
template <class T>
RowBytes row_bytes(const View<T>& v, int depth) {
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max() / sizeof(T);
  if (!v.vector || v.width != depth || v.row > kMost || v.head > kMost) return {};
  return {static_cast<uint32_t>(v.row * sizeof(T)), static_cast<uint32_t>(v.head * sizeof(T))};
}

}  // namespace

void dkdv_portable(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                   const KeyRange& range, const KeyWorkList& list) {
  const auto sequences_and_groups = static_cast<unsigned>(in.k.size(0) * in.k.size(2));
  const int64_t listed_tokens = list.tokens != nullptr ? kWorkTokens : 0;
  dispatch_attend(ctx, op, PortableKernel::dkdv, in, listed_tokens, [&]<class T, class Tile>(const TilePlan& plan) {
    static_assert(sizeof(RowStats<Tile::kKeys>) == Tile::kKeys * kRowStatsBytes);
    DkdvArgs<T> a{make_attend<T>(op, in, plan.stages),
                  make_query_view<const T>(in, grad.dout),
                  make_query_view<const float>(in, grad.lse),
                  make_query_view<const float>(in, grad.delta),
                  make_query_view<const float>(in, grad.gate),
                  make_grad_view(out.dk),
                  make_grad_view(out.dv),
                  range,
                  list};
    a.q_bytes = row_bytes(a.in.q, a.in.depth_k);
    a.dout_bytes = row_bytes(a.dout, a.in.depth_v);
    a.whole_rows = a.q_bytes.token > 0 && a.dout_bytes.token > 0;
    const int64_t chunks = ceil_div(std::max(a.dk.width, a.dv.width), Tile::kColumns);
    const auto depth = static_cast<unsigned>(chunks * ceil_div(list.block_keys, Tile::kRows));
    launch(ctx, op, bwd_dkdv_portable_kernel<T, Tile>, dim3(list.pieces, sequences_and_groups, depth),
           dim3(Tile::kThreads), plan.bytes, a);
  });
  if (list.partial == nullptr) return;
  const dim3 grid(list.blocks, sequences_and_groups, ceil_div(list.block_keys, kMergeKeys));
  launch(ctx, op, bwd_dkdv_merge_portable_kernel, grid, dim3(256), 0, make_grad_view(out.dk), make_grad_view(out.dv),
         list, static_cast<int>(in.k.size(2)), range);
}

KeyWorkList contiguous_work(Scratch::Scope& scope, const AttendIn& in, const KeyRange& range) {
  // The goal is kPieces pieces in total, about 8 for each of the 132 SMs of an H100. A block has at most kMostParts
  // pieces, so that scratch grows no faster than T, and T / kLeastTokens, so that pieces do not become too small.
  constexpr int64_t kPieces = 1024, kMostParts = 16, kLeastTokens = 128;
  KeyWorkList list{};
  const int64_t sequences_and_groups = in.k.size(0) * in.k.size(2), blocks = ceil_div(range.keys, kRows);
  if (blocks == 0) return list;
  const int64_t parts = std::min({kMostParts, ceil_div(kPieces, sequences_and_groups * blocks),
                                  std::max<int64_t>(1, in.q.size(1) / kLeastTokens)});
  list.block_keys = kRows;
  list.blocks = static_cast<int>(blocks);
  list.pieces = static_cast<int>(blocks * parts);
  if (parts > 1) {
    const int64_t width = in.k.size(3) + in.v.size(3);
    list.partial = scope.alloc(DType::f32, {sequences_and_groups * blocks * parts, kRows, width}).ptr<float>();
  }
  return list;
}

}  // namespace triad::cuda
