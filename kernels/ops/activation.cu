// SiLU and SwiGLU on the GPU: six elementwise rules, and one kernel that applies a rule to whole tensors. Bound by
// memory: SiLU moves 2 tensors forward and 3 backward, SwiGLU 3 and 5, and one more if backward also writes forward's
// result, which is cheaper than another forward pass. A thread loads two 16-byte vectors from each input before it uses
// them: at 2,048 threads per SM, at least 64 KiB are in flight, twice what memory bandwidth needs. Contiguous rows are
// processed as one long row; otherwise a CTA works within one row. exp and division are approximate (relative error 2
// ulp, and |x| times that), since the exact ones would take longer than the memory accesses.
//
// With a cast to e4m3, a CTA has a row, as the row's largest element is needed before its first byte: threads hold the
// results, rounded to bf16, in registers.
#include <algorithm>
#include <array>

#include "kernels/common/block_order.cuh"
#include "kernels/ops/activation.h"
#include "kernels/ops/cast_e4m3.cuh"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kBatch = 2;

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float silu_slope(float x, float s) { return s * fmaf(x, 1.0f - s, 1.0f); }

struct SiluForward {
  static constexpr int kIn = 1, kOut = 1;
  __device__ static void apply(float (&out)[kOut], const float (&in)[kIn]) { out[0] = in[0] * sigmoid(in[0]); }
};
struct SiluBackward {
  static constexpr int kIn = 2, kOut = 1;
  __device__ static void apply(float (&out)[kOut], const float (&in)[kIn]) {
    const float dy = in[0], x = in[1];
    out[0] = dy * silu_slope(x, sigmoid(x));
  }
};
struct SiluBackwardWithOutput {  // also writes forward's y
  static constexpr int kIn = 2, kOut = 2;
  __device__ static void apply(float (&out)[kOut], const float (&in)[kIn]) {
    const float dy = in[0], x = in[1], s = sigmoid(x);
    out[0] = dy * silu_slope(x, s);
    out[1] = x * s;
  }
};
struct SwigluForward {
  static constexpr int kIn = 2, kOut = 1;
  __device__ static void apply(float (&out)[kOut], const float (&in)[kIn]) {
    const float gate = in[0], up = in[1];
    out[0] = gate * sigmoid(gate) * up;
  }
};
struct SwigluBackward {
  static constexpr int kIn = 3, kOut = 2;
  __device__ static void apply(float (&out)[kOut], const float (&in)[kIn]) {
    const float dy = in[0], gate = in[1], up = in[2], s = sigmoid(gate);
    out[0] = dy * up * silu_slope(gate, s);
    out[1] = dy * gate * s;
  }
};

struct SwigluBackwardWithOutput {  // also writes forward's y
  static constexpr int kIn = 3, kOut = 3;
  __device__ static void apply(float (&out)[kOut], const float (&in)[kIn]) {
    const float dy = in[0], gate = in[1], up = in[2], s = sigmoid(gate);
    out[0] = dy * up * silu_slope(gate, s);
    out[1] = dy * gate * s;
    out[2] = gate * s * up;
  }
};

template <class T, int kCount>
struct Rows {
  T* data[kCount];
  int64_t stride[kCount];
};

// Applies a rule to all elements. An output may be the same tensor as an input, since a thread reads its elements'
// inputs before it writes them.
template <class Rule, class T, int V>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(Rows<T, Rule::kOut> outs, Rows<const T, Rule::kIn> ins, int64_t columns, uint32_t ctas_per_row) {
  const uint32_t block = block_from_end();
  const int64_t row = block / ctas_per_row;
  const int64_t first = (int64_t{block % ctas_per_row} * kBatch * kThreads + threadIdx.x) * V;
  float in[kBatch][Rule::kIn][V];
#pragma unroll
  for (int k = 0; k < kBatch; ++k) {
    const int64_t column = first + k * kThreads * V;
#pragma unroll
    for (int i = 0; i < Rule::kIn; ++i)
      if (column < columns) load_vector<V>(in[k][i], ins.data[i] + row * ins.stride[i] + column);
  }
#pragma unroll
  for (int k = 0; k < kBatch; ++k) {
    const int64_t column = first + k * kThreads * V;
    if (column >= columns) return;
    float out[Rule::kOut][V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      float element_in[Rule::kIn], element_out[Rule::kOut];
#pragma unroll
      for (int i = 0; i < Rule::kIn; ++i) element_in[i] = in[k][i][j];
      Rule::apply(element_out, element_in);
#pragma unroll
      for (int o = 0; o < Rule::kOut; ++o) out[o][j] = element_out[o];
    }
#pragma unroll
    for (int o = 0; o < Rule::kOut; ++o) store_vector<V>(outs.data[o] + row * outs.stride[o] + column, out[o]);
  }
}

