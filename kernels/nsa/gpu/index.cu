// The portable kernels of a taught index (formulas: nsa/index.h), for any card, f32 and bf16, and any head widths whose
// tiles fit into shared memory.
//
// Forward: a warp computes the student's lse of one row. A lane has one key at a time, and its own running maximum and
// sum; they are merged at the end.
//
// Backward: a CTA owns some keys of a block and loops over the tokens that see the block, as many at a time as have 16
// query rows together:
//   1. scores of the group's heads by the product of one warp's 16 rows (tensor cores in bf16); probabilities in shared
//      memory, and their mean, the teacher;
//   2. the student's scores, the loss and ds = Q - P, a thread for each key;
//   3. dik += ds iq in registers, and diq += ds ik, which is added to sums in global memory (nsa/gpu/index.cuh).
// The teacher is thus computed once.
//
// Bound: the latency of a step's four phases; several CTAs per SM overlap them.
#include "kernels/common/bthd.cuh"
#include "kernels/common/shared_limits.h"
#include "kernels/nsa/gpu/index.cuh"

namespace triad::cuda {
namespace {

// ---- forward ----

constexpr int kMostIndexWidth = 256;

template <class T>
struct IndexForwardArgs {
  IndexView<T> in;
  View<float> lse;
  SelectedKeys keys;  // lists.data == nullptr: no lists
  int first_token, tokens, groups;
};

// Calls visit(begin, end) with the keys that the row of token t sees: one range for each block of its list.
template <class Visit>
__device__ __forceinline__ void for_key_ranges(const SelectedKeys& keys, int b, int t, int g, Visit visit) {
  const DocumentRange range(keys.range, b);
  if (keys.lists.data == nullptr) return visit(range.low(t), range.high(t));
  const int* list = keys.lists.at(b, t, g);
  for (int i = 0; i < keys.lists.n && list[i] >= 0; ++i) {
    const int begin = max(range.low(t), range.row().block_begin(list[i], keys.block_keys));
    visit(begin, min(range.row().block_end(list[i], keys.block_keys), t + 1));
  }
}

// Grid: x the rows of a sequence, one for each warp; y the sequence. kVectors: elements that one load fetches.
template <class T, int kVectors>
__global__ void __launch_bounds__(kThreads) index_forward_kernel(const __grid_constant__ IndexForwardArgs<T> a) {
  __shared__ float queries[kWarps][kMostIndexWidth];
  const int lane = threadIdx.x % 32, row = blockIdx.x * kWarps + static_cast<int>(threadIdx.x) / 32, b = blockIdx.y;
  const int t = a.first_token + row / a.groups, g = row % a.groups, di = a.in.q.width;
  if (t >= a.tokens) return;
  float* const q = queries[threadIdx.x / 32];
  for (int i = lane; i < di; i += 32) q[i] = to_float(a.in.q.at(b, t, g)[i]) * (a.in.scale * kLogUnits<T>);
  __syncwarp();
  float most = -INFINITY, sum = 0.0f;
  for_key_ranges(a.keys, b, t, g, [&](int begin, int end) {
    for (int key = begin + lane; key < end; key += 32) {
      const T* k = a.in.k.at(b, key, 0);
      float s = 0.0f;
      for (int i = 0; i < di; i += kVectors) {
        float x[kVectors];
        load_vector<kVectors>(x, k + i);
#pragma unroll
        for (int j = 0; j < kVectors; ++j) s = fmaf(q[i + j], x[j], s);
      }
      const float higher = fmaxf(most, s);
      if (higher == -INFINITY) continue;
      sum = sum * index_exp<T>(most - higher) + index_exp<T>(s - higher);
      most = higher;
    }
  });
  const float all = warp_max(most);
  sum = warp_sum(all == -INFINITY ? 0.0f : sum * index_exp<T>(most - all));
  if (lane == 0) *a.lse.at(b, t, g) = sum > 0.0f ? all / kLogUnits<T> + logf(sum) : -INFINITY;
}

// ---- backward ----

constexpr int kStepRows = 16;  // query rows of a step
// Keys of a CTA, of which each warp multiplies a quarter. More would not fit into shared memory in f32.
template <class T>
inline constexpr int kTaughtKeys = std::is_same_v<T, float> ? 32 : 64;

// The CTA's shared memory. Rows of tiles are padded (tile_stride).
template <class T>
struct TaughtShared {
  static constexpr int kKeys = kTaughtKeys<T>;
  T *k, *q;                         // [kKeys] and [kStepRows] rows of dk, with zeros up to a multiple of kDepth
  T* ik;                            // [kKeys, di] with index_stride(di)
  float* iq;                        // [tokens of a step, di]
  float (*p)[kKeys], (*ds)[kKeys];  // [kStepRows]: probabilities of query rows; teacher, then ds, of tokens
  float* lse;                       // [kStepRows]
  // Of the tokens of a step: the token, the keys that it sees, its lse; a token that does not count sees none.
  int* token;
  int2* range;
  float* index_lse;

