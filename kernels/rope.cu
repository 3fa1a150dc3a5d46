// Rotary position embedding on the GPU: the queries and the keys of all branches in one launch. Bound by memory: 4
// bytes an element in bf16 (queries 6 where their gradient comes in f32, and 4 / G for what the group shares). A thread
// rotates one vector of the first half of a head with its partner in the second half, so it may work in place; it does
// so for kTokens tokens, whose loads are in flight together. x of a CTA runs over the pairs of one token (of all heads:
// they share their angles, which after the first head come from L1), y over tokens.
#include <algorithm>

#include "kernels/bthd.cuh"
#include "kernels/rope.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kTokens = 2;

// Whether the V-element vectors of both halves are aligned.
bool has_vector_pairs(const ConstTensor& t, int V) { return has_vectors(t, V) && t.size(-1) % (2 * V) == 0; }

template <class Out, class In>
struct Heads {
  Bthd<Out> y;
  Bthd<const In> x;
  Bthd<const float> group;  // data null: nothing to add
  Bthd<Out> keys[3];        // in place
  int heads, heads_of_group, key_heads[3];
  int all_heads() const { return heads + key_heads[0] + key_heads[1] + key_heads[2]; }
};

struct Table {
  const float *cos, *sin;
  int64_t cos_stride, sin_stride;
};

template <int V, class T>
__device__ __forceinline__ void load_pair(float (&first)[V], float (&second)[V], const T* from, int half) {
  load_vector<V>(first, from);
  load_vector<V>(second, from + half);
}

template <class Out, class In, int V>
__global__ void __launch_bounds__(kThreads, 3)
    rope_kernel(Heads<Out, In> s, Table table, uint32_t rows, uint32_t T, int half, int pairs, float direction) {
  const uint32_t row0 = blockIdx.x * (blockDim.y * kTokens) + threadIdx.y;
  const int vectors = half / V;
  for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
    int h = pair / vectors;
    const int j = pair % vectors * V;
    const bool is_query = h < s.heads;
    Bthd<Out> to = s.y;
    if (!is_query) {
      h -= s.heads;
      to = s.keys[0];
      if (h >= s.key_heads[0]) {
        h -= s.key_heads[0];
        to = s.keys[1];
        if (h >= s.key_heads[1]) h -= s.key_heads[1], to = s.keys[2];
      }
    }
    float first[kTokens][V], second[kTokens][V];
    Out* place[kTokens];
#pragma unroll
    for (int k = 0; k < kTokens; ++k) {
      const uint32_t row = row0 + k * blockDim.y;
      if (row >= rows) break;
      const uint32_t b = row / T, t = row % T;
      place[k] = to.row(b, t, h) + j;
      if (is_query) {
        load_pair<V>(first[k], second[k], s.x.row(b, t, h) + j, half);
      } else {
        load_pair<V>(first[k], second[k], place[k], half);
      }
      if (is_query && s.group.data != nullptr) {
        float more_first[V], more_second[V];
        load_pair<V>(more_first, more_second, s.group.row(b, t, h / s.heads_of_group) + j, half);
#pragma unroll
        for (int i = 0; i < V; ++i) first[k][i] += more_first[i], second[k][i] += more_second[i];
      }
    }
#pragma unroll
    for (int k = 0; k < kTokens; ++k) {
      const uint32_t row = row0 + k * blockDim.y, t = row % T;
      if (row >= rows) break;
      float cos[V], sin[V];
      load_vector<V>(cos, table.cos + t * table.cos_stride + j);
      load_vector<V>(sin, table.sin + t * table.sin_stride + j);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float a = first[k][i], c = second[k][i], turn = direction * sin[i];
        first[k][i] = a * cos[i] - c * turn;
        second[k][i] = c * cos[i] + a * turn;
      }
      store_vector<V>(place[k], first[k]);
      store_vector<V>(place[k] + half, second[k]);
    }
  }
}

template <class Out, class In>
void rotate(Context& ctx, Tensor y, ConstTensor x, ConstTensor group, const RopeKeys& keys, ConstTensor cos,
            ConstTensor sin, int direction) {
  constexpr int kV = kVector<Out>;
  const auto fits = [](const ConstTensor& t) { return t.empty() || has_vector_pairs(t, kV); };
  const bool vectors = fits(y) && fits(x) && fits(group) && std::all_of(keys.begin(), keys.end(), fits) &&
                       all_have_vectors(kV, cos, sin);
  Heads<Out, In> s{bthd<Out>(y), bthd<In>(x), {}, {}, static_cast<int>(x.size(2)), 1, {}};
  if (!group.empty()) s.group = bthd<float>(group), s.heads_of_group = static_cast<int>(x.size(2) / group.size(2));
  for (int i = 0; i < 3; ++i)
    if (!keys[i].empty()) s.keys[i] = bthd<Out>(keys[i]), s.key_heads[i] = static_cast<int>(keys[i].size(2));
  const uint32_t rows = static_cast<uint32_t>(x.size(0) * x.size(1));
  const int half = static_cast<int>(x.size(3) / 2);
  dispatch_vector<Out>(vectors, [&]<int V>() {
    const int pairs = s.all_heads() * half / V, across = std::clamp(pairs, 1, kThreads), down = kThreads / across;
    launch(ctx, direction > 0 ? "rope forward" : "rope backward", rope_kernel<Out, In, V>,
           dim3(ceil_div(rows, down * kTokens)), dim3(across, down), 0, s,
           Table{cos.ptr<float>(), sin.ptr<float>(), cos.stride[0], sin.stride[0]}, rows,
           static_cast<uint32_t>(x.size(1)), half, pairs, direction);
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