template <class Rule>
void apply(Context& ctx, const char* name, std::array<Tensor, Rule::kOut> outs,
           std::array<ConstTensor, Rule::kIn> ins) {
  const auto contiguous = [](const auto& t) { return t.contiguous(); };
  if (std::all_of(outs.begin(), outs.end(), contiguous) && std::all_of(ins.begin(), ins.end(), contiguous)) {
    const Shape flat = {1, outs[0].numel()};
    for (Tensor& t : outs) t = t.view(flat);
    for (ConstTensor& t : ins) t = t.view(flat);
  }
  const int64_t rows = outs[0].size(0), columns = outs[0].size(1);
  dispatch_gpu_float(outs[0].dtype, [&]<class T>() {
    Rows<T, Rule::kOut> out_rows;
    Rows<const T, Rule::kIn> in_rows;
    for (int o = 0; o < Rule::kOut; ++o)
      out_rows.data[o] = outs[o].template ptr<T>(), out_rows.stride[o] = outs[o].stride[0];
    for (int i = 0; i < Rule::kIn; ++i)
      in_rows.data[i] = ins[i].template ptr<T>(), in_rows.stride[i] = ins[i].stride[0];
    const auto vectors = [](const auto& t) { return has_vectors(t, kVector<T>); };
    const bool all_vectors =
        std::all_of(outs.begin(), outs.end(), vectors) && std::all_of(ins.begin(), ins.end(), vectors);
    dispatch_vector<T>(all_vectors, [&]<int V>() {
      const int64_t ctas_per_row = ceil_div(columns, int64_t{kThreads} * kBatch * V);
      launch(ctx, name, activation_kernel<Rule, T, V>, dim3(rows * ctas_per_row), dim3(kThreads), 0, out_rows, in_rows,
             columns, ctas_per_row);
    });
  });
}

// Where a kernel writes e4m3 rows.
struct Cast {
  uint8_t* q = nullptr;
  int64_t stride = 0;
  float* scale = nullptr;
};

// Applies a rule to rows and casts its outputs to e4m3: the first kFirst side by side to `first`, the others, if there
// are any, to `second`. A row's casts may overwrite its inputs, since the CTA has read them all. With 512 threads, 70
// registers would leave room for one CTA alone, whose loads and stores do not overlap.
template <class Rule, int kFirst>
constexpr int kCastsOf = Rule::kOut > kFirst ? 2 : 1;
template <class Rule, int kFirst, int kHeld>
__global__ void __launch_bounds__(512, kCastsOf<Rule, kFirst> == 2 && kHeld == 2 ? 2 : 0)
    activation_e4m3_kernel(Cast first, Cast second, Rows<const __nv_bfloat16, Rule::kIn> ins, int64_t columns) {
  constexpr int V = kE4m3Vector, kCasts = kCastsOf<Rule, kFirst>;
  const int64_t row = block_from_end();
  const int vectors = static_cast<int>(columns / V);
  uint4 in[kHeld][Rule::kIn], held[kHeld][Rule::kOut];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int at = threadIdx.x + k * blockDim.x;
#pragma unroll
    for (int i = 0; i < Rule::kIn; ++i)
      in[k][i] = at < vectors ? *reinterpret_cast<const uint4*>(ins.data[i] + row * ins.stride[i] + at * V) : uint4{};
  }
  uint32_t largest[kCasts] = {};
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    float x[Rule::kIn][V], out[Rule::kOut][V];
#pragma unroll
    for (int i = 0; i < Rule::kIn; ++i) as_floats<__nv_bfloat16>(x[i], in[k][i]);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      float element_in[Rule::kIn], element_out[Rule::kOut];
#pragma unroll
      for (int i = 0; i < Rule::kIn; ++i) element_in[i] = x[i][j];
      Rule::apply(element_out, element_in);
#pragma unroll
      for (int o = 0; o < Rule::kOut; ++o) out[o][j] = element_out[o];
    }