  // An odd stride, in elements: the threads of a warp read one column of neighbouring keys.
  __host__ __device__ static int index_stride(int di) { return di | 1; }
  static int64_t bytes(int depth, int di, int tokens) {
    return (int64_t{kKeys} + kStepRows) * tile_stride<T>(depth) * static_cast<int64_t>(sizeof(T)) +
           int64_t{4} * (tokens * di + 2 * kStepRows * kKeys) + kStepRows * 20 +
           int64_t{kKeys} * index_stride(di) * static_cast<int64_t>(sizeof(T));
  }
  __device__ TaughtShared(int depth, int di, int tokens) {
    k = reinterpret_cast<T*>(dynamic_shared());
    q = k + kKeys * tile_stride<T>(depth);
    p = reinterpret_cast<float(*)[kKeys]>(q + kStepRows * tile_stride<T>(depth));
    ds = p + kStepRows;
    range = reinterpret_cast<int2*>(ds + kStepRows);
    lse = reinterpret_cast<float*>(range + kStepRows);
    index_lse = lse + kStepRows;
    token = reinterpret_cast<int*>(index_lse + kStepRows);
    iq = reinterpret_cast<float*>(token + kStepRows);
    ik = reinterpret_cast<T*>(iq + tokens * di);
  }
};

// Grid: x the piece of work, y the keys of its block, z the sequence and group. kColumns: the columns of dik that a
// thread sums, of one key.
template <class T, int kColumns>
__global__ void __launch_bounds__(kThreads) index_backward_kernel(const __grid_constant__ IndexBackwardArgs<T> a) {
  constexpr int kKeys = kTaughtKeys<T>, kWarpKeys = kKeys / kWarps, kParts = kThreads / kKeys;
  const int bg = blockIdx.z, b = bg / a.in.groups, g = bg % a.in.groups, G = a.in.heads.value(), di = a.index.q.width;
  const DocumentRange range(a.range, b);
  const KeyWork work =
      find_work(a.list, range, a.range.keys, a.in.tokens, blockIdx.x, bg, a.sequences_and_groups, a.in.first_token);
  const int2 block = keys_of_block(a.list, a.range, b, work.block);
  const int key0 = block.x + static_cast<int>(blockIdx.y) * kKeys, keys = min(block.y - key0, kKeys);
  if (work.count <= 0 || keys <= 0) return;

  const int step_tokens = max(1, kStepRows / G), stride_k = tile_stride<T>(a.in.depth_k);
  const TaughtShared<T> shared(a.in.depth_k, di, step_tokens);
  const int stride_i = shared.index_stride(di), warp = threadIdx.x / 32;
  load_rows<kKeys>(shared.k, stride_k, a.in.depth_k, a.in.k,
                   [&](int r) { return r < keys ? a.in.k.at(b, key0 + r, g) : nullptr; });
  for (int r = warp; r < kKeys; r += kWarps)
    for (int i = threadIdx.x % 32; i < di; i += 32)
      shared.ik[r * stride_i + i] = r < keys ? a.index.k.at(b, key0 + r, 0)[i] : from_float<T>(0.0f);

  const int my_key = threadIdx.x % kKeys, my_part = threadIdx.x / kKeys, my_columns = ceil_div(di, kParts),
            my_first = my_part * my_columns;
  float dik[kColumns] = {};
  double loss = 0;
  const float score_units = a.in.scale * kLogUnits<T>, index_units = a.index.scale * kLogUnits<T>, share = 1.0f / G,
              factor = static_cast<float>(a.scale.value()) * a.index.scale;
  const int* const listed = a.list.tokens == nullptr ? nullptr : a.list.tokens + bg * a.list.tokens_stride + work.first;
  for (int token0 = 0; token0 < work.count; token0 += step_tokens) {
    const int tokens = min(step_tokens, work.count - token0);
    const auto token_at = [&](int i) { return listed != nullptr ? listed[token0 + i] : work.first + token0 + i; };
    __syncthreads();  // all threads have finished the step before
    if (static_cast<int>(threadIdx.x) < tokens) {
      const int t = token_at(threadIdx.x);
      const bool counts = a.counts(b, t);
      shared.token[threadIdx.x] = t;
      shared.range[threadIdx.x] = make_int2(range.low(t) - key0, counts ? min(range.high(t) - key0, keys) : INT_MIN);
      shared.index_lse[threadIdx.x] = *a.index_lse.at(b, t, g) * kLogUnits<T>;
    }
    for (int r = warp; r < tokens; r += kWarps)
      for (int i = threadIdx.x % 32; i < di; i += 32)
        shared.iq[r * di + i] = to_float(a.index.q.at(b, token_at(r), g)[i]);
    for (int i = threadIdx.x; i < tokens * kKeys; i += kThreads) shared.ds[i / kKeys][i % kKeys] = 0.0f;
    for (int head0 = 0; head0 < G; head0 += kStepRows) {  // more than one turn only for one token of more heads
      const int rows = min(kStepRows, tokens * G - head0);
      const auto at = [&](const auto& view, int r) {
        const int i = (head0 + r) / G;
        return view.at(b, token_at(i), g * G + head0 + r - i * G);
      };
      load_rows<kStepRows>(shared.q, stride_k, a.in.depth_k, a.in.q,
                           [&](int r) { return r < rows ? at(a.in.q, r) : nullptr; });
      if (static_cast<int>(threadIdx.x) < kStepRows)
        shared.lse[threadIdx.x] =
            static_cast<int>(threadIdx.x) < rows ? *at(a.lse, threadIdx.x) * kLogUnits<T> : INFINITY;
      copy_async_wait();
      __syncthreads();
      float s[kWarpKeys / 8][4] = {};
      multiply_nt<kWarpKeys>(s, shared.q, shared.k + warp * kWarpKeys * stride_k, stride_k, a.in.depth_k);
#pragma unroll
      for (int j = 0; j < kWarpKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int r = fragment_row() + e / 2 * 8;
          shared.p[r][warp * kWarpKeys + 8 * j + fragment_column() + e % 2] =
              index_exp<T>(s[j][e] * score_units - shared.lse[r]);
        }
      __syncthreads();
      for (int i = threadIdx.x; i < tokens * kKeys; i += kThreads) {
        const int first = i / kKeys * G;
        float sum = 0.0f;
        for (int r = max(first - head0, 0); r < min(first + G - head0, rows); ++r) sum += shared.p[r][i % kKeys];
        shared.ds[i / kKeys][i % kKeys] += sum;
      }
      if (head0 + kStepRows < G) __syncthreads();
    }
    float kl = 0.0f;
    for (int i = threadIdx.x; i < tokens * kKeys; i += kThreads) {  // the same thread has just summed the element
      const int r = i / kKeys, key = i % kKeys;
      const int2 seen = shared.range[r];
      float ds = 0.0f;
      if (key >= seen.x && key < seen.y) {
        float s = 0.0f;
        for (int c = 0; c < di; ++c) s = fmaf(shared.iq[r * di + c], to_float(shared.ik[key * stride_i + c]), s);
        ds = learn<T>(shared.ds[r][key] * share, s * index_units - shared.index_lse[r], kl);
      }
      shared.ds[r][key] = ds;
    }
    loss += static_cast<double>(kl);
    __syncthreads();
    for (int r = 0; r < tokens; ++r) {
      const float ds = shared.ds[r][my_key];
      const float* q = shared.iq + r * di;
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        if (i < my_columns && my_first + i < di) dik[i] = fmaf(ds, q[my_first + i], dik[i]);
    }
    for (int i = threadIdx.x; i < tokens * di; i += kThreads) {
      const int r = i / di, c = i - r * di, t = shared.token[r];
      float sum = 0.0f;
      for (int key = 0; key < keys; ++key) sum = fmaf(shared.ds[r][key], to_float(shared.ik[key * stride_i + c]), sum);
      const float most = a.sums.bounds.key(b, range.row().begin(t));
      if constexpr (std::is_same_v<T, float>)
        FixedPoint(most, 1).add(a.sums.dq + ((int64_t{b} * a.in.tokens + t) * a.in.groups + g) * di + c, sum);
      else
        atomicAdd(a.dq.at(b, t, g) + c, round_to_unit(sum * factor, 1.0f, diq_unit(most, fabsf(factor))));
    }
  }
  if (my_key < keys) {
    const int key = key0 + my_key;
    const FixedPoint point(a.sums.bounds.query(b, range.row().begin(key)), int64_t{a.in.tokens} * a.in.groups);
    int64_t* const to = a.sums.dk + (int64_t{b} * a.in.tokens + key) * di + my_first;
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (i < my_columns && my_first + i < di) point.add(to + i, dik[i]);
  }
  __shared__ double losses[kWarps];
  loss = warp_sum_to_lane0(loss);
  if (threadIdx.x % 32 == 0) losses[warp] = loss;
  __syncthreads();
  if (threadIdx.x == 0) {
    double sum = 0;
    for (int i = 0; i < kWarps; ++i) sum += losses[i];
    const int64_t cta = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    a.sums.losses[cta] = sum / static_cast<double>(kLogUnits<T>);
  }
}

template <class F>
void dispatch_columns(int64_t columns, F&& f) {
  if (columns <= 16) return f.template operator()<16>();
  if (columns <= 32) return f.template operator()<32>();
  if (columns <= 64) return f.template operator()<64>();
  return f.template operator()<128>();
}

void check_width(const char* op, int64_t di) {
  TRIAD_CHECK(di <= kMostIndexWidth, "{}: an index of width {}, at most {} on a GPU", op, di, kMostIndexWidth);
}

}  // namespace

SelectedKeys make_taught_keys(const char* op, const AttendIn& in, const ConstTensor& block_index, int64_t l_sel) {
  if (!block_index.empty()) return make_selected_keys(op, in, block_index, l_sel);
  const auto tokens = static_cast<int>(end_token(in));
  return {.range = {.window = tokens, .l = 1, .d = 1, .keys = tokens, .documents = document_view(in.documents, tokens)},
          .lists = {},
          .block_keys = 0};
}

KeyWorkList make_taught_work(Context& ctx, Scratch::Scope& scope, const char* op, const AttendIn& in,
                             const SelectedKeys& keys, const PiecePlan& plan, int block_keys, int64_t parts) {
  if (keys.lists.data != nullptr) return build_inverse_index(ctx, scope, op, in, keys, plan, /*has_partial=*/false);
  KeyWorkList list{};
  list.block_keys = block_keys;
  list.blocks = ceil_div(keys.range.keys, block_keys);
  list.pieces = static_cast<int>(list.blocks * parts);
  return list;
}

void index_forward_portable(Context& ctx, const IndexForward& index, const AttendIn& in, const ConstTensor& block_index,
                            int64_t l_sel) {
  const char* const op = "nsa_index_forward";
  check_width(op, index.in.q.size(3));
  const int64_t rows = in.q.size(1) * in.k.size(2);
  TRIAD_CHECK(rows < (int64_t{1} << 31) - kWarps, "{}: T = {} times {} groups does not fit 31 bits", op, in.q.size(1),
              in.k.size(2));
  dispatch_gpu_float(index.in.q.dtype, [&]<class T>() {
    const IndexForwardArgs<T> a{make_index_view<T>(index.in, in),
                                make_query_view<float>(in, index.lse),
                                make_taught_keys(op, in, block_index, l_sel),
                                static_cast<int>(first_token(in)),
                                static_cast<int>(end_token(in)),
                                static_cast<int>(in.k.size(2))};
    dispatch_vector<T>(has_vectors(index.in.k, kVector<T>), [&]<int kVectors>() {
      launch(ctx, op, index_forward_kernel<T, kVectors>, dim3(ceil_div(rows, kWarps), in.q.size(0)), dim3(kThreads), 0,
             a);
    });
  });
}

void index_backward_portable(Context& ctx, const IndexBackward& index, const AttendIn& in, const ConstTensor& lse,
                             const ConstTensor& block_index, int64_t l_sel) {
  const char* const op = "nsa_index_backward";
  constexpr int64_t kMostTokens = 512, kParts = 8;  // tokens of a piece; pieces of a block without lists
  const int64_t di = index.in.q.size(3), bgs = in.k.size(0) * in.k.size(2), G = in.q.size(2) / in.k.size(2);
  check_width(op, di);
  Scratch::Scope scope(ctx.scratch);
  const SelectedKeys keys = make_taught_keys(op, in, block_index, l_sel);
  dispatch_gpu_float(index.in.q.dtype, [&]<class T>() {
    constexpr int kKeys = kTaughtKeys<T>;
    const KeyWorkList list = make_taught_work(ctx, scope, op, in, keys, {8, 8, kMostTokens}, kKeys,
                                              std::clamp<int64_t>(in.q.size(1) / kMostTokens, 1, kParts));
    const dim3 grid(list.pieces, ceil_div(list.block_keys, kKeys), bgs);
    const IndexSums sums =
        make_index_sums(ctx, scope, index, in, int64_t{grid.x} * grid.y * grid.z, std::is_same_v<T, float>);
    const IndexBackwardArgs<T> a = make_backward_args<T>(op, index, in, lse, keys.range, list, sums);
    const int64_t bytes = TaughtShared<T>::bytes(a.in.depth_k, static_cast<int>(di),
                                                 static_cast<int>(std::max<int64_t>(1, kStepRows / G)));
    check_shared(ctx, op, bytes, "heads of {} and an index of {} in {}", in.q.size(3), di, name_of(in.q.dtype));
    dispatch_columns(ceil_div(di, kThreads / kKeys), [&]<int kColumns>() {
      launch(ctx, op, index_backward_kernel<T, kColumns>, grid, dim3(kThreads), bytes, a);
    });
    finish_index_sums(ctx, sums, index, in);
  });
}

}  // namespace triad::cuda
