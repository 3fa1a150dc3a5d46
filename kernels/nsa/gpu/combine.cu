// The branches' gated sum, and its backward, on the GPU. All kernels are bound by memory bandwidth.
//   forward: out = sum over branches: gate * o. Each thread computes one vector of out, 16 bytes if alignment allows.
//   backward: per branch, the row products a = dout . o give delta = gate * a, and dgate, a summed over a group's
//   heads.
//             A few lanes compute all heads for one token and group (delta_cluster_kernel). If a row does not consist
//             of at most 32 16-byte vectors, a few lanes compute one head, and heads are summed through shared memory
//             (delta_kernel).
//   attention_delta, for attention without a gate: the backward kernels with one branch.
#include <algorithm>
#include <limits>

#include "kernels/common/block_order.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/nsa/gpu/combine.cuh"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;

// The three branches' outputs o, or one branch's.
template <class T>
struct Branches {
  Bthd<const T> o[3];
};
template <class T>
Branches<T> branches(const std::array<ConstTensor, 3>& o) {
  return {{bthd<T>(o[0]), bthd<T>(o[1]), bthd<T>(o[2])}};
}

// The gated sum. A thread computes one of out's `count` vectors of V elements; a row (b, t, h) has `vectors` vectors,
// and neighbouring threads compute neighbouring ones. tokens: T; heads: Hq; group: query heads per group.
template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    combine_forward_kernel(Bthd<T> out, Branches<T> in, Planes<const float> gate, int64_t tokens, int heads, int group,
                           int vectors, int64_t count) {
  const int64_t i = int64_t{block_from_end()} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int row_vectors = heads * vectors;
  const int64_t token = i / row_vectors, b = token / tokens, t = token % tokens;
  const int in_row = static_cast<int>(i % row_vectors), h = in_row / vectors, column = in_row % vectors * V;
  float o[3][V], sum[V], g[3];
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    load_vector<V>(o[k], in.o[k].row(b, t, h) + column);
    g[k] = gate.at(k, b, t, h / group);
  }
  gated_sum(sum, g, o);
  store_vector<V>(out.row(b, t, h) + column, sum);
}

// Sizes for delta_cluster_kernel. A cluster is the group of `lanes` neighbouring lanes in a warp that computes one
// token and group. The kernel loads kHeads of its cluster's heads at a time.
constexpr int kHeads = 2, kClusterThreads = 128;

struct ClusterShape {
  uint32_t clusters, T;  // cluster count: all sequences' tokens times groups; tokens per sequence
  int groups, heads;     // groups per token; heads per group
  int vectors, lanes;    // 16-byte vectors per row; lanes per cluster: `vectors` rounded up to a power of two, <= 32
};