#pragma unroll
    for (int o = 0; o < Rule::kOut; ++o) {
      uint32_t& its = largest[o < kFirst ? 0 : kCasts - 1];
      held[k][o] = packed(out[o]), its = max(its, largest_of(held[k][o]));
    }
  }
  block_largest(largest);
  const E4m3Scale first_scale(largest[0]), second_scale(largest[kCasts - 1]);
  if (threadIdx.x == 0) {
    first.scale[row] = first_scale.value();
    if (kCasts > 1) second.scale[row] = second_scale.value();
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int at = threadIdx.x + k * blockDim.x;
    if (at >= vectors) return;
#pragma unroll
    for (int o = 0; o < Rule::kOut; ++o) {
      uint8_t* const to = o < kFirst ? first.q + row * first.stride + o * columns
                                     : second.q + row * second.stride + (o - kFirst) * columns;
      *reinterpret_cast<uint2*>(to + at * V) =
          o < kFirst ? first_scale.cast(held[k][o]) : second_scale.cast(held[k][o]);
    }
  }
}

// Returns false and does nothing if rows are too long or not aligned.
template <class Rule, int kFirst>
bool apply_e4m3(Context& ctx, const char* name, const std::array<E4m3Rows, kCastsOf<Rule, kFirst>>& casts,
                const std::array<ConstTensor, Rule::kIn>& ins) {
  Rows<const __nv_bfloat16, Rule::kIn> in_rows{};
  Cast to[2];
  for (size_t i = 0; i < casts.size(); ++i) {
    if (!is_aligned(casts[i].q) || casts[i].q.stride[0] % kE4m3Vector != 0) return false;
    to[i] = {casts[i].q.template ptr<uint8_t>(), casts[i].q.stride[0], casts[i].scale.template ptr<float>()};
  }
  for (int i = 0; i < Rule::kIn; ++i) {
    if (!has_vectors(ins[i], kE4m3Vector)) return false;
    in_rows.data[i] = ins[i].template ptr<__nv_bfloat16>(), in_rows.stride[i] = ins[i].stride[0];
  }
  const int64_t rows = ins[0].size(0), columns = ins[0].size(1);
  if (columns == 0 || columns > kFusedCastColumns) return false;
  return dispatch_held_vectors(columns / kE4m3Vector, [&]<int kHeld>(unsigned threads) {
    if constexpr (kHeld <= 4)  // more, for rows of more than kFusedCastColumns, would need too many registers
      launch(ctx, name, activation_e4m3_kernel<Rule, kFirst, kHeld>, dim3(static_cast<unsigned>(rows)), dim3(threads),
             0, to[0], to[1], in_rows, columns);
  });
}

}  // namespace

bool silu_forward_e4m3(Context& ctx, const E4m3Rows& y, const ConstTensor& x) {
  return apply_e4m3<SiluForward, 1>(ctx, "silu forward e4m3", {y}, {x});
}
bool swiglu_forward_e4m3(Context& ctx, const E4m3Rows& y, const ConstTensor& gate, const ConstTensor& up) {
  return apply_e4m3<SwigluForward, 1>(ctx, "swiglu forward e4m3", {y}, {gate, up});
}
bool silu_backward_e4m3(Context& ctx, const E4m3Rows& dx, const E4m3Rows& y, const ConstTensor& dy,
                        const ConstTensor& x) {
  return apply_e4m3<SiluBackwardWithOutput, 1>(ctx, "silu backward e4m3", {dx, y}, {dy, x});
}
bool swiglu_backward_e4m3(Context& ctx, const E4m3Rows& dpre, const E4m3Rows& y, const ConstTensor& dy,
                          const ConstTensor& gate, const ConstTensor& up) {
  return apply_e4m3<SwigluBackwardWithOutput, 2>(ctx, "swiglu backward e4m3", {dpre, y}, {dy, gate, up});
}

void silu_forward(Context& ctx, Tensor y, ConstTensor x) { apply<SiluForward>(ctx, "silu forward", {y}, {x}); }
void silu_backward(Context& ctx, Tensor dx, ConstTensor dy, ConstTensor x, Tensor y) {
  if (y.empty()) return apply<SiluBackward>(ctx, "silu backward", {dx}, {dy, x});
  apply<SiluBackwardWithOutput>(ctx, "silu backward", {dx, y}, {dy, x});
}
void swiglu_forward(Context& ctx, Tensor y, ConstTensor gate, ConstTensor up) {
  apply<SwigluForward>(ctx, "swiglu forward", {y}, {gate, up});
}
void swiglu_backward(Context& ctx, Tensor dgate, Tensor dup, ConstTensor dy, ConstTensor gate, ConstTensor up,
                     Tensor y) {
  if (y.empty()) return apply<SwigluBackward>(ctx, "swiglu backward", {dgate, dup}, {dy, gate, up});
  apply<SwigluBackwardWithOutput>(ctx, "swiglu backward", {dgate, dup, y}, {dy, gate, up});
}

}  // namespace triad::cuda
