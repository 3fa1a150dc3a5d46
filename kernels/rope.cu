// Rotary position embedding on the GPU: the queries and the keys of all branches in one launch. Bound by memory: 4
// bytes an element in bf16 (queries 6 where their gradient comes in f32, and 4 / G for what the group shares). A thread
// has one vector of the first half of a head and its partner in the second half, so it may work in place, for every
// head of one token: the angles are the same and come once. The loads of kBatch heads are in flight together. (A thread
// a head, tokens one after the other, took 1.6 times the floor: the angles' latency came on top of the heads'.)
#include <algorithm>

#include "kernels/bthd.cuh"
#include "kernels/rope.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 128;

// Whether the V-element vectors of both halves are aligned.
bool has_vector_pairs(const ConstTensor& t, int V) { return has_vectors(t, V) && t.size(-1) % (2 * V) == 0; }

template <class Out, class In>
struct Heads {
  Bthd<Out> y;
  Bthd<const In> x;
  Bthd<const float> shared;  // by the heads of a group; or nothing, and one group
  Bthd<Out> keys[3];         // in place
  int groups, heads_of_group, key_heads[3];
};

struct Table {
  const float *cos, *sin;
  int64_t cos_stride, sin_stride;
};

// V elements as they lie in memory, for while they are on their way.
template <class T, int V>
struct Held {
  static constexpr int kWords = V == 1 ? 1 : V * static_cast<int>(sizeof(T)) / 16;
  using Word = std::conditional_t<V == 1, T, uint4>;
  Word words[kWords];
  __device__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const Word*>(from)[i];
  }
  __device__ void get(float (&x)[V]) const { load_vector<V>(x, reinterpret_cast<const T*>(words)); }
};

template <int V>
struct Turn {
  float cos[V], sin[V];
  // The heads 0 .. count - 1, from from(h) to to(h); what they share is added first.
  template <int kBatch, class In, bool kShared, class From, class To>
  __device__ __forceinline__ void operator()(int count, int half, From&& from, To&& to, const float (&shared)[2][V]) {
    for (int first = 0; first < count; first += kBatch) {
      Held<In, V> held[kBatch][2];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= count) break;
        const In* head = from(first + i);
        held[i][0].load(head);
        held[i][1].load(head + half);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= count) break;
        float a[V], c[V];
        held[i][0].get(a), held[i][1].get(c);
#pragma unroll
        for (int k = 0; k < V; ++k) {
          const float u = kShared ? a[k] + shared[0][k] : a[k], v = kShared ? c[k] + shared[1][k] : c[k];
          a[k] = u * cos[k] - v * sin[k];
          c[k] = v * cos[k] + u * sin[k];
        }
        auto* head = to(first + i);
        store_vector<V>(head, a);
        store_vector<V>(head + half, c);
      }
    }
  }
};

template <class Out, class In, int V, bool kShared>
__global__ void __launch_bounds__(kThreads, kShared ? 4 : 6)
    rope_kernel(Heads<Out, In> s, Table table, uint32_t rows, uint32_t T, uint32_t vectors, float direction) {
  constexpr int kBatch = 3, kQueryBatch = V * sizeof(In) > 16 ? 2 : 3;
  const uint64_t place = blockIdx.x * uint64_t{kThreads} + threadIdx.x;
  const uint32_t row = static_cast<uint32_t>(place / vectors);
  if (row >= rows) return;
  const uint32_t b = row / T, t = row % T, half = vectors * V, j = static_cast<uint32_t>(place % vectors) * V;
  Turn<V> turn;
  load_vector<V>(turn.cos, table.cos + t * table.cos_stride + j);
  load_vector<V>(turn.sin, table.sin + t * table.sin_stride + j);
#pragma unroll
  for (int k = 0; k < V; ++k) turn.sin[k] *= direction;

  float shared[2][V] = {};
  for (int g = 0; g < s.groups; ++g) {
    if constexpr (kShared) {
      load_vector<V>(shared[0], s.shared.row(b, t, g) + j);
      load_vector<V>(shared[1], s.shared.row(b, t, g) + j + half);
    }
    const In* from = s.x.row(b, t, static_cast<int64_t>(g) * s.heads_of_group) + j;
    Out* to = s.y.row(b, t, static_cast<int64_t>(g) * s.heads_of_group) + j;
    turn.template operator()<kQueryBatch, In, kShared>(
        s.heads_of_group, half, [&](int h) { return from + h * s.x.stride_h; },
        [&](int h) { return to + h * s.y.stride_h; }, shared);
  }
  const auto key = [&](int h) {
    Bthd<Out> k = s.keys[0];
    if (h >= s.key_heads[0]) {
      h -= s.key_heads[0], k = s.keys[1];
      if (h >= s.key_heads[1]) h -= s.key_heads[1], k = s.keys[2];
    }
    return k.row(b, t, h) + j;
  };
  turn.template operator()<kBatch, Out, false>(s.key_heads[0] + s.key_heads[1] + s.key_heads[2], half, key, key,
                                               shared);
}

template <class Out, class In>
void rotate(Context& ctx, Tensor y, ConstTensor x, ConstTensor shared, const RopeKeys& keys, ConstTensor cos,
            ConstTensor sin, int direction) {
  constexpr int kV = kVector<Out>;
  const auto fits = [](const ConstTensor& t) { return t.empty() || has_vector_pairs(t, kV); };
  const bool vectors = fits(y) && fits(x) && fits(shared) && std::all_of(keys.begin(), keys.end(), fits) &&
                       all_have_vectors(kV, cos, sin);
  Heads<Out, In> s{bthd<Out>(y), bthd<In>(x), {}, {}, 1, static_cast<int>(x.size(2)), {}};
  if (!shared.empty()) {
    s.shared = bthd<float>(shared);
    s.groups = static_cast<int>(shared.size(2)), s.heads_of_group /= s.groups;
  }
  for (int i = 0; i < 3; ++i)
    if (!keys[i].empty()) s.keys[i] = bthd<Out>(keys[i]), s.key_heads[i] = static_cast<int>(keys[i].size(2));
  const int64_t rows = x.size(0) * x.size(1), half = x.size(3) / 2;
  dispatch_vector<Out>(vectors, [&]<int V>() {
    launch(ctx, direction > 0 ? "rope forward" : "rope backward",
           shared.empty() ? rope_kernel<Out, In, V, false> : rope_kernel<Out, In, V, true>,
           dim3(ceil_div(rows * (half / V), kThreads)), dim3(kThreads), 0, s,
           Table{cos.ptr<float>(), sin.ptr<float>(), cos.stride[0], sin.stride[0]}, rows, x.size(1), half / V,
           direction);
  });
}

}  // namespace

void rope(Context& ctx, Tensor y, ConstTensor x, ConstTensor x_group, const RopeKeys& keys, ConstTensor cos,
          ConstTensor sin, int direction) {
  dispatch_gpu_float(y.dtype, [&]<class T>() {
    if (x.dtype == y.dtype)
      rotate<T, T>(ctx, y, x, x_group, keys, cos, sin, direction);
    else
      rotate<T, float>(ctx, y, x, x_group, keys, cos, sin, direction);
  });
}

}  // namespace triad::cuda