// Backward of the gated sum for rows with at most 32 vectors, one vector per lane. Writes delta, dgate, and, where the
// arguments have data, dout's norms and forward's out. The sum over a group's heads stays in registers. kBranches = 1:
// one branch without a gate, and no dgate.
template <class T, int kBranches>
__global__ void __launch_bounds__(kClusterThreads, 5)
    delta_cluster_kernel(Planes<float> dgate, Planes<float> delta, Planes<float> norm, Bthd<T> out, Bthd<const T> dout,
                         Branches<T> in, Planes<const float> gate, ClusterShape s) {
  constexpr int V = kVector<T>;
  const uint32_t cluster = (block_from_end() * uint32_t{kClusterThreads} + threadIdx.x) / s.lanes;
  const int lane = threadIdx.x % s.lanes;
  const bool inside = cluster < s.clusters, has_vector = inside && lane < s.vectors;
  const uint32_t token = inside ? cluster / s.groups : 0, b = token / s.T, t = token % s.T;
  const int group = inside ? static_cast<int>(cluster % s.groups) : 0, head0 = group * s.heads;
  float gates[3] = {};
  if constexpr (kBranches == 3) {
#pragma unroll
    for (int k = 0; k < 3; ++k) gates[k] = gate.at(k, b, t, group);
  }
  const T *from = dout.row(b, t, head0) + lane * V, *from_branch[kBranches];
#pragma unroll
  for (int k = 0; k < kBranches; ++k) from_branch[k] = in.o[k].row(b, t, head0) + lane * V;
  float total[kBranches] = {}, kept[kBranches] = {}, kept_norm = 0;  // kept, kept_norm: results for this lane's head
  for (int first = 0; first < s.heads; first += kHeads) {
    uint4 upstream[kHeads], o[kHeads][kBranches];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const bool load = has_vector && first + i < s.heads;
      upstream[i] = load ? *reinterpret_cast<const uint4*>(from + (first + i) * dout.stride_h) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int k = 0; k < kBranches; ++k)
        o[i][k] = load ? *reinterpret_cast<const uint4*>(from_branch[k] + (first + i) * in.o[k].stride_h)
                       : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int h = first + i;
      if (h >= s.heads) break;  // uniform over the warp
      float x[V], y[kBranches][V], a[kBranches] = {}, squares = 0;
      as_floats<T>(x, upstream[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) squares = fmaf(x[j], x[j], squares);
#pragma unroll
      for (int k = 0; k < kBranches; ++k) {
        as_floats<T>(y[k], o[i][k]);
#pragma unroll
        for (int j = 0; j < V; ++j) a[k] = fmaf(x[j], y[k][j], a[k]);
      }
      if constexpr (kBranches == 3) {
        if (out.data != nullptr && has_vector) {
          gated_sum(x, gates, y);
          store_vector<V>(out.row(b, t, head0 + h) + lane * V, x);
        }
      }
      for (int offset = s.lanes / 2; offset > 0; offset /= 2) {
        squares += __shfl_xor_sync(kFullWarp, squares, offset);
#pragma unroll
        for (int k = 0; k < kBranches; ++k) a[k] += __shfl_xor_sync(kFullWarp, a[k], offset);
      }
      const int turn = h % s.lanes;
#pragma unroll
      for (int k = 0; k < kBranches; ++k) {
        total[k] += a[k];
        if (lane == turn) kept[k] = kBranches == 3 ? gates[k] * a[k] : a[k];
      }
      if (lane == turn) kept_norm = sqrtf(squares);
      if ((turn == s.lanes - 1 || h == s.heads - 1) && inside && lane <= turn) {
#pragma unroll
        for (int k = 0; k < kBranches; ++k) delta.at(k, b, t, head0 + h - turn + lane) = kept[k];
        if (norm.data != nullptr) norm.at(0, b, t, head0 + h - turn + lane) = kept_norm;
      }
    }
  }
  if constexpr (kBranches == 3) {
    if (inside && lane == 0) {
#pragma unroll
      for (int k = 0; k < 3; ++k) dgate.at(k, b, t, group) = total[k];
    }
  }
}

struct DeltaShape {
  int64_t tokens, T;          // B*T, T
  int heads, group, width;    // Hq, G, dv
  int lanes, tokens_per_cta;  // lanes per row, a power of two <= 32; tokens per CTA
};

