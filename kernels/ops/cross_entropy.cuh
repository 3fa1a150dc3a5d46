// What the cross-entropy kernels share: exponential sums, and the single pass over rows held in shared memory.
#pragma once
#include <cfloat>

#include "kernels/common/bthd.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/ops/cross_entropy.h"

namespace triad::cuda {

inline constexpr int kResidentThreads = 1024, kResidentWarps = kResidentThreads / 32;

// A partial sum of exp(x) over logits, held as sum * exp(max). max starts at the lowest float rather than -inf, since
// -inf - -inf is NaN.
struct ExpSum {
  float max = -FLT_MAX, sum = 0;

  // Adds exp(x) for values x that do not exceed max. x - max is exact for bf16 logits.
  template <int V>
  __device__ void add_below(const float (&x)[V]) {
    float e[V];
#pragma unroll
    for (int j = 0; j < V; ++j) e[j] = exp2_approx((x[j] - max) * kLog2e);
#pragma unroll
    for (int step = 1; step < V; step *= 2)
#pragma unroll
      for (int j = 0; j < V; j += 2 * step) e[j] += e[j + step];
    sum += e[0];
  }
  __device__ void add(float x) {
    rescale(fmaxf(max, x));
    const float one[1] = {x};
    add_below(one);
  }
  __device__ void rescale(float new_max) {
    if (new_max == max) return;
    sum *= exp2_approx((max - new_max) * kLog2e);
    max = new_max;
  }
  __device__ void add(ExpSum other) {
    rescale(fmaxf(max, other.max));
    other.rescale(max);
    sum += other.sum;
  }
  // Merges the sums in the warp's 32 lanes; every lane gets the result.
  __device__ void merge_warp() {
    rescale(warp_max(max));
    sum = warp_sum(sum);
  }
};

// V adjacent logits in registers, as loaded; V is 1 or fills 16 bytes.
template <class T, int V>
struct LogitVector {
  using Raw = std::conditional_t<V == 1, T, uint4>;
  Raw raw;

  __device__ void load(const T* p) { raw = *reinterpret_cast<const Raw*>(p); }
  // Sets all elements to -inf, which changes neither a maximum nor an exponential sum.
  __device__ void set_lowest() {
    const uint32_t word = std::is_same_v<T, float> ? 0xff800000u : 0xff80ff80u;
    if constexpr (V > 1)
      raw = make_uint4(word, word, word, word);
    else if constexpr (std::is_same_v<T, float>)
      raw = __uint_as_float(word);
    else
      raw = __ushort_as_bfloat16(word & 0xffff);
  }
  __device__ void unpack(float (&x)[V]) const { load_vector<V>(x, reinterpret_cast<const T*>(&raw)); }
  __device__ float max() const {
    if constexpr (V > 1 && std::is_same_v<T, __nv_bfloat16>) {  // one instruction computes two maxima
      const auto pair = [](uint32_t word) { return reinterpret_cast<const __nv_bfloat162&>(word); };
      const __nv_bfloat162 top = __hmax2(__hmax2(pair(raw.x), pair(raw.y)), __hmax2(pair(raw.z), pair(raw.w)));
      return fmaxf(__low2float(top), __high2float(top));
    } else {
      float x[V];
      unpack(x);
      float top = x[0];
#pragma unroll
      for (int j = 1; j < V; ++j) top = fmaxf(top, x[j]);
      return top;
    }
  }
};

// The partial sums from a CTA's warps, in shared memory. Every thread in the CTA computes the merged sum.
template <int kWarps>
struct WarpSums {
  static constexpr int kCtas = 1;  // CTAs whose warps take part
  float max[kWarps], sum[kWarps];

