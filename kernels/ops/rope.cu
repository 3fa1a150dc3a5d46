// Rotary position embedding on the GPU, for the queries and all branches' keys in one launch. Bound by memory: 4 bytes
// an element in bf16 (6 for queries whose gradient arrives in f32, and 4 / G more for a gradient that a group of G
// heads shares). A thread rotates one vector in a head's first half together with the matching vector in the second
// half, so it can work in place. It does this for two heads that are half a token apart and have the same angles, and
// issues all loads before it computes. threadIdx.x runs over a token's pairs, which are adjacent in memory, threadIdx.y
// over tokens.
#include <algorithm>

#include "kernels/common/block_order.cuh"
#include "kernels/common/bthd.cuh"
#include "kernels/ops/rope.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 2;  // heads per thread

// Whether both halves of a head consist of aligned V-element vectors.
bool has_vector_pairs(const ConstTensor& t, int V) { return has_vectors(t, V) && t.size(-1) % (2 * V) == 0; }

template <class Out, class In>
struct Heads {
  Bthd<Out> y;
  Bthd<const In> x;
  Bthd<const float> shared;  // a gradient shared by all heads in a group
  Bthd<Out> keys[3];         // the branches' keys, rotated in place
  int heads, heads_of_group, key_heads[3];
  int all_heads() const { return heads + key_heads[0] + key_heads[1] + key_heads[2]; }
};

struct Table {
  const float *cos, *sin;
  int64_t cos_stride, sin_stride;
  const int32_t* begin;  // [rows] the first token in each token's document, negative if before the rows; nullptr: 0 for
                         // all
};

// V elements of type T or float in registers, kept as loaded.
template <int V>
struct Held {
  std::conditional_t<V == 1, float, uint4> words[V == 1 ? 1 : V / 4];
  template <class T>
  __device__ void load(const T* from) {
    if constexpr (V == 1) {
      words[0] = to_float(*from);
    } else {
#pragma unroll
      for (int i = 0; i < V / kVector<T>; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  }
  template <class T>
  __device__ void get(float (&x)[V]) const {
    if constexpr (V == 1) {
      x[0] = words[0];
    } else {
      load_vector<V>(x, reinterpret_cast<const T*>(words));
    }
  }
};

template <class Out, class In, int V, bool kShared>
__global__ void __launch_bounds__(kThreads, kShared || V * sizeof(In) > 16 ? 2 : 3)
    rope_kernel(Heads<Out, In> s, Table table, uint32_t rows, uint32_t T, int half, int all_heads, float direction) {
  const uint32_t row = block_from_end() * blockDim.y + threadIdx.y, b = row / T, t = row % T;
  if (row >= rows) return;
  const uint32_t at = table.begin == nullptr ? t : t - table.begin[row];  // the token's position
  const int vectors = half / V, head_step = ceil_div(all_heads, kHeads);
  for (int pair = threadIdx.x; pair < head_step * vectors; pair += blockDim.x) {
    const int h0 = pair / vectors, j = pair % vectors * V;
    Held<V> held[kHeads][2], shared[kHeads][2];
    Out* place[kHeads];
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      int h = h0 + k * head_step;
      if (h < s.heads) {
        const In* from = s.x.row(b, t, h) + j;
        held[k][0].load(from), held[k][1].load(from + half);
        place[k] = s.y.row(b, t, h) + j;
        if constexpr (kShared) {
          const float* more = s.shared.row(b, t, h / s.heads_of_group) + j;
          shared[k][0].load(more), shared[k][1].load(more + half);
        }
      } else if (h < all_heads) {
        h -= s.heads;
        Bthd<Out> keys = s.keys[0];
        if (h >= s.key_heads[0]) {
          h -= s.key_heads[0], keys = s.keys[1];
          if (h >= s.key_heads[1]) h -= s.key_heads[1], keys = s.keys[2];
        }
        place[k] = keys.row(b, t, h) + j;
        held[k][0].load(place[k]), held[k][1].load(place[k] + half);
      }
    }
    float cos[V], sin[V];
    load_vector<V>(cos, table.cos + at * table.cos_stride + j);
    load_vector<V>(sin, table.sin + at * table.sin_stride + j);
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      const int h = h0 + k * head_step;
      if (h >= all_heads) break;
      float first[V], second[V];
      if (h < s.heads) {
        held[k][0].template get<In>(first), held[k][1].template get<In>(second);
        if constexpr (kShared) {
          float more_first[V], more_second[V];
          shared[k][0].template get<float>(more_first), shared[k][1].template get<float>(more_second);
#pragma unroll
          for (int i = 0; i < V; ++i) first[i] += more_first[i], second[i] += more_second[i];
        }
      } else {
        held[k][0].template get<Out>(first), held[k][1].template get<Out>(second);
      }
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float u = first[i], v = second[i], turn = direction * sin[i];
        first[i] = u * cos[i] - v * turn;
        second[i] = v * cos[i] + u * turn;
      }
      store_vector<V>(place[k], first);
      store_vector<V>(place[k] + half, second);
    }
  }
}

template <class Out, class In>
void rotate(Context& ctx, Tensor y, ConstTensor x, ConstTensor shared, const RopeKeys& keys, ConstTensor cos,
            ConstTensor sin, ConstTensor begin, int direction) {
  constexpr int kV = kVector<Out>;
  const auto fits = [](const ConstTensor& t) { return t.empty() || has_vector_pairs(t, kV); };
  const bool vectors = fits(y) && fits(x) && fits(shared) && std::all_of(keys.begin(), keys.end(), fits) &&
                       all_have_vectors(kV, cos, sin);
  Heads<Out, In> s{bthd<Out>(y), bthd<In>(x), {}, {}, static_cast<int>(x.size(2)), 1, {}};
  if (!shared.empty()) s.shared = bthd<float>(shared), s.heads_of_group = static_cast<int>(x.size(2) / shared.size(2));
  for (int i = 0; i < 3; ++i)
    if (!keys[i].empty()) s.keys[i] = bthd<Out>(keys[i]), s.key_heads[i] = static_cast<int>(keys[i].size(2));
  const int64_t rows = x.size(0) * x.size(1), half = x.size(3) / 2;
  TRIAD_CHECK(begin.empty() || begin.contiguous(), "rope: begin is strided: {}", begin.str());
  const int32_t* const begins = begin.empty() ? nullptr : begin.ptr<int32_t>();
  dispatch_vector<Out>(vectors, [&]<int V>() {
    const int64_t pairs = ceil_div(s.all_heads(), kHeads) * (half / V);
    const int64_t across = std::clamp<int64_t>(pairs, 1, kThreads), down = kThreads / across;
    launch(ctx, direction > 0 ? "rope forward" : "rope backward",
           shared.empty() ? rope_kernel<Out, In, V, false> : rope_kernel<Out, In, V, true>, dim3(ceil_div(rows, down)),
           dim3(across, down), 0, s, Table{cos.ptr<float>(), sin.ptr<float>(), cos.stride[0], sin.stride[0], begins},
           rows, x.size(1), half, s.all_heads(), direction);
  });
}

}  // namespace

void rope(Context& ctx, Tensor y, ConstTensor x, ConstTensor x_group, const RopeKeys& keys, ConstTensor cos,
          ConstTensor sin, ConstTensor begin, int direction) {
  dispatch_gpu_float(y.dtype, [&]<class T>() {
    if (x.dtype == y.dtype)
      rotate<T, T>(ctx, y, x, x_group, keys, cos, sin, begin, direction);
    else
      rotate<T, float>(ctx, y, x, x_group, keys, cos, sin, begin, direction);
  });
}

}  // namespace triad::cuda