// Backward of the gated sum for rows of any width, with the same results as delta_cluster_kernel. It computes a_k =
// dout . o_k for every row (b, t, h) and branch k. One branch: delta = a. Three branches: delta_k = gate_k * a_k, and
// dgate_k is a_k summed over the group's heads, for which shared memory holds a [3][the CTA's rows].
template <class T, int V, int kBranches>
__global__ void __launch_bounds__(kThreads)
    delta_kernel(Planes<float> dgate, Planes<float> delta, Planes<float> norm, Bthd<T> out, Bthd<const T> dout,
                 Branches<T> in, Planes<const float> gate, DeltaShape s) {
  float* const products = reinterpret_cast<float*>(dynamic_shared());
  const int64_t token0 = int64_t{block_from_end()} * s.tokens_per_cta;
  const int tokens = static_cast<int>(min(int64_t{s.tokens_per_cta}, s.tokens - token0)), rows = tokens * s.heads;
  const int lane = threadIdx.x % s.lanes, rows_per_warp = 32 / s.lanes;
  const int row_in_warp = threadIdx.x % 32 / s.lanes, step = kThreads / 32 * rows_per_warp;
  for (int base = threadIdx.x / 32 * rows_per_warp; base < rows; base += step) {  // uniform over the warp
    const int row = base + row_in_warp;
    const int64_t token = token0 + row / s.heads, b = token / s.T, t = token % s.T;
    const int h = row % s.heads;
    float a[kBranches] = {}, squares = 0;
    if (row < rows) {
      const T* d = dout.row(b, t, h);
      for (int column = lane * V; column < s.width; column += s.lanes * V) {
        float x[V], o[kBranches][V];
        load_vector<V>(x, d + column);
#pragma unroll
        for (int k = 0; k < kBranches; ++k) load_vector<V>(o[k], in.o[k].row(b, t, h) + column);
#pragma unroll
        for (int j = 0; j < V; ++j) squares = fmaf(x[j], x[j], squares);
#pragma unroll
        for (int k = 0; k < kBranches; ++k)
#pragma unroll
          for (int j = 0; j < V; ++j) a[k] = fmaf(x[j], o[k][j], a[k]);
        if constexpr (kBranches == 3) {
          if (out.data == nullptr) continue;
          const int g = h / s.group;
          gated_sum(x, {gate.at(0, b, t, g), gate.at(1, b, t, g), gate.at(2, b, t, g)}, o);
          store_vector<V>(out.row(b, t, h) + column, x);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kBranches; ++k)
      for (int offset = s.lanes / 2; offset > 0; offset /= 2) a[k] += __shfl_xor_sync(kFullWarp, a[k], offset);
    for (int offset = s.lanes / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(kFullWarp, squares, offset);
    if (lane != 0 || row >= rows) continue;
    if (norm.data != nullptr) norm.at(0, b, t, h) = sqrtf(squares);
#pragma unroll
    for (int k = 0; k < kBranches; ++k) {
      if constexpr (kBranches == 3) products[k * s.tokens_per_cta * s.heads + row] = a[k];
      delta.at(k, b, t, h) = kBranches == 3 ? gate.at(k, b, t, h / s.group) * a[k] : a[k];
    }
  }
  if constexpr (kBranches == 3) {
    __syncthreads();
    const int groups = s.heads / s.group;
    for (int i = threadIdx.x; i < 3 * tokens * groups; i += kThreads) {
      const int k = i / (tokens * groups), token_in_cta = i / groups % tokens, g = i % groups;
      const float* a = products + (k * s.tokens_per_cta + token_in_cta) * s.heads + g * s.group;
      float sum = 0;
      for (int h = 0; h < s.group; ++h) sum += a[h];
      const int64_t token = token0 + token_in_cta;
      dgate.at(k, token / s.T, token % s.T, g) = sum;
    }
  }
}

// Views a [B,T,H] tensor as a single plane (Planes, nsa/gpu/gate.cuh). An absent tensor has data = nullptr.
Planes<float> one_plane(const Tensor& t) {
  return t.empty() ? Planes<float>{} : Planes<float>{t.ptr<float>(), 0, t.stride[0], t.stride[1]};
}

// Queues backward of the gated sum, by delta_cluster_kernel if the shapes fit, else by delta_kernel. out, norm and,
// with one branch, dgate may be absent. group: query heads per group.
template <class T, int V, int kBranches>
void launch_delta(Context& ctx, const Planes<float>& dgate, const Planes<float>& delta, const Planes<float>& norm,
                  const Tensor& out, const ConstTensor& dout, const Branches<T>& in, const Planes<const float>& gate,
                  int64_t group) {
  const int64_t heads = dout.size(2), width = dout.size(3), tokens = dout.size(0) * dout.size(1);
  int lanes = 1;
  while (lanes < 32 && lanes * V < width) lanes *= 2;
  const Bthd<T> out_heads = out.empty() ? Bthd<T>{} : bthd<T>(out);
  if constexpr (V == kVector<T>) {
    const int64_t clusters = tokens * (heads / group);
    if (lanes * V >= width && clusters * lanes <= std::numeric_limits<uint32_t>::max() - kClusterThreads) {
      const ClusterShape s{static_cast<uint32_t>(clusters),      static_cast<uint32_t>(dout.size(1)),
                           static_cast<int>(heads / group),      static_cast<int>(group),
                           static_cast<int>(ceil_div(width, V)), lanes};
      return launch(ctx, "attention_delta", delta_cluster_kernel<T, kBranches>,
                    dim3(ceil_div(clusters * lanes, kClusterThreads)), kClusterThreads, 0, dgate, delta, norm,
                    out_heads, bthd<T>(dout), in, gate, s);
    }
  }
  // Whole tokens, so that each `lanes` lanes compute about three rows.
  const int64_t tokens_per_cta = std::max<int64_t>(1, 3 * (kThreads / lanes) / heads);
  const DeltaShape s{tokens,
                     dout.size(1),
                     static_cast<int>(heads),
                     static_cast<int>(group),
                     static_cast<int>(width),
                     lanes,
                     static_cast<int>(tokens_per_cta)};
  const size_t shared = kBranches == 3 ? 3 * tokens_per_cta * heads * sizeof(float) : 0;
  launch(ctx, "attention_delta", delta_kernel<T, V, kBranches>, dim3(ceil_div(s.tokens, tokens_per_cta)), kThreads,
         shared, dgate, delta, norm, out_heads, bthd<T>(dout), in, gate, s);
}

}  // namespace

void nsa_combine_forward(Context& ctx, Tensor out, const std::array<ConstTensor, 3>& o, ConstTensor gate) {
  const int heads = static_cast<int>(out.size(2)), group = heads / static_cast<int>(gate.size(3));
  dispatch_gpu_float(out.dtype, [&]<class T>() {
    dispatch_vector<T>(all_have_vectors(kVector<T>, out, o[0], o[1], o[2]), [&]<int V>() {
      const int64_t count = out.numel() / V;
      launch(ctx, "combine_forward", combine_forward_kernel<T, V>, dim3(ceil_div(count, kThreads)), kThreads, 0,
             bthd<T>(out), branches<T>(o), planes<const float>(gate), out.size(1), heads, group,
             static_cast<int>(out.size(3)) / V, count);
    });
  });
}

void nsa_combine_backward(Context& ctx, Tensor dgate, Tensor delta, ConstTensor dout,
                          const std::array<ConstTensor, 3>& o, ConstTensor gate, Tensor out, Tensor dout_norm) {
  dispatch_gpu_float(dout.dtype, [&]<class T>() {
    const bool vectors =
        all_have_vectors(kVector<T>, dout, o[0], o[1], o[2]) && (out.empty() || has_vectors(out, kVector<T>));
    dispatch_vector<T>(vectors, [&]<int V>() {
      launch_delta<T, V, 3>(ctx, planes<float>(dgate), planes<float>(delta), one_plane(dout_norm), out, dout,
                            branches<T>(o), planes<const float>(gate), dout.size(2) / gate.size(3));
    });
  });
}

void attention_delta(Context& ctx, Tensor delta, ConstTensor dout, ConstTensor o, Tensor dout_norm) {
  dispatch_gpu_float(dout.dtype, [&]<class T>() {
    dispatch_vector<T>(all_have_vectors(kVector<T>, dout, o), [&]<int V>() {
      launch_delta<T, V, 1>(ctx, {}, one_plane(delta), one_plane(dout_norm), {}, dout,
                            Branches<T>{{bthd<T>(o), {}, {}}}, {}, dout.size(2));
    });
  });
}

}  // namespace triad::cuda