  // A warp passes its sum, which all lanes have.
  __device__ void put(const ExpSum& merged) {
    if (threadIdx.x % 32 == 0) max[threadIdx.x / 32] = merged.max, sum[threadIdx.x / 32] = merged.sum;
  }
  // Blocks until all warps have put their sums. The phase is unused here; ClusterSums (cross_entropy_sm90.cu) needs it.
  __device__ void wait(unsigned) { __syncthreads(); }
  __device__ ExpSum merge() const {
    ExpSum part;
    const int lane = threadIdx.x % 32;
    if (lane < kWarps) part = {max[lane], sum[lane]};
    part.merge_warp();
    return part;
  }
};

// A row's loss. Computes max - x + log(sum) rather than lse - x: for logits near 1e4, lse has lost the digits that the
// difference keeps.
__device__ __forceinline__ float loss_of(const ExpSum& row, float target_logit) {
  return (row.max - target_logit) + logf(row.sum);
}

// The sizes of logits and their gradient; row strides in elements.
struct LogitsShape {
  int64_t rows, vocab, columns, stride, dlogits_stride;
};

// Computes the loss and gradient for all rows. A row is held in shared memory either by one 1,024-thread CTA, or by a
// cluster of such CTAs: the cluster's CTA c then holds the columns from c * part_columns on, at most part_columns of
// them. There is room for one or two rows at a time, as `buffers` says. Rows are processed from last to first
// (common/block_order.cuh): cluster (or CTA) i among n processes the rows R - 1 - i, R - 1 - i - n, ..., where R is the
// row count. For each row
//   every thread sums exp(x) over its vectors, which it has copied to shared memory itself;
//   the warps in the CTA, or in all of the cluster's CTAs, exchange their sums through `sums`;
//   every thread writes its vectors' gradient; the thread that has the target's logit also writes the loss.
// With two buffers, the next row is copied to one while the other is in use.
template <class T, class Sums>
__device__ __forceinline__ void process_resident_rows(Sums (&sums)[2], float* __restrict__ loss, T* dlogits,
                                                      const T* logits, const LogitsShape& shape,
                                                      const int32_t* __restrict__ targets, int buffers,
                                                      int part_columns, LossScale loss_scale) {
  const auto scale = static_cast<float>(loss_scale.value());
  constexpr int V = kVector<T>;
  T* const buffer = reinterpret_cast<T*>(dynamic_shared());
  // This CTA has the columns from `begin` on. vocab, columns and the target's position `at` count from `begin`; if `at`
  // is outside [0, vocab), another CTA has the target.
  const int cta = static_cast<int>(blockIdx.x) % Sums::kCtas, begin = cta * part_columns;
  const auto columns_here = [&](int64_t all) { return min(max(static_cast<int>(all) - begin, 0), part_columns); };
  const int vocab = columns_here(shape.vocab), columns = columns_here(shape.columns);
  const int64_t first_row = shape.rows - 1 - blockIdx.x / Sums::kCtas, row_step = gridDim.x / Sums::kCtas;
  const int mine = threadIdx.x * V;
  constexpr int kStep = kResidentThreads * V;
  const auto target_of = [&](int64_t row) { return row >= 0 ? targets[row] : -1; };
  const auto load = [&](T* to, int64_t row, int target) {
    const T* const x = logits + row * shape.stride + begin;
    if (target >= 0)
      for (int c = mine; c < vocab; c += kStep) copy_async_16(to + c, x + c, 16);
    copy_async_commit();
  };

  int parity = 0, target = target_of(first_row), next_target = target_of(first_row - row_step);
  unsigned phase = 0;  // the parity of the sums[parity] phase that this row completes
  load(buffer, first_row, target);
  for (int64_t row = first_row; row >= 0; row -= row_step, parity ^= 1) {
    const T* const x = buffer + parity * (buffers - 1) * columns;
    if (buffers == 2) {
      load(buffer + (parity ^ 1) * columns, row - row_step, next_target);
      copy_async_wait_group<1>();
    } else {
      copy_async_wait_group<0>();
    }
    const int far_target = target_of(row - 2 * row_step);
    ExpSum part;
    if (target >= 0) {
      // The thread's maximum is found first: with so few vectors, rescaling a running sum would cost as much as the
      // sum.
      const int whole_vectors = vocab / V * V;
#pragma unroll 4
      for (int c = mine; c < whole_vectors; c += kStep) {
        LogitVector<T, V> v;
        v.load(x + c);
        part.max = fmaxf(part.max, v.max());
      }
#pragma unroll 2
      for (int c = mine; c < whole_vectors; c += kStep) {
        float v[V];
        load_vector<V>(v, x + c);
        part.add_below(v);
      }
      if (whole_vectors % kStep == mine)  // the last vocab % V logits are this thread's
        for (int j = whole_vectors; j < vocab; ++j) part.add(to_float(x[j]));
    }
    part.merge_warp();
    // One wait per row suffices. Rows alternate between sums[0] and sums[1]. A warp overwrites this row's sums two rows
    // later, after it has waited for all of the next row's sums. Each warp puts those after the shuffles in this row's
    // merge(), which need all that its lanes have read.
    sums[parity].put(part);
    sums[parity].wait(phase);
    phase ^= parity;
    const ExpSum whole = sums[parity].merge();
    const int at = target - begin;
    const bool has_target =
        0 <= at && at < vocab && at % kStep / V == threadIdx.x;  // the target is this thread's logit
    if (has_target) loss[row] = loss_of(whole, to_float(x[at]));
    if (target < 0 && cta == 0 && threadIdx.x == 0) loss[row] = 0.0f;
    // Computes scale * exp(x - max) / sum, with x - max exact. The target's entry is corrected afterwards.
    const float log2_sum = log2f(whole.sum);
    const auto p = [&](float value) { return exp2_approx(fmaf(value - whole.max, kLog2e, -log2_sum)); };
    const int live = target < 0 ? 0 : vocab;  // columns that have a gradient
    T* const dx = dlogits + row * shape.dlogits_stride + begin;
    for (int c = mine; c < columns; c += kStep) {
      float v[V];
      if (c + V <= live) {
        load_vector<V>(v, x + c);
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] = scale * p(v[j]);
      } else {
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] = c + j < live ? scale * p(to_float(x[c + j])) : 0.0f;
      }
      store_vector<V>(dx + c, v);
    }
    if (has_target) dx[at] = from_float<T>(scale * (p(to_float(x[at])) - 1.0f));
    if (buffers == 1) load(buffer, row - row_step, next_target);
    target = next_target;
    next_target = far_target;
  }
  copy_async_wait_group<0>();
}

}  // namespace triad::cuda
