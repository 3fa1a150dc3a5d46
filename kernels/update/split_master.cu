// Splits and joins masters on the GPU, bound by memory: 8 bytes and a bit for each. A thread has 8 adjacent masters.
#include "kernels/update/masters.cuh"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;

// Calls f.operator()<V>(i) for this thread's vector, and f.operator()<1>(i) for the element it has among the last n %
// V.
template <int V, class F>
__device__ __forceinline__ void for_each_vector(int64_t n, F&& f) {
  const int64_t vectors = n / V, thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread < vectors) f.template operator()<V>(thread * V);
  if (thread < n - vectors * V) f.template operator()<1>(vectors * V + thread);
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    join_master_kernel(float* __restrict__ master, Masters<uint16_t> split, int64_t n) {
  for_each_vector<V>(n, [&]<int N>(int64_t i) {
    float x[N];
    split.load<N>(x, i);
    store_vector<N>(master + i, x);
  });
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    split_master_kernel(Masters<uint16_t> split, const float* __restrict__ master, int64_t n) {
  for_each_vector<V>(n, [&]<int N>(int64_t i) {
    float x[N];
    load_vector<N>(x, master + i);
    split.store<N>(i, x, split.tie_bits<N>(i));
  });
}

template <class F>
void with_vectors(const ConstTensor& master, const SplitMaster& s, F&& f) {
  dispatch_vector<__nv_bfloat16>(is_aligned(master) && has_master_vectors(s.remainder, s.weights, s.ties), f);
}

}  // namespace

void join_master(Context& ctx, Tensor master, const SplitMaster& s) {
  const int64_t n = master.numel();
  with_vectors(master, s, [&]<int V>() {
    launch(ctx, "join_master", join_master_kernel<V>, dim3(ceil_div(n, kThreads * V)), dim3(kThreads), 0,
           master.ptr<float>(), Masters<uint16_t>(s.remainder, s.weights, s.ties), n);
  });
}

void split_master(Context& ctx, const SplitMaster& s, ConstTensor master) {
  const int64_t n = master.numel();
  with_vectors(master, s, [&]<int V>() {
    launch(ctx, "split_master", split_master_kernel<V>, dim3(ceil_div(n, kThreads * V)), dim3(kThreads), 0,
           Masters<uint16_t>(s.remainder, s.weights, s.ties), master.ptr<float>(), n);
  });
}

}  // namespace triad::cuda
